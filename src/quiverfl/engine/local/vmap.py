"""A method's functions for stacked clients; errors in them become a sentence."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quiverfl.errors import QuiverError
from quiverfl.types import Flags

LIBRARIES = (str(Path(__file__).parents[1]), str(Path(inspect.getfile(torch)).parent))
"""Folders whose lines are not the author's: the engine and torch."""
RULES = (
    "A method's functions are written for one client: its vectors have one axis, and they may use "
    "tensor operations only, no if on a value, no .item(), no random numbers, nothing in place."
)


def vmap_clients(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for all clients of a group at once."""
    lifted = torch.vmap(function)

    def call(*stacked: Any) -> Any:
        try:
            return lifted(*stacked)
        except (QuiverError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever an author's function raises is theirs to see
            raise method_error(function, error) from error

    return call


def method_error(function: Callable[..., Any], error: BaseException) -> QuiverError:
    """The error, its line in the author's file, and the rules for a method's function."""
    first = str(error).splitlines()[0] if str(error) else ""
    return QuiverError(
        f"{function_name(function)} failed{_find_line(error)}: {type(error).__name__}: "
        f"{first.rstrip('.')}. {RULES}"
    )


def _find_line(error: BaseException) -> str:
    """The innermost line of the author's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(LIBRARIES):
            return f" in {Path(frame.filename).name}, line {frame.lineno}"
    return ""


def function_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def select_rows(chosen: Flags, theirs: Tensor, others: Tensor) -> Tensor:
    """One leaf of all clients: `theirs` of the chosen ones, `others` of the rest."""
    shape = (-1,) + (1,) * (others.ndim - 1)
    flags = torch.from_numpy(chosen).to(others.device).view(shape)
    return torch.where(flags, theirs.to(others), others)
