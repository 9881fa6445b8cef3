"""What holds for every test: one thread, Ctrl-C arrives, modules of other tests are not seen."""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Tests run side by side, and tiny tensors gain nothing from more.
torch.set_num_threads(1)
# A shell that starts tests in the background has them ignore Ctrl-C, and so whatever they start.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
CLONE = Path(__file__).resolve().parents[1]
TEMPORARY = Path(tempfile.gettempdir()).resolve()


@pytest.fixture(autouse=True)
def _own_modules_are_forgotten() -> Iterator[None]:
    """Two tests may write files of one name; in one process Python would import the first for both.

    Everything imported from a temporary folder goes, as it would with the process; Quiver itself
    stays, wherever it was cloned to.
    """
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        place = Path(file).resolve() if file else CLONE
        if place.is_relative_to(TEMPORARY) and not place.is_relative_to(CLONE):
            del sys.modules[name]
