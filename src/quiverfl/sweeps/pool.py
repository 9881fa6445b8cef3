"""Cells in a few processes of this machine side by side. One that fails stops no other."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Self

from quiverfl.experiment import DataShelf, inputs_there
from quiverfl.run_folder import RunFolder
from quiverfl.sweeps.cell_process import CellProcess
from quiverfl.sweeps.layout import Places
from quiverfl.sweeps.plan import Cell
from quiverfl.sweeps.where import Outcome, Watcher, check_jobs, conclude, make_folders, order_for


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


class LocalPool:
    """So many processes at a time; the cores are split among them unless run.threads says else."""

    handed_over = ""

    def __init__(self, jobs: int) -> None:
        check_jobs(jobs)
        self.at_a_time = jobs
        self.threads = max(1, cores() // jobs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(
        self,
        cells: Sequence[Cell],
        places: Places,
        watcher: Watcher,
        until: Mapping[str, int] | None = None,
    ) -> list[Outcome]:
        make_folders(places)
        todo: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        for cell in cells:
            todo.put(cell)
        crew = _Crew(places, self.threads, watcher, until or {})
        with ThreadPoolExecutor(self.at_a_time) as pool:
            futures = [pool.submit(crew.work, todo) for _ in cells[: self.at_a_time]]
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
        self._processes: set[CellProcess] = set()

    def work(self, todo: queue.SimpleQueue[Cell]) -> list[Outcome]:
        """Cells one after the other in one process; in a new one after it has died."""
        outcomes: list[Outcome] = []
        process: CellProcess | None = None
        while True:
            try:
                cell = todo.get_nowait()
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
        self._watcher.started(cell)
        begin = time.monotonic()
        code, message = 1, ""
        order = order_for(cell, self._places, self._threads, self._until.get(cell.name))
        for told in process.follow(order):
            if "ended" in told:
                code, message = int(told["ended"]), str(told["message"])
            else:
                self._watcher.progressed(cell, told["round"], told["scores"])
        if self._stopped and code:  # ended by the sweep itself, not by a failure of its own
            return Outcome(cell, "failed", time.monotonic() - begin, message)
        outcome = conclude(cell, self._places, code, message, begin)
        if not self._stopped:
            self._watcher.ended(outcome)
        return outcome
