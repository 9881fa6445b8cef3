"""What holds for every test: one thread, and no module of one test's folder seen by another."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Tests run side by side, and tiny tensors gain nothing from more.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_modules_are_forgotten() -> Iterator[None]:
    """Two tests may write files of one name; in one process Python would import the first for both.

    Everything imported from a temporary folder goes, as it would with the process.
    """
    before = set(sys.modules)
    yield
    temporary = Path(tempfile.gettempdir()).resolve()
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).resolve().is_relative_to(temporary):
            del sys.modules[name]
