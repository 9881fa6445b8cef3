"""Quiver: decentralized personalized federated learning over directed graphs.

The public names are listed in `__init__.pyi`. Each is imported when it is first used, so that a
command which needs no torch does not wait for it.
"""

from functools import cache
from importlib import import_module

__version__ = "0.3.0"

_RENAMED = {
    "Looks": "ReportSpec",
    "Moment": "StepInfo",
    "Once": "SingleStep",
    "Point": "Params",
    "Seen": "ModelOutputs",
    "Swept": "SweepResult",
    "View": "ReportView",
}
"""Public names of versions before 0.3."""


@cache
def _public_names() -> dict[str, str]:
    """Every public name with its module, as the stub lists them."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def __getattr__(name: str) -> object:
    if name == "__all__":
        return sorted(_public_names())
    if name.startswith("__"):
        raise AttributeError(f"module 'quiverfl' has no attribute {name!r}")
    if name in _RENAMED:
        raise AttributeError(f"quiverfl.{name} is now called quiverfl.{_RENAMED[name]}")
    names = _public_names()
    if name in names:
        value = getattr(import_module(names[name]), name)
        if isinstance(value, type):
            import_module("quiverfl.support.cards").explain(value)
        globals()[name] = value  # the next use finds it there
        return value
    if name in {module.split(".")[1] for module in names.values()}:
        return import_module(f"quiverfl.{name}")
    raise AttributeError(f"module 'quiverfl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_public_names()})
