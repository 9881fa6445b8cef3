"""Run cells as Ray tasks: Ray places them by their needs, and reports when a node has died.

A task starts a process for its cell and forwards its reports. A cell that fails by itself stays
failed, as on one machine. A cell whose task is lost starts again elsewhere, from the last
checkpoint in its folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import quiverfl
from quiverfl.errors import QuiverError
from quiverfl.support.environment import require_package
from quiverfl.sweeps.executor import (
    BROKEN,
    CellNeeds,
    Outcome,
    Watcher,
    check_jobs,
    conclude,
    count_cores,
    make_folders,
    make_order,
)
from quiverfl.sweeps.plan import Cell, SweepFolder
from quiverfl.sweeps.ray_task import RayOrder, pack_run, run_order, unpack_into_run

RESTARTS = 5
"""How often the node of one cell may die."""
SECONDS_BETWEEN_LOOKS = 2.0
SECONDS_TO_ANSWER = 5.0
SECONDS_TO_STOP = 5.0


@dataclass(eq=False)
class _CellTask:
    """A cell that waits or runs as a Ray task."""

    cell: Cell
    needs: dict[str, float]
    begin: float = 0.0
    """When its first report arrived; 0 while it waits for a node."""
    restarts: int = 0
    ending: tuple[int, str] | None = None


class RayCluster:
    """Runs cells on an existing cluster, or on one of this machine alone ("local")."""

    submission = ""

    def __init__(
        self, address: str, needs: CellNeeds, jobs: int | None = None, copy_results: bool = False
    ) -> None:
        require_package("ray", "--on ray")
        check_jobs(jobs)
        self._address, self._needs, self._jobs = address, needs, jobs
        self._copy_results = copy_results
        self.threads = needs.threads

    def __enter__(self) -> Self:
        connect_to_ray(self._address)
        return self

    def __exit__(self, *error: object) -> None:
        import ray

        ray.shutdown()

    @property
    def at_a_time(self) -> int:
        needs = _to_ray_names(self._needs, None)
        room = sum(
            min(int(node.get(name, 0) // amount) for name, amount in needs.items())
            for node in list_node_resources()
        )
        return max(1, room if self._jobs is None else min(room, self._jobs))

    def run(
        self,
        cells: Sequence[Cell],
        folder: SweepFolder,
        watcher: Watcher,
        until: Mapping[str, int] | None = None,
    ) -> list[Outcome]:
        make_folders(folder)
        memory = self._needs.memory(cells)
        tasks = [
            _CellTask(cell, _to_ray_names(self._needs, memory.get(cell.name))) for cell in cells
        ]
        for task in tasks:
            check_room(task.needs)
        folder = SweepFolder(folder.root.resolve())
        marker = folder.root / f".shared-{uuid.uuid4().hex}"
        marker.touch()
        running = _RunningTasks(
            folder, watcher, self.threads, self._copy_results, marker, until or {}
        )
        try:
            return running.run_all(tasks, self._jobs or len(tasks))
        except BaseException:
            running.stop()
            raise
        finally:
            marker.unlink(missing_ok=True)


@dataclass(eq=False)
class _RunningTasks:
    """The submitted tasks, by the streams of their reports."""

    folder: SweepFolder
    watcher: Watcher
    threads: int
    copy_results: bool
    marker: Path
    until: Mapping[str, int]
    running: dict[Any, _CellTask] = field(default_factory=dict)

    def run_all(self, tasks: Sequence[_CellTask], most: int) -> list[Outcome]:
        import ray

        waiting, outcomes = deque(tasks), []
        while waiting or self.running:
            while waiting and len(self.running) < most:
                self._submit(waiting.popleft())
            ready, _ = ray.wait(
                list(self.running), timeout=SECONDS_BETWEEN_LOOKS, fetch_local=False
            )
            for stream in ready:
                outcome = self._receive(stream)
                outcomes += [outcome] if outcome is not None else []
            if not ready:
                outcomes += self._end_unplaceable()
        return outcomes

    def stop(self) -> None:
        """Cancel every task; a process that does not end in time ends when its pipe closes."""
        import ray

        for stream in self.running:
            with contextlib.suppress(Exception):
                ray.cancel(stream, force=False)
        end = time.monotonic() + SECONDS_TO_STOP
        while self.running and time.monotonic() < end:
            ready, _ = ray.wait(list(self.running), timeout=0.2, fetch_local=False)
            for stream in ready:
                try:
                    ray.get(next(stream))
                except (StopIteration, ray.exceptions.RayError):
                    del self.running[stream]

    def _submit(self, task: _CellTask) -> None:
        import ray

        cell = task.cell
        order = RayOrder(
            make_order(cell, self.folder, self.threads, self.until.get(cell.name)),
            self.threads,
            str(Path.cwd()),
            None if self.copy_results else str(self.marker),
            quiverfl.__version__,
            pack_run(self.folder.run(cell)) if self.copy_results else None,
        )
        remote = ray.remote(run_order).options(
            num_cpus=task.needs["CPU"],
            num_gpus=task.needs.get("GPU", 0),
            memory=int(task.needs.get("memory", 0)) or None,
            num_returns="streaming",
            max_retries=0,  # we restart it ourselves, and count
        )
        self.running[remote.remote(order)] = task

    def _receive(self, stream: Any) -> Outcome | None:
        """Take the next report of a task; return the outcome of its cell after the last one."""
        import ray

        task = self.running[stream]
        try:
            report = ray.get(next(stream))
        except StopIteration:
            del self.running[stream]
            return self._conclude(task)
        except ray.exceptions.RayTaskError as error:
            task.ending = (BROKEN, f"its Ray task failed: {_summarize_error(error)}")
        except ray.exceptions.RayError as error:
            del self.running[stream]
            return self._restart(task, _summarize_error(type(error)))
        else:
            self._note_report(task, report)
        return None

    def _note_report(self, task: _CellTask, report: dict[str, Any]) -> None:
        cell = task.cell
        if not task.begin:
            task.begin = time.monotonic()
            self.watcher.on_cell_start(cell)
        if "archive" in report:
            unpack_into_run(report["archive"], self.folder.run(cell))
        if "log" in report:
            self.folder.log(cell).write_text(report["log"])
        if "round" in report:
            self.watcher.on_cell_progress(cell, report["round"], report["scores"])
        if "ended" in report:
            task.ending = int(report["ended"]), str(report["message"])

    def _conclude(self, task: _CellTask) -> Outcome | None:
        if task.ending is None:
            return self._restart(task, "its Ray task ended without a word")
        if not task.begin:
            task.begin = time.monotonic()
            self.watcher.on_cell_start(task.cell)
        outcome = conclude(task.cell, self.folder, *task.ending, task.begin)
        self.watcher.on_cell_end(outcome)
        return outcome

    def _restart(self, task: _CellTask, why: str) -> Outcome | None:
        """Restart a cell whose node or worker died; give up after RESTARTS times."""
        if task.restarts == RESTARTS:
            task.ending = BROKEN, f"{why}, {RESTARTS + 1} times"
            return self._conclude(task)
        task.restarts += 1
        if task.begin:
            self.watcher.on_cell_restart(task.cell, why)
        self._submit(task)
        return None

    def _end_unplaceable(self) -> list[Outcome]:
        """End tasks that no remaining node can run; Ray would wait forever."""
        import ray

        outcomes = []
        for stream, task in list(self.running.items()):
            if task.begin and not task.restarts:
                continue
            try:
                check_room(task.needs)
            except QuiverError as error:
                with contextlib.suppress(Exception):
                    ray.cancel(stream)
                del self.running[stream]
                task.ending = BROKEN, str(error)
                outcome = self._conclude(task)
                outcomes += [outcome] if outcome is not None else []
        return outcomes


def _to_ray_names(needs: CellNeeds, memory: int | None) -> dict[str, float]:
    """Return the needs of a cell by Ray's names of resources."""
    amounts = {"CPU": needs.cpus, "GPU": needs.gpus, "memory": float(memory or 0)}
    return {name: amount for name, amount in amounts.items() if amount}


def connect_to_ray(address: str) -> None:
    """Join a cluster or start one; refuse an address that does not answer within seconds."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    quietly = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        ray.init(address="local", num_cpus=count_cores(), include_dashboard=False, **quietly)
        return
    if address != "auto":
        _check_reachable(address)
    try:
        ray.init(address=address, **quietly)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise QuiverError(
            f"--address {address}: no Ray cluster was found there ({_summarize_error(error)}). "
            "Start one with `ray start --head`, or use --address local."
        ) from error


def _check_reachable(address: str) -> None:
    """Refuse an address that does not answer; Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise QuiverError(
            f"--address {address}: write auto, local, or the address of the cluster's head as "
            "HOST:PORT, such as 10.0.0.1:6379."
        )
    try:
        socket.create_connection((host, int(port)), SECONDS_TO_ANSWER).close()
    except (OSError, OverflowError) as error:
        raise QuiverError(
            f"--address {address}: nobody answers there ({error}). Is `ray start --head` running, "
            "and is its port open to this machine?"
        ) from error


def list_node_resources() -> list[dict[str, float]]:
    """Return the resources of every node that is alive."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def check_room(needs: Mapping[str, float]) -> None:
    """Refuse needs that no node of the cluster can meet."""
    nodes = list_node_resources()
    if any(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes):
        return
    for name, amount in needs.items():
        most = max((node.get(name, 0) for node in nodes), default=0)
        if most < amount:
            raise QuiverError(
                f"a cell needs {_format_amount(name, amount)} and no node of the Ray cluster has "
                f"more than {_format_amount(name, most)}: {REMEDIES[name]}"
            )
    raise QuiverError(
        "a cell needs "
        + ", ".join(_format_amount(name, amount) for name, amount in needs.items())
        + " and no node of the Ray cluster has all of it: lower --cpus or --gpus, or add a node."
    )


REMEDIES = {
    "CPU": "lower --cpus, or add a node.",
    "GPU": "lower --gpus, or add a node that has some.",
    "memory": "use fewer clients or a smaller model, add a larger node, or pass --no-memory if "
    "the estimate is wrong.",
}


def _format_amount(name: str, amount: float) -> str:
    return f"{amount / 1e9:.1f} GB of memory" if name == "memory" else f"{amount:g} {name}"


def _summarize_error(error: object) -> str:
    """Say in a few words what a Ray error is about."""
    if isinstance(error, type):
        return KINDS.get(error.__name__, error.__name__)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


KINDS = {
    "NodeDiedError": "the node it ran on died",
    "LocalRayletDiedError": "the node it ran on died",
    "WorkerCrashedError": "the Ray worker it ran in died",
    "OutOfMemoryError": "Ray ended it because its node ran out of memory",
}
