"""The clients hosted together: their states stacked on axis 0. Trains, evaluates, sends, merges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.data.batches import ADAPT
from quiverfl.data.federated import FederatedData
from quiverfl.engine.evaluation import Metrics, evaluate, join, select
from quiverfl.engine.examples import Examples
from quiverfl.engine.phases import Group, Trainer
from quiverfl.engine.programs import choose_executor
from quiverfl.engine.workers import side_by_side, worker_count
from quiverfl.errors import Diverged
from quiverfl.memory import in_large_pages
from quiverfl.methods.contract import (
    Message,
    Method,
    Moment,
    Once,
    Start,
    State,
    Train,
    adaptation,
    payload,
)
from quiverfl.seeds import stream
from quiverfl.task import Point, Task
from quiverfl.training import Training

Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class Shard:
    """Some clients of a federation, in one place. Rows are local, `ids` are federation-wide."""

    def __init__(
        self,
        task: Task,
        data: FederatedData,
        method: Method,
        training: Training,
        *,
        rounds: int,
        seed: int = 0,
        clients: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        executor: str = "auto",
        epochs_per_client: Sequence[int] | None = None,
        common_init: bool = True,
    ) -> None:
        """`clients` and `epochs_per_client` have one entry per client of `data`."""
        self.ids: Integers = np.arange(data.clients) if clients is None else np.asarray(clients)
        self._task, self._method = task, method
        self._rounds, self._seed = rounds, seed
        self._epochs = None if epochs_per_client is None else np.asarray(epochs_per_client)
        where = torch.device(device)
        self._executor = choose_executor(executor, task, where)
        self._one_by_one = self._executor.chunk == 1 and where.type == "cpu"
        examples = Examples(data.train, data, dtype, where)
        self._test = Examples(data.test, data, dtype, where)
        self.trainer = Trainer(task, examples, training, self._executor, dtype, where, seed)
        self._phases, self._adaptation = method.phases(task), adaptation(method, task)
        self.state: State = self._initial(examples.sizes, dtype, where, common_init)
        self.local: dict[int, Point] = {}
        """The last locally trained model of the rows that do not train now, where it is needed."""
        self.local_metrics: dict[int, dict[str, float]] = {}
        self.steps: Integers = np.zeros(len(self.ids), dtype=np.int64)
        """Local steps of the last round."""

    def _initial(
        self, sizes: Integers, dtype: torch.dtype, device: torch.device, common: bool
    ) -> State:
        agreed = self._task.initial(self._seed)
        stacked: list[Tensor] | None = None
        kind: Any = None
        for row, client in enumerate(self.ids):
            own = agreed if common else self._task.initial(self._seed, 1 + int(client))
            point, shared = (Point(*(p.to(device, dtype) for p in at)) for at in (own, agreed))
            random = stream(self._seed, "start", int(client))
            state = self._method.init(self._task, Start(point, shared, int(sizes[row]), random))
            if stacked is None:
                kind, count = type(state), len(self.ids)
                stacked = [in_large_pages(leaf.new_empty((count, *leaf.shape))) for leaf in state]
            for leaf, value in zip(stacked, state, strict=True):
                leaf[row] = value
        return kind(*(stacked or ()))

    def groups(self, rows: Integers, width: int | None = None) -> Iterator[Group]:
        """Rows in chunks; clients of like size together, so that none waits for another."""
        order = rows[np.argsort(-self.trainer.examples.sizes[rows], kind="stable")]
        width = width or self._executor.chunk
        for begin in range(0, len(order), width):
            chunk = order[begin : begin + width]
            yield Group(chunk, self.ids[chunk])

    def rows(self, rows: Integers) -> State:
        """The states of some rows; a view where they lie together."""
        index = _index(rows)
        return type(self.state)(*(leaf[index] for leaf in self.state))

    def write(self, rows: Integers, state: State) -> None:
        index = _index(rows)
        for leaf, value in zip(self.state, state, strict=True):
            if value.data_ptr() != leaf[index].data_ptr() or not isinstance(index, slice):
                leaf[index] = value

    def train(self, round: int, active: Flags, keep: Flags | None = None) -> None:
        """Train the active rows; remember the trained model of those in `keep`."""
        self.steps = np.zeros(len(self.ids), dtype=np.int64)

        def work(group: Group) -> None:
            state = self.rows(group.rows)
            for number, phase in enumerate(self._phases):
                state = self._phase(phase, number, state, group, round)
            self._check_finite(state, group, round, "the trained state")
            self.write(group.rows, state)
            for row in group.rows:
                self.local.pop(int(row), None)
                self.local_metrics.pop(int(row), None)
            if keep is not None:
                self.remember(group.rows[keep[group.rows]])

        self._side_by_side(work, self.groups(np.flatnonzero(active)))

    def _side_by_side(self, work: Callable[[Group], None], groups: Iterable[Group]) -> None:
        workers = worker_count(len(self.ids)) if self._one_by_one else 1
        side_by_side(work, groups, workers)

    def _phase(
        self, phase: Train | Once, number: int, state: State, group: Group, round: int
    ) -> State:
        if isinstance(phase, Once):
            return self._once(phase, number, state, group, round)
        epochs = np.full(len(group.rows), phase.epochs)
        if phase.sent and self._epochs is not None:
            epochs = self._epochs[group.rows]
        state, steps = self.trainer.train(phase, number, state, group, round, epochs)
        self.steps[group.rows] += steps
        return state

    def _once(self, phase: Once, number: int, state: State, group: Group, round: int) -> State:
        changed = []
        for place, client in enumerate(group.ids):
            one = type(state)(*(leaf[place] for leaf in state))
            point = self._method.personal(one)
            alone = Group(group.rows[place : place + 1], group.ids[place : place + 1])
            gradient = None
            if phase.gradient:
                stacked = Point(*(part.unsqueeze(0) for part in point))
                found = self.trainer.gradient(stacked, alone, round, number)
                gradient = Point(*(part[0] for part in found))
            size = sum(len(part) for part in point)
            noise = stream(self._seed, "noise", int(client), round).random(size)
            moment = Moment(round, self._rounds, torch.from_numpy(noise), gradient)
            changed.append(phase.step(one, moment))
        return type(state)(*(torch.stack(leaves) for leaves in zip(*changed, strict=True)))

    def remember(self, rows: Integers) -> None:
        """Keep what these rows would use now as their last locally trained model."""
        for group in self.groups(rows):
            shared, personal = self._personal(group.rows)
            for place, row in enumerate(group.rows):
                self.local[int(row)] = Point(shared[place].clone(), personal[place].clone())

    def _personal(self, rows: Integers) -> Point:
        point: Point = torch.vmap(self._method.personal)(self.rows(rows))
        return point

    def model(self, row: int, stage: str) -> Point:
        """The model one client would use, fine-tuned where the method evaluates it so."""
        group = Group(np.array([row]), self.ids[row : row + 1])
        point = self._adapted(self._stage(group.rows, stage), group)
        return Point(*(part[0].clone() for part in point))

    def _stage(self, rows: Integers, stage: str) -> Point:
        remembered = [stage == "local" and int(row) in self.local for row in rows]
        if not any(remembered):
            return self._personal(rows)
        points = [
            self.local[int(row)] if kept else Point(*(p[0] for p in self._personal(row[None])))
            for row, kept in zip(rows, remembered, strict=True)
        ]
        return Point(*(torch.stack(parts) for parts in zip(*points, strict=True)))

    def _adapted(self, point: Point, group: Group) -> Point:
        if self._adaptation is None:
            return point
        phase = self._adaptation
        epochs = np.full(len(group.rows), phase.epochs)
        adapted: Point = self.trainer.train(phase, ADAPT, point, group, 0, epochs)[0]
        return adapted

    def evaluate(self, round: int, stage: str) -> Metrics:
        """Metrics of every client on its own test split; nothing is changed by looking.

        Stage `local` of a client whose remembered model has been evaluated before is not computed
        again.
        """
        everyone = np.arange(len(self.ids))
        known = self.local_metrics if stage == "local" else {}
        fresh = np.array([row for row in everyone if int(row) not in known], dtype=np.int64)
        found: Metrics = {}

        def work(group: Group) -> None:
            point = self._adapted(self._stage(group.rows, stage), group)
            metrics = evaluate(
                self._task, self.trainer.program, self._executor, self._test, point, group.rows
            )
            self._check_loss(metrics["loss"], group, round)
            join(found, metrics, group.rows, len(everyone))

        self._side_by_side(work, self.groups(fresh, self._executor.evaluated))
        for row, metrics_of_row in known.items():
            join(found, select(metrics_of_row), np.array([row]), len(everyone))
        if stage == "local":
            for row in self.local:
                self.local_metrics[row] = {name: float(m[row]) for name, m in found.items()}
        return found

    def outbox(self, rows: Integers | None = None) -> Message:
        """A message per row, or per given row. A leaf sent as it stands is the state's own."""
        state = self.state if rows is None else self.rows(rows)
        message: Message = torch.vmap(self._method.message)(state)
        return message

    def payload(self, outbox: Message, rows: Integers | None = None) -> Integers:
        """Bytes of each row's message; 0 for rows that are not in the outbox."""
        sizes = np.zeros(len(self.ids), dtype=np.int64)
        if outbox:
            found = torch.vmap(partial(payload, self._method))(outbox)
            sizes[slice(None) if rows is None else rows] = found.cpu().numpy()
        return sizes

    def deliver(self, mixed: Message) -> None:
        """Merge what arrived, a few rows at a time so that no second copy of all states is made."""
        everyone = np.arange(len(self.ids))
        width = max(self._executor.chunk, 1)
        for begin in range(0, len(everyone), width):
            rows = everyone[begin : begin + width]
            arrived = {name: leaf[_index(rows)] for name, leaf in mixed.items()}
            self.write(rows, torch.vmap(self._method.merge)(self.rows(rows), arrived))

    def _check_loss(self, losses: Floats, group: Group, round: int) -> None:
        bad = np.flatnonzero(~np.isfinite(losses) & (self._test.sizes[group.rows] > 0))
        if len(bad):
            raise Diverged(round, int(group.ids[bad[0]]), "the test loss")

    def _check_finite(self, state: State, group: Group, round: int, where: str) -> None:
        for leaf in state:
            sums = leaf.reshape(len(group.rows), -1).sum(dim=1)
            bad = torch.nonzero(~torch.isfinite(sums))
            if len(bad):
                raise Diverged(round, int(group.ids[int(bad[0])]), where)


def _index(rows: Integers) -> slice | Tensor:
    """A slice where rows lie together (a view), a tensor of places where not (a copy)."""
    if len(rows) and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows)
