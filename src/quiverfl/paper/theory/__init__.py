"""DFedPGP's theorem on a problem with known constants: measured, not quoted.

Every number comes out of `simulate` running the method itself. `measure.measure` runs it all.
"""
