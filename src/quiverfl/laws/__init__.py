"""The laws that every method keeps, tried on federations of six clients.

docs/explanation/concepts.md lists them.

problem      the federation, the graphs a method is tried on, and least squares with a known optimum
round_laws   laws about single rounds
run_laws     laws about whole runs
check        all of them for one method, with a sentence for each that it breaks
"""
