"""Where data sets come from: one file per format, each a function (…) → Dataset."""
