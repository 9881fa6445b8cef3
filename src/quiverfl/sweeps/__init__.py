"""Many experiments as one: what to run, in which processes, and how long it will take."""
