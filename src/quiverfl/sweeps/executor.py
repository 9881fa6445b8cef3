"""Executors run the cells of a sweep: in local processes, on a Ray cluster, in a Slurm array.

An order starts a cell; a code and a message end it. The run folder is the truth. An executor
therefore only starts orders, reports progress, and restarts cells whose process or node died.

A cell never runs in the process that watches it. Whatever the cell prints, breaks or uses up
stays in its own process (`python -m quiverfl.sweeps.job`), which ends by itself as soon as nobody
watches.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeAlias

from quiverfl.errors import QuiverError
from quiverfl.runs.experiment import DatasetCache, digest_available_inputs
from quiverfl.runs.folder import RunFolder
from quiverfl.runs.provenance import command_environment
from quiverfl.sweeps.plan import Cell, SweepFolder

Ending: TypeAlias = Literal["finished", "diverged", "failed"]
Order: TypeAlias = dict[str, Any]
"""What a process needs to run a cell: `config`, the paths `folder` and `log`, and `until`: the
round to stop after, or None."""

DIVERGED, REFUSED, BROKEN, STOPPED = 3, 2, 1, 143
"""Codes of cells that did not finish, the same as the exit codes of the command line."""

Memory: TypeAlias = Callable[[Sequence[Cell]], Mapping[str, int]]
"""Returns the bytes that cells need, by name; unknown ones are left out."""


@dataclass(frozen=True)
class CellNeeds:
    """Resources that each cell asks a cluster for."""

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
    """Is notified of progress, from several threads."""

    def on_cell_start(self, cell: Cell) -> None: ...
    def on_cell_restart(self, cell: Cell, why: str) -> None: ...
    def on_cell_progress(self, cell: Cell, rounds: int, scores: dict[str, float]) -> None: ...
    def on_cell_end(self, outcome: Outcome) -> None: ...


class SweepExecutor(AbstractContextManager["SweepExecutor"], Protocol):
    """Runs cells. It is entered before use and left when all cells are over."""

    @property
    def at_a_time(self) -> int:
        """How many cells run side by side, if that is known."""

    @property
    def threads(self) -> int:
        """Threads of a cell whose configuration does not set run.threads."""

    @property
    def submission(self) -> str:
        """Tells how the cells run after `run` has returned; empty if `run` waits for them."""

    def run(
        self,
        cells: Sequence[Cell],
        folder: SweepFolder,
        watcher: Watcher,
        until: Mapping[str, int] | None = None,
    ) -> list[Outcome]:
        """Run all cells. Ctrl-C ends them, and the next call resumes them.

        `until` has the rounds, by the name of a cell, after which it is left with a checkpoint.
        """


def make_order(cell: Cell, folder: SweepFolder, threads: int, until: int | None = None) -> Order:
    config = cell.config.with_values([("run.threads", cell.config.run.threads or threads)])
    paths = {"folder": str(folder.run(cell)), "log": str(folder.log(cell))}
    return {**paths, "until": until, "config": config.model_dump(mode="json")}


def conclude(cell: Cell, folder: SweepFolder, code: int, message: str, begin: float) -> Outcome:
    """Record how a cell ended that was started at `begin`, by the monotonic clock."""
    seconds = time.monotonic() - begin
    if code == 0:
        folder.forget_failure(cell)
        return Outcome(cell, "finished", seconds, message)
    folder.note_failure(cell, message, code)
    return Outcome(cell, "diverged" if code == DIVERGED else "failed", seconds, message)


def check_jobs(jobs: int | None) -> None:
    if jobs is not None and jobs < 1:
        raise QuiverError(f"--jobs {jobs}: it must be at least 1.")


def make_folders(folder: SweepFolder) -> None:
    for name in ("cells", "logs"):
        path: Path = folder.root / name
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise QuiverError(f"{path}: cannot be made: {error.strerror}.") from error


class CellProcess:
    """A process that runs one cell after the other."""

    def __init__(self, threads: int, folder: Path | None = None) -> None:
        """Start in the directory `folder`, where Python looks for your own code first."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "quiverfl.sweeps.job"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, **command_environment(), "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,  # Ctrl-C is for the sweep alone
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def follow(self, order: Order) -> Iterator[dict[str, Any]]:
        """Yield its reports while it runs a cell; the last one has `ended` and `message`.

        If the process dies, the last report says so.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it died between two cells
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            report = json.loads(line)
            yield report
            if "ended" in report:
                return
        self.end()
        code = self._process.returncode
        yield {"ended": code or 1, "message": _explain_death(code)}

    def end(self) -> None:
        """Close its standard input, which ends it, and wait."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.wait()

    def kill(self) -> None:
        self._process.kill()


def _explain_death(code: int) -> str:
    if code < 0:
        return f"its process was ended by signal {-code}; perhaps memory ran out"
    return f"its process ended with code {code}"


def select_pending(cells: Iterable[Cell], folder: SweepFolder, retry: bool = False) -> list[Cell]:
    """Return the cells to run. A diverged one would only diverge again, so it needs `retry`."""
    over = {"finished"} if retry else {"finished", "diverged"}
    unique = {cell.name: cell for cell in cells}
    return [cell for cell in unique.values() if folder.state(cell) not in over]


def check_inputs(cells: Iterable[Cell], folder: SweepFolder) -> None:
    """Refuse to continue cells whose data or code has changed.

    One table would then mix two data sets. Cells whose data is missing are not checked, so that
    tables can be made on any machine.
    """
    datasets = DatasetCache()
    for cell in cells:
        run = RunFolder(folder.run(cell))
        if run.holds_run():
            run.check_inputs(digest_available_inputs(cell.config, datasets))


class LocalPool:
    """Runs `jobs` processes of this machine; they split its cores unless run.threads is set."""

    submission = ""

    def __init__(self, jobs: int) -> None:
        check_jobs(jobs)
        self.at_a_time = jobs
        self.threads = max(1, count_cores() // jobs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(
        self,
        cells: Sequence[Cell],
        folder: SweepFolder,
        watcher: Watcher,
        until: Mapping[str, int] | None = None,
    ) -> list[Outcome]:
        make_folders(folder)
        pending: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        for cell in cells:
            pending.put(cell)
        workers = _Workers(folder, self.threads, watcher, until or {})
        with ThreadPoolExecutor(self.at_a_time) as pool:
            futures = [pool.submit(workers.run_pending, pending) for _ in cells[: self.at_a_time]]
            try:
                return [outcome for future in as_completed(futures) for outcome in future.result()]
            except BaseException:
                workers.stop()
                raise


def count_cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Workers:
    """The running processes, each watched by a thread."""

    def __init__(
        self, folder: SweepFolder, threads: int, watcher: Watcher, until: Mapping[str, int]
    ) -> None:
        self._folder, self._threads, self._watcher = folder, threads, watcher
        self._until = until
        self._lock = threading.Lock()
        self._stopped = False
        self._processes: set[CellProcess] = set()

    def run_pending(self, pending: queue.SimpleQueue[Cell]) -> list[Outcome]:
        """Run cells one after the other in one process, or in a new one if it has died."""
        outcomes: list[Outcome] = []
        process: CellProcess | None = None
        while True:
            try:
                cell = pending.get_nowait()
            except queue.Empty:
                break
            if process is None or not process.alive:
                process = self._start()
            if process is None:
                break
            outcomes.append(self._run(process, cell))
        if process is not None:
            process.end()
            with self._lock:
                self._processes.discard(process)
        return outcomes

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._processes:
                process.kill()

    def _start(self) -> CellProcess | None:
        with self._lock:
            if self._stopped:
                return None
            process = CellProcess(self._threads)
            self._processes.add(process)
            return process

    def _run(self, process: CellProcess, cell: Cell) -> Outcome:
        self._watcher.on_cell_start(cell)
        begin = time.monotonic()
        code, message = 1, ""
        order = make_order(cell, self._folder, self._threads, self._until.get(cell.name))
        for report in process.follow(order):
            if "ended" in report:
                code, message = int(report["ended"]), str(report["message"])
            else:
                self._watcher.on_cell_progress(cell, report["round"], report["scores"])
        if self._stopped and code:  # ended by the sweep itself, not by a failure of its own
            return Outcome(cell, "failed", time.monotonic() - begin, message)
        outcome = conclude(cell, self._folder, code, message, begin)
        if not self._stopped:
            self._watcher.on_cell_end(outcome)
        return outcome
