"""Where cells run: in processes of this machine, on a Ray cluster, in a Slurm array.

A cell is started by an order and ends with a code and a message, wherever that is; its run folder
is the truth. So a place to run them only has to start orders, say what happens meanwhile, and start
those again that it lost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from quiverfl.errors import QuiverError
from quiverfl.sweeps.layout import Places
from quiverfl.sweeps.plan import Cell

Ending: TypeAlias = Literal["finished", "diverged", "failed"]
Order: TypeAlias = dict[str, Any]
"""What a process needs to run a cell: its config, the paths folder and log, and `until`: the round
to stop after, or None."""

DIVERGED, REFUSED, BROKEN, STOPPED = 3, 2, 1, 143
"""How a cell ends if not with 0; as the command line's exit codes."""

Memory: TypeAlias = Callable[[Sequence[Cell]], Mapping[str, int]]
"""Bytes that cells need, by name, as far as it is known."""


@dataclass(frozen=True)
class Needs:
    """Of every cell, on a cluster."""

    cpus: float = 1
    gpus: float = 0
    memory: Memory = lambda cells: {}

    def __post_init__(self) -> None:
        if not self.cpus > 0:
            raise QuiverError(f"--cpus {self.cpus:g}: a cell needs more than 0.")
        if self.gpus < 0:
            raise QuiverError(f"--gpus {self.gpus:g}: it cannot be negative.")

    @property
    def threads(self) -> int:
        return max(1, math.ceil(self.cpus))


@dataclass(frozen=True)
class Outcome:
    """How a cell ended."""

    cell: Cell
    ending: Ending
    seconds: float = 0.0
    message: str = ""


class Watcher(Protocol):
    """Is told what happens, from several threads."""

    def started(self, cell: Cell) -> None: ...
    def restarted(self, cell: Cell, why: str) -> None: ...
    def progressed(self, cell: Cell, rounds: int, scores: dict[str, float]) -> None: ...
    def ended(self, outcome: Outcome) -> None: ...


class Where(AbstractContextManager["Where"], Protocol):
    """A place to run cells; entered before it is used, and left when all is over."""

    @property
    def at_a_time(self) -> int:
        """How many cells run side by side, as far as it is known."""

    @property
    def threads(self) -> int:
        """Of a cell whose configuration does not say."""

    @property
    def handed_over(self) -> str:
        """What to say if cells are not over when `run` returns; nothing where it waits for them."""

    def run(
        self,
        cells: Sequence[Cell],
        places: Places,
        watcher: Watcher,
        until: Mapping[str, int] | None = None,
    ) -> list[Outcome]:
        """Run them all. Ctrl-C ends them; what they had written is resumed by the next call.

        `until` has the rounds, by the name of a cell, after which it is left with a checkpoint.
        """


def order_for(cell: Cell, places: Places, threads: int, until: int | None = None) -> Order:
    config = cell.config.with_values([("run.threads", cell.config.run.threads or threads)])
    paths = {"folder": str(places.run(cell)), "log": str(places.log(cell))}
    return {**paths, "until": until, "config": config.model_dump(mode="json")}


def conclude(cell: Cell, places: Places, code: int, message: str, begin: float) -> Outcome:
    """Write down how a cell ended that was started at `begin`, by the monotonic clock."""
    seconds = time.monotonic() - begin
    if code == 0:
        places.forget_failure(cell)
        return Outcome(cell, "finished", seconds, message)
    places.note_failure(cell, message, code)
    return Outcome(cell, "diverged" if code == DIVERGED else "failed", seconds, message)


def check_jobs(jobs: int | None) -> None:
    if jobs is not None and jobs < 1:
        raise QuiverError(f"--jobs {jobs}: it must be at least 1.")


def make_folders(places: Places) -> None:
    for name in ("cells", "logs"):
        folder: Path = places.root / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise QuiverError(f"{folder}: cannot be made: {error.strerror}.") from error
