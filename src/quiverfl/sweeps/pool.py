"""Cells in a few processes side by side. One that fails stops no other."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from quiverfl.errors import QuiverError
from quiverfl.experiment import DataShelf, inputs_there
from quiverfl.run_folder import RunFolder
from quiverfl.sweeps.layout import Places
from quiverfl.sweeps.plan import Cell

Ending: TypeAlias = Literal["finished", "diverged", "failed"]
DIVERGED = 3


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
    def progressed(self, cell: Cell, rounds: int, scores: dict[str, float]) -> None: ...
    def ended(self, outcome: Outcome) -> None: ...


def pending(cells: Iterable[Cell], places: Places, retry: bool = False) -> list[Cell]:
    """Cells to run: neither finished nor, as that would only happen again, diverged."""
    over = {"finished"} if retry else {"finished", "diverged"}
    unique = {cell.name: cell for cell in cells}
    return [cell for cell in unique.values() if places.state(cell) not in over]


def check_inputs(cells: Iterable[Cell], places: Places) -> None:
    """Refuse to continue cells whose data or code was changed since.

    One table would be made of two data sets. Where they are missing, cells are not checked: tables
    can be made anywhere.
    """
    shelf = DataShelf()
    for cell in cells:
        folder = RunFolder(places.run(cell))
        if folder.holds_run():
            folder.check_inputs(inputs_there(cell.config, shelf))


def check_jobs(jobs: int) -> None:
    if jobs < 1:
        raise QuiverError(f"--jobs {jobs}: it must be at least 1.")


def run_cells(
    cells: Sequence[Cell],
    places: Places,
    jobs: int,
    watcher: Watcher,
    until: Mapping[str, int] | None = None,
) -> list[Outcome]:
    """Run them all, `jobs` at a time, the cores split among them unless run.threads says else.

    Ctrl-C ends the processes; what they had written is taken up by the next call. `until` has the
    rounds, by the name of a cell, after which it is left with a checkpoint.
    """
    check_jobs(jobs)
    for folder in ("cells", "logs"):
        _make(places.root / folder)
    todo: queue.SimpleQueue[Cell] = queue.SimpleQueue()
    for cell in cells:
        todo.put(cell)
    crew = _Crew(places, max(1, cores() // jobs), watcher, until or {})
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(crew.work, todo) for _ in range(min(jobs, len(cells)))]
        try:
            return [outcome for future in as_completed(futures) for outcome in future.result()]
        except BaseException:
            crew.stop()
            raise


def cores() -> int:
    """Those this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Crew:
    """The processes that run now, each looked after by a thread."""

    def __init__(
        self, places: Places, threads: int, watcher: Watcher, until: Mapping[str, int]
    ) -> None:
        self._places, self._threads, self._watcher = places, threads, watcher
        self._until = until
        self._lock = threading.Lock()
        self._stopped = False
        self._processes: set[subprocess.Popen[str]] = set()

    def work(self, todo: queue.SimpleQueue[Cell]) -> list[Outcome]:
        """Cells one after the other in one process; in a new one after it has died."""
        outcomes: list[Outcome] = []
        process: subprocess.Popen[str] | None = None
        while True:
            try:
                cell = todo.get_nowait()
            except queue.Empty:
                break
            if process is None or process.poll() is not None:
                process = self._start()
            if process is None:
                break
            outcomes.append(self._run(process, cell))
        if process is not None:
            self._end(process)
        return outcomes

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._processes:
                process.kill()

    def _start(self) -> subprocess.Popen[str] | None:
        with self._lock:
            if self._stopped:
                return None
            process = subprocess.Popen(
                [sys.executable, "-m", "quiverfl.sweeps.job"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": str(self._threads)},
                start_new_session=True,  # Ctrl-C is for the sweep alone
            )
            self._processes.add(process)
            return process

    def _end(self, process: subprocess.Popen[str]) -> None:
        """Without orders it ends by itself."""
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.wait()
        with self._lock:
            self._processes.discard(process)

    def _run(self, process: subprocess.Popen[str], cell: Cell) -> Outcome:
        self._watcher.started(cell)
        begin = time.monotonic()
        code, message = self._follow(process, cell)
        ending: Ending = "failed"
        if code == 0:
            ending = "finished"
            self._places.forget_failure(cell)
        elif not self._stopped:
            ending = "diverged" if code == DIVERGED else "failed"
            self._places.note_failure(cell, message, code)
        outcome = Outcome(cell, ending, time.monotonic() - begin, message)
        if not self._stopped:
            self._watcher.ended(outcome)
        return outcome

    def _follow(self, process: subprocess.Popen[str], cell: Cell) -> tuple[int, str]:
        """How a cell ended; told by the process, or seen from its death."""
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it died between two cells
            process.stdin.write(self._order(cell) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            told = json.loads(line)
            if "ended" in told:
                return int(told["ended"]), str(told["message"])
            self._watcher.progressed(cell, told["round"], told["scores"])
        self._end(process)
        return process.returncode or 1, _death(process.returncode)

    def _order(self, cell: Cell) -> str:
        threads = cell.config.run.threads or self._threads
        config = cell.config.with_values([("run.threads", threads)])
        paths = {"folder": str(self._places.run(cell)), "log": str(self._places.log(cell))}
        until = self._until.get(cell.name)
        return json.dumps({**paths, "until": until, "config": config.model_dump(mode="json")})


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QuiverError(f"{folder}: cannot be made: {error.strerror}.") from error


def _death(code: int) -> str:
    if code < 0:
        return f"its process was ended by signal {-code}; perhaps memory ran out"
    return f"its process ended with code {code}"
