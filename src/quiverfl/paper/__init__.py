"""The paper's experiments: its tables, its figures and its theory."""
