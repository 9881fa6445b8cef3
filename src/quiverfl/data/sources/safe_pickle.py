"""Pickles that can hold arrays, lists, dicts, numbers and text, and can do nothing.

An ordinary pickle may run any program when it is loaded. The Python version of CIFAR needs four
names, all harmless; anything else is refused.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy._core.multiarray import _reconstruct

from quiverfl.data.sources.file_checks import read_file
from quiverfl.errors import QuiverError


def _latin1(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in old pickles: text and the name of this one encoding."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"encoding {encoding!r}")
    return text.encode("latin1")


ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin1,
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return ALLOWED[module, name]


def load_pickle(path: Path, content: bytes | None = None) -> Any:
    """The value in a pickle of Python 2 or 3, with its text as bytes where Python 2 wrote it."""
    content = read_file(path) if content is None else content
    try:
        return _Restricted(io.BytesIO(content), encoding="bytes").load()
    except pickle.UnpicklingError as error:
        raise QuiverError(
            f"{path} is not a pickle of plain arrays ({error}): it is truncated, damaged or not "
            "what it claims to be, and was not loaded."
        ) from error
    except Exception as error:
        # Damaged pickles raise nearly anything; none of it is of use to a person.
        raise QuiverError(
            f"{path} is truncated or damaged ({type(error).__name__}: {error})."
        ) from error
