"""The same work in other frameworks, installed into throw-away environments."""

from benchmarks.frameworks.compare import figures, install

__all__ = ["figures", "install"]
