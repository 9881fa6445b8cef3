"""Cells as Ray tasks: Ray places them by what they need, and tells when a node has died.

A task starts a process for its cell and passes on what that tells. So whatever happens to the cell
is its own affair, as on one machine, and whatever happens to the task is the cluster's: such a cell
is started again elsewhere, from the last checkpoint in its folder.
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
from quiverfl.extras import require
from quiverfl.sweeps.layout import Places
from quiverfl.sweeps.parcels import pack, put_back
from quiverfl.sweeps.plan import Cell
from quiverfl.sweeps.pool import cores
from quiverfl.sweeps.ray_task import Errand, carry_out
from quiverfl.sweeps.where import (
    BROKEN,
    Needs,
    Outcome,
    Watcher,
    check_jobs,
    conclude,
    make_folders,
    order_for,
)

RESTARTS = 5
"""Of a cell: so often may the nodes it runs on die."""
SECONDS_BETWEEN_LOOKS = 2.0
SECONDS_TO_ANSWER = 5.0
SECONDS_TO_STOP = 5.0


@dataclass(eq=False)
class _Flight:
    """A cell on its way."""

    cell: Cell
    needs: dict[str, float]
    begin: float = 0.0
    """When it was first heard of; 0 while it waits for a place."""
    restarts: int = 0
    ending: tuple[int, str] | None = None


class RayCluster:
    """An existing cluster, or one of this machine alone ("local")."""

    handed_over = ""

    def __init__(
        self, address: str, needs: Needs, jobs: int | None = None, bring_back: bool = False
    ) -> None:
        require("ray", "--on ray")
        check_jobs(jobs)
        self._address, self._needs, self._jobs = address, needs, jobs
        self._bring_back = bring_back
        self.threads = needs.threads

    def __enter__(self) -> Self:
        connect(self._address)
        return self

    def __exit__(self, *error: object) -> None:
        import ray

        ray.shutdown()

    @property
    def at_a_time(self) -> int:
        wanted = _wanted(self._needs, None)
        found = sum(
            min(int(node.get(name, 0) // amount) for name, amount in wanted.items())
            for node in alive()
        )
        return max(1, found if self._jobs is None else min(found, self._jobs))

    def run(
        self,
        cells: Sequence[Cell],
        places: Places,
        watcher: Watcher,
        until: Mapping[str, int] | None = None,
    ) -> list[Outcome]:
        make_folders(places)
        memory = self._needs.memory(cells)
        flights = [_Flight(cell, _wanted(self._needs, memory.get(cell.name))) for cell in cells]
        for flight in flights:
            check_room(flight.needs)
        places = Places(places.root.resolve())
        mark = places.root / f".shared-{uuid.uuid4().hex}"
        mark.touch()
        crew = _Crew(places, watcher, self.threads, self._bring_back, mark, until or {})
        try:
            return crew.work(flights, self._jobs or len(flights))
        except BaseException:
            crew.stop()
            raise
        finally:
            mark.unlink(missing_ok=True)


@dataclass(eq=False)
class _Crew:
    """The tasks that are submitted, by the streams on which they tell what happens."""

    places: Places
    watcher: Watcher
    threads: int
    bring_back: bool
    mark: Path
    until: Mapping[str, int]
    flying: dict[Any, _Flight] = field(default_factory=dict)

    def work(self, flights: Sequence[_Flight], most: int) -> list[Outcome]:
        import ray

        waiting, outcomes = deque(flights), []
        while waiting or self.flying:
            while waiting and len(self.flying) < most:
                self._submit(waiting.popleft())
            ready, _ = ray.wait(list(self.flying), timeout=SECONDS_BETWEEN_LOOKS, fetch_local=False)
            for stream in ready:
                outcome = self._hear(stream)
                outcomes += [outcome] if outcome is not None else []
            if not ready:
                outcomes += self._without_room()
        return outcomes

    def stop(self) -> None:
        """Every task ends its process; if it does not in time, its end of the pipe does."""
        import ray

        for stream in self.flying:
            with contextlib.suppress(Exception):
                ray.cancel(stream, force=False)
        end = time.monotonic() + SECONDS_TO_STOP
        while self.flying and time.monotonic() < end:
            ready, _ = ray.wait(list(self.flying), timeout=0.2, fetch_local=False)
            for stream in ready:
                try:
                    ray.get(next(stream))
                except (StopIteration, ray.exceptions.RayError):
                    del self.flying[stream]

    def _submit(self, flight: _Flight) -> None:
        import ray

        cell = flight.cell
        errand = Errand(
            order_for(cell, self.places, self.threads, self.until.get(cell.name)),
            self.threads,
            str(Path.cwd()),
            None if self.bring_back else str(self.mark),
            quiverfl.__version__,
            pack(self.places.run(cell)) if self.bring_back else None,
        )
        task = ray.remote(carry_out).options(
            num_cpus=flight.needs["CPU"],
            num_gpus=flight.needs.get("GPU", 0),
            memory=int(flight.needs.get("memory", 0)) or None,
            num_returns="streaming",
            max_retries=0,  # it is for us to say so, and to count
        )
        self.flying[task.remote(errand)] = flight

    def _hear(self, stream: Any) -> Outcome | None:
        """What a task tells next; the outcome of its cell if it was the last."""
        import ray

        flight = self.flying[stream]
        try:
            told = ray.get(next(stream))
        except StopIteration:
            del self.flying[stream]
            return self._over(flight)
        except ray.exceptions.RayTaskError as error:
            flight.ending = (BROKEN, f"its Ray task failed: {_last_line(error)}")
        except ray.exceptions.RayError as error:
            del self.flying[stream]
            return self._lost(flight, _last_line(type(error)))
        else:
            self._told(flight, told)
        return None

    def _told(self, flight: _Flight, told: dict[str, Any]) -> None:
        cell = flight.cell
        if not flight.begin:
            flight.begin = time.monotonic()
            self.watcher.started(cell)
        if "parcel" in told:
            put_back(told["parcel"], self.places.run(cell))
        if "log" in told:
            self.places.log(cell).write_text(told["log"])
        if "round" in told:
            self.watcher.progressed(cell, told["round"], told["scores"])
        if "ended" in told:
            flight.ending = int(told["ended"]), str(told["message"])

    def _over(self, flight: _Flight) -> Outcome | None:
        if flight.ending is None:
            return self._lost(flight, "its Ray task ended without a word")
        if not flight.begin:
            flight.begin = time.monotonic()
            self.watcher.started(flight.cell)
        outcome = conclude(flight.cell, self.places, *flight.ending, flight.begin)
        self.watcher.ended(outcome)
        return outcome

    def _lost(self, flight: _Flight, why: str) -> Outcome | None:
        """A node or worker died: not the cell's fault, unless it happens to it again and again."""
        if flight.restarts == RESTARTS:
            flight.ending = BROKEN, f"{why}, {RESTARTS + 1} times"
            return self._over(flight)
        flight.restarts += 1
        if flight.begin:
            self.watcher.restarted(flight.cell, why)
        self._submit(flight)
        return None

    def _without_room(self) -> list[Outcome]:
        """End what no node that is left could ever run; Ray would wait for one forever."""
        import ray

        outcomes = []
        for stream, flight in list(self.flying.items()):
            if flight.begin and not flight.restarts:
                continue
            try:
                check_room(flight.needs)
            except QuiverError as error:
                with contextlib.suppress(Exception):
                    ray.cancel(stream)
                del self.flying[stream]
                flight.ending = BROKEN, str(error)
                outcome = self._over(flight)
                outcomes += [outcome] if outcome is not None else []
        return outcomes


def _wanted(needs: Needs, memory: int | None) -> dict[str, float]:
    """By Ray's names."""
    wanted = {"CPU": needs.cpus, "GPU": needs.gpus, "memory": float(memory or 0)}
    return {name: amount for name, amount in wanted.items() if amount}


def connect(address: str) -> None:
    """Join a cluster or start one; what cannot be reached is said within seconds."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    quietly = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        ray.init(address="local", num_cpus=cores(), include_dashboard=False, **quietly)
        return
    if address != "auto":
        _check_reachable(address)
    try:
        ray.init(address=address, **quietly)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise QuiverError(
            f"--address {address}: no Ray cluster was found there ({_last_line(error)}). Start one "
            "with `ray start --head`, or use --address local."
        ) from error


def _check_reachable(address: str) -> None:
    """Ray itself would try for a minute."""
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


def alive() -> list[dict[str, float]]:
    """The resources of every node that is there."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def check_room(needs: Mapping[str, float]) -> None:
    """Refuse what no node has, however long one waits."""
    nodes = alive()
    if any(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes):
        return
    for name, amount in needs.items():
        most = max((node.get(name, 0) for node in nodes), default=0)
        if most < amount:
            raise QuiverError(
                f"a cell needs {_amount(name, amount)} and no node of the Ray cluster has more "
                f"than {_amount(name, most)}: {REMEDIES[name]}"
            )
    raise QuiverError(
        "a cell needs "
        + ", ".join(_amount(name, amount) for name, amount in needs.items())
        + " and no node of the Ray cluster has all of it: lower --cpus or --gpus, or add a node."
    )


REMEDIES = {
    "CPU": "lower --cpus, or add a node.",
    "GPU": "lower --gpus, or add a node that has some.",
    "memory": "use fewer clients or a smaller model, add a larger node, or pass --no-memory if "
    "the estimate is wrong.",
}


def _amount(name: str, amount: float) -> str:
    return f"{amount / 1e9:.1f} GB of memory" if name == "memory" else f"{amount:g} {name}"


def _last_line(error: object) -> str:
    """What a Ray error is about, in a few words."""
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
