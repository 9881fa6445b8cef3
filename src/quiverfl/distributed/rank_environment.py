"""Who this process is among the ranks, as torchrun or `quiver run --ranks` told it. Without torch.

Variables have the names that torchrun gives them.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from quiverfl.errors import QuiverError

STORE = "QUIVER_RANK_STORE"
"""A file where the processes of `quiver run --ranks` meet; torchrun has a way of its own."""
TIED = "QUIVER_RANK_TIED"
"""Set where a rank's standard input is held by whoever started it: it ends with that process."""
TIMEOUT = "QUIVER_RANK_TIMEOUT"
PATIENCE = 1800.0
"""Seconds that a rank waits for another one, unless $QUIVER_RANK_TIMEOUT says otherwise."""


def world_size() -> int:
    """How many ranks this process was started among: 1 unless torchrun or `--ranks` did."""
    return _number("WORLD_SIZE", 1)


def own_rank() -> int:
    return _number("RANK", 0) if world_size() > 1 else 0


def speaks() -> bool:
    """Whether this process says what went wrong: the first of its machine."""
    return world_size() == 1 or _number("LOCAL_RANK", 0) == 0


def attempt() -> int:
    """How often the ranks were started again after one of them had died."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0)


def end_rank(code: int) -> NoReturn:
    """End this process at once: everything it had to write is written.

    Threads of torch.distributed that outlive Python's own end may abort a rank that has done all
    its work ("terminate called without an active exception"), and it would count as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def patience() -> float:
    text = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(text) if text else PATIENCE
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise QuiverError(f"{TIMEOUT} = {text!r}: it must be a number of seconds above 0.")
    return seconds


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default
