"""Carry a schedule out: its jobs on the clients' tensors, as many at a time as possible.

Jobs that do not need each other are a level: they train together, with the same bits as one by one.
A message stays in the pool until each client that takes a part of it has done so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quiverfl.clock.schedule import Jobs, Schedule
from quiverfl.engine.exchange.fixed_point import UNIT
from quiverfl.engine.local.vmap import vmap_clients
from quiverfl.engine.shard import Shard
from quiverfl.engine.states import take_rows, write_rows
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Message
from quiverfl.types import Floats, Integers

POOL = "pool/"


class Player:
    """Carries a schedule out on a shard of all clients.

    It stands where other runs have an exchange: what is under way belongs to every checkpoint.
    """

    def __init__(self, shard: Shard, schedule: Schedule, together: bool = True) -> None:
        clients = len(shard.ids)
        self._shard, self.schedule, self._together = shard, schedule, together
        self._mass = shard.method.mass
        self._rounds: Integers = np.zeros(clients, dtype=np.int64)
        self._pool = _Pool()
        self._last: Integers = np.full(clients, -1)
        """The last job of every client: its message has the part that stays."""
        self._own = np.ones(clients)
        self._merged: set[int] = set()
        self.widths: list[int] = []
        """Number of jobs trained together, one entry per group of jobs."""

    def train_until(self, t: int) -> int:
        """Carry out all jobs that end up to t. Returns their number."""
        jobs = self.schedule.jobs_until(t)
        levels = _find_levels(jobs) if self._together else np.arange(len(jobs))
        order = np.lexsort((jobs.client, levels))
        for places in np.split(order, np.flatnonzero(np.diff(levels[order])) + 1):
            if len(places):
                self._train(jobs.pick(places))
        return len(jobs)

    def merge_running(self, t: int) -> None:
        """Merge what each client has taken by t: the state from which it trains at that moment."""
        running = self.schedule.running
        self._merge(running.pick((running.start <= t) & (t < running.finish)))

    def _train(self, jobs: Jobs) -> None:
        self._merge(jobs)
        self._merged.difference_update(jobs.number.tolist())
        rows = jobs.client
        self._rounds[rows] = jobs.round
        active = np.zeros(len(self._rounds), dtype=bool)
        active[rows] = True
        self._shard.train(self._rounds, active, active_fraction=1.0)
        message = self._shard.outbox(rows)
        self._pool.add(jobs, self._bias(message, jobs))
        self._last[rows], self._own[rows] = jobs.number, jobs.own
        self.widths.append(len(jobs))

    def _bias(self, message: Message, jobs: Jobs) -> Message:
        """Without the mass, which the schedule counts; a method without one sends μ · z."""
        if self._mass is not None:
            return {name: leaf for name, leaf in message.items() if name != self._mass}
        units = jobs.units / UNIT
        if (units == 1).all():
            return message
        return {name: leaf * _column(units, leaf) for name, leaf in message.items()}

    def _merge(self, jobs: Jobs) -> None:
        """Merge what jobs take before they train: the own part, then the rest as it arrived."""
        merged = np.fromiter((n in self._merged for n in jobs.number.tolist()), bool, len(jobs))
        jobs = jobs.pick((jobs.round > 0) & ~merged)
        if not len(jobs):
            return
        # Those that take the most come first: the k-th part is then for the first few rows.
        jobs = jobs.pick(np.argsort(-np.diff(jobs.begins), kind="stable"))
        rows, begins = jobs.client, jobs.begins[:-1]
        counts = np.diff(jobs.begins)
        own, sources = self._pool.find(self._last[rows]), self._pool.find(jobs.sources)
        mixed = self._pool.read(own, self._own[rows])
        for turn in range(int(counts[0])):
            places = begins[: int((counts > turn).sum())] + turn
            for name, leaf in self._pool.read(sources[places], jobs.weights[places]).items():
                mixed[name][: len(places)] += leaf
        self._pool.count(np.concatenate([own, sources]))
        units = jobs.units / UNIT
        if self._mass is not None:
            old = getattr(self._shard.state, self._mass)
            mixed[self._mass] = torch.from_numpy(units).to(old)
        elif not (units == 1).all():
            mixed = {name: leaf / _column(units, leaf) for name, leaf in mixed.items()}
        if mixed:
            state = self._shard.state
            merged = vmap_clients(self._shard.method.merge)(take_rows(state, rows), mixed)
            write_rows(state, rows, merged)
        self._merged.update(jobs.number.tolist())

    def tensors(self) -> dict[str, Tensor]:
        """Messages that are still to be taken. The rest follows from the schedule."""
        return {f"{POOL}{name}": leaf for name, leaf in self._pool.tensors().items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `tensors` gave; the schedule is played up to there, without training."""
        self._pool.restore({n.removeprefix(POOL): t for n, t in tensors.items()})

    def replay(self, t: int) -> None:
        """Bring the schedule to where it was at t, after `merge_running(t)`."""
        jobs = self.schedule.jobs_until(t)
        clients, last = np.unique(jobs.client[::-1], return_index=True)
        ended = jobs.pick(len(jobs) - 1 - last)
        self._rounds[clients] = ended.round
        self._last[clients], self._own[clients] = ended.number, ended.own
        running = self.schedule.running
        merged = (running.start <= t) & (t < running.finish)
        self._merged = set(running.number[merged].tolist())


def _find_levels(jobs: Jobs) -> Integers:
    """The level of each job: 1 + the number of jobs in the longest chain that it waits for."""
    level: dict[int, int] = {}
    last: dict[int, int] = {}
    levels = []
    sources, begins = jobs.sources.tolist(), jobs.begins.tolist()
    rows = zip(jobs.number.tolist(), jobs.client.tolist(), begins, begins[1:], strict=False)
    for number, client, begin, end in rows:  # in the order they end, so after all that they need
        highest = last.get(client, 0)
        for source in sources[begin:end]:
            needed = level.get(source, 0)
            if needed > highest:
                highest = needed
        level[number] = last[client] = highest + 1
        levels.append(highest + 1)
    return np.array(levels, dtype=np.int64)


class _Pool:
    """Messages by the number of their job, each until the last part of it is taken."""

    def __init__(self) -> None:
        self._leaves: Message = {}
        self._slots: Integers = np.full(1024, -1)
        """Slot of a job's message, by the job's number; -1 if it is not kept."""
        self._uses: Integers = np.zeros(0, dtype=np.int64)
        """Number of parts of the message in a slot that are still to be taken."""
        self._owners: Integers = np.zeros(0, dtype=np.int64)
        """The number of the job whose message is in a slot."""
        self._free: list[int] = []

    def add(self, jobs: Jobs, message: Message) -> None:
        """Keep the messages of some jobs: one part for the sender, and one for each receiver."""
        slots = self._reserve(len(jobs), message)
        index = torch.from_numpy(slots)
        for name, leaf in message.items():
            self._leaves[name][index.to(leaf.device)] = leaf
        self._note(jobs.number, slots, jobs.gives + 1)

    def _note(self, numbers: Integers, slots: Integers, uses: Integers) -> None:
        last = int(numbers.max(initial=0))
        if last >= len(self._slots):
            more = np.full(last + 1 + len(self._slots), -1)
            more[: len(self._slots)] = self._slots
            self._slots = more
        self._slots[numbers], self._owners[slots], self._uses[slots] = slots, numbers, uses

    def find(self, numbers: Integers) -> Integers:
        """The slots of these jobs' messages."""
        slots = self._slots[numbers]
        if (slots < 0).any():
            raise QuiverError(
                f"the checkpoint has no message of job {int(numbers[slots < 0][0])}: it was "
                "written by a run with other devices, or before the graph was changed."
            )
        return slots

    def read(self, slots: Integers, weights: Floats) -> Message:
        """These parts of the messages in these slots, one for each."""
        index = torch.from_numpy(slots)
        parts = {}
        for name, leaf in self._leaves.items():
            rows = leaf.index_select(0, index.to(leaf.device))
            parts[name] = rows.mul_(_column(weights, rows))
        return parts

    def count(self, slots: Integers) -> None:
        """One part of the message in each of these slots is taken: the last one makes room."""
        np.subtract.at(self._uses, slots, 1)
        done = np.unique(slots[self._uses[slots] == 0])
        self._slots[self._owners[done]] = -1
        self._free += done.tolist()

    def tensors(self) -> dict[str, Tensor]:
        slots = np.flatnonzero(self._uses > 0)
        index = torch.from_numpy(slots)
        kept = {f"leaf/{name}": leaf[index.to(leaf.device)] for name, leaf in self._leaves.items()}
        numbers, uses = self._owners[slots], self._uses[slots]
        return {**kept, "jobs": torch.from_numpy(numbers), "uses": torch.from_numpy(uses)}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        numbers, uses = (tensors[name].cpu().numpy() for name in ("jobs", "uses"))
        self._leaves = {
            name.removeprefix("leaf/"): leaf
            for name, leaf in tensors.items()
            if name.startswith("leaf/")
        }
        self._free, self._slots = [], np.full(1024, -1)
        self._uses, self._owners = np.zeros_like(uses), np.zeros_like(uses)
        self._note(numbers, np.arange(len(numbers)), uses)

    def _reserve(self, count: int, like: Message) -> Integers:
        missing, size = count - len(self._free), len(self._uses)
        if missing > 0:
            grown = max(missing, size // 2)
            for name, leaf in like.items():
                more = leaf.new_empty((grown, *leaf.shape[1:]))
                old = self._leaves.get(name)
                self._leaves[name] = more if old is None else torch.cat([old, more])
            self._free += range(size + grown - 1, size - 1, -1)
            empty = np.zeros(grown, dtype=np.int64)
            self._uses = np.concatenate([self._uses, empty])
            self._owners = np.concatenate([self._owners, empty])
        slots = np.array(self._free[len(self._free) - count :])
        del self._free[len(self._free) - count :]
        return slots


def _column(numbers: Any, like: Tensor) -> Tensor:
    """A number for each row, rounded to the leaf's own type as peers do it."""
    column = torch.as_tensor(np.asarray(numbers)).to(like.dtype).to(like.device)
    return column.view(-1, *(1,) * (like.ndim - 1))
