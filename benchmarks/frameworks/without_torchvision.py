"""Stands in for torchvision, which others import for data sets and models that are not used here.

The index may hold no build of it that fits this torch, and nothing that is timed would call it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock

NAME = "torchvision"


class _Stand(ModuleType):
    """A module that has whatever is asked of it."""

    __path__ = ()  # a package

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = fullname.partition(".")[0] == NAME
        return ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stand(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder())
