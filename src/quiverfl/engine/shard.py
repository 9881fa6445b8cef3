"""The clients hosted together: their states stacked on axis 0. Trains, sends, merges, evaluates."""

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
from quiverfl.engine.accounting import state_record
from quiverfl.engine.context import ClientGroup, PhaseContext, Place
from quiverfl.engine.evaluation import Metrics, join, metrics_of, select
from quiverfl.engine.examples import Examples
from quiverfl.engine.execution import Execution, Measured, measure, room
from quiverfl.engine.fit import check_phases, gradients_without_rate
from quiverfl.engine.history import Record
from quiverfl.engine.lifting import lift, lift_point, same_kind
from quiverfl.engine.local_models import LocalModels
from quiverfl.engine.once import OnceSteps
from quiverfl.engine.optimizer import Buffers
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.sight import Sight
from quiverfl.engine.start import initial_states, same_everywhere
from quiverfl.engine.trainer import Trainer
from quiverfl.engine.trials import Trial
from quiverfl.engine.workers import side_by_side, worker_count
from quiverfl.errors import Diverged, QuiverError
from quiverfl.methods.contract import Message, Method, Once, Phase
from quiverfl.methods.optional import adaptation, payload
from quiverfl.task import Point, Task
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.view import Looks, View
from quiverfl.training import Training
from quiverfl.transforms.privacy import DPSGD, check_budget

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
        settings: RunSettings,
        clients: Sequence[int] | None = None,
        looks: Looks | None = None,
        private: DPSGD | None = None,
        measured: Measured | None = None,
    ) -> None:
        """`clients` and `settings.epochs_per_client` have one entry per client of `data`.

        `looks` is what the topology wants to be told, `measured` what was found out before, by this
        run or by another rank.
        """
        self.ids: Integers = np.arange(data.clients) if clients is None else np.asarray(clients)
        self.method, self._payload = method, partial(payload, method)
        self._task, self._settings = task, settings
        where = torch.device(settings.device)
        examples = Examples(data.train, data, settings.dtype, where)
        trial = Trial.of(task, examples, settings.dtype, where)
        chunk = room(task, data, method, training, settings)
        measured = measured or measure(task, examples, training, settings, trial)
        self.execution = Execution.of(task, settings, trial, measured, chunk)
        self._executor = self.execution.executor
        self._one_by_one = self._executor.name == "sequential" and where.type == "cpu"
        self._home = torch.device("cpu") if settings.states == "host" else where
        layout = self._executor.image_format
        examples = examples.laid_out(layout, getattr(task.skeleton, "likes_bytes", False))
        as_bytes = examples.byte_factors is not None
        self._test = Examples(data.test, data, settings.dtype, where).laid_out(layout, as_bytes)
        self.context = PhaseContext(
            task,
            examples,
            training,
            self._executor,
            settings.dtype,
            where,
            settings.seed,
            settings.rounds,
            draws=trial is not None and trial.draws(),
            private=private,
            by_sample=private is not None and self._by_sample(trial),
        )
        if private is not None and self.context.draws:
            raise QuiverError(
                "privacy.name = 'dp_sgd' takes the gradient of one sample after another, and this "
                "model draws random numbers (dropout) for a whole batch: use one that does not."
            )
        self._once = OnceSteps(self.context)
        self.trainer = Trainer(self.context, self._once)
        self._phases, self._adaptation = method.phases(task), adaptation(method, task)
        check_phases(method, self._phases, settings.epochs_per_client is not None)
        self.trainer.prepare(self._phases)
        self.state: Any = initial_states(task, method, self.context, self.ids, settings, self._home)
        self.buffers: dict[int, Buffers] = {}
        """What the optimizers of some phases keep between rounds, by the number of the phase."""
        self.local = LocalModels()
        self.steps: Integers = np.zeros(len(self.ids), dtype=np.int64)
        """Local steps of the last round."""
        self.visits: Integers = np.zeros(len(self.ids), dtype=np.int64)
        """How often each sample of a client has been looked at, counted where that must be few."""
        self._merged = False
        self.sight = (
            None if looks is None else Sight(looks, self.context, method, self.ids, self.everybody)
        )

    def _by_sample(self, trial: Trial | None) -> bool:
        """vmap is for one thread at a time, and not for every model."""
        alone = not self._one_by_one or torch.get_num_threads() == 1
        return alone and trial is not None and trial.why_not_stacked() is None

    @property
    def everybody(self) -> int:
        """How many clients the federation has."""
        return len(self.ids)

    def groups(self, rows: Integers, width: int | None = None) -> Iterator[ClientGroup]:
        """Rows in chunks; clients of like size together, so that none waits for another."""
        order = rows[np.argsort(-self.context.examples.sizes[rows], kind="stable")]
        width = width or self._executor.chunk
        for begin in range(0, len(order), width):
            chunk = order[begin : begin + width]
            yield ClientGroup(chunk, self.ids[chunk])

    def rows(self, rows: Integers) -> Any:
        """The states of some rows; a view where they lie together."""
        index = _index(rows)
        return type(self.state)(*(leaf[index] for leaf in self.state))

    def visiting(self, stacked: Any) -> Any:
        """States or models on the device that computes; themselves where they are there already."""
        device = self.context.device
        return type(stacked)(*(leaf.to(device, non_blocking=True) for leaf in stacked))

    def write(self, rows: Integers, state: Any) -> None:
        index = _index(rows)
        for leaf, value in zip(self.state, state, strict=True):
            value = value.to(leaf.device)
            if not isinstance(index, slice) or value.data_ptr() != leaf[index].data_ptr():
                leaf[index] = value

    def train(self, round: int, active: Flags, share: float | None = None) -> None:
        """Train the active rows.

        `share` of all clients train in this round: of the rows here, unless it is given.
        """
        self._train(round, active, float(active.mean()) if share is None else share)
        if self.context.private is not None:
            check_budget(self.visits, self.context.private, round, self.ids)

    def _train(self, round: int, active: Flags, share: float) -> None:
        self.steps = np.zeros(len(self.ids), dtype=np.int64)

        def work(group: ClientGroup) -> None:
            state = self.visiting(self.rows(group.rows))
            begun = None if self.sight is None else self.sight.begin(state, group)
            for number, phase in enumerate(self._phases):
                state = self._phase(phase, state, group, Place(round, number, share))
            self._check_finite(state, group, round, "the trained state")
            if begun is not None:
                begun(state)
            self.write(group.rows, state)
            self.local.forget(group.rows)

        self._side_by_side(work, self.groups(np.flatnonzero(active)))
        if active.any():
            gradients_without_rate(self.method, self._phases, self._once.rate_was_read)

    def _side_by_side(
        self, work: Callable[[ClientGroup], None], groups: Iterable[ClientGroup]
    ) -> None:
        workers = worker_count(len(self.ids)) if self._one_by_one else 1
        side_by_side(work, groups, workers)

    def _phase(self, phase: Phase, state: Any, group: ClientGroup, place: Place) -> Any:
        if isinstance(phase, Once):
            state, steps = self._once.run(phase, self.method.personal, state, group, place)
            self.steps[group.rows] += steps
            return state
        epochs = None
        if phase.sent and self._settings.epochs_per_client is not None:
            epochs = np.asarray(self._settings.epochs_per_client)[group.rows]
        keeps = getattr(phase, "keep_optimizer", False)
        kept = self._kept(place.number, group.rows) if keeps else None
        state, steps, buffers = self.trainer.train(phase, state, group, place, epochs, kept)
        self.steps[group.rows] += steps
        if self.context.private is not None:
            self.visits[group.rows] += self.trainer.visits(phase, group, steps)
        if keeps:
            self._keep(place.number, group.rows, buffers)
        return state

    def _kept(self, number: int, rows: Integers) -> Buffers | None:
        found = self.buffers.get(number)
        index, device = torch.from_numpy(rows), self.context.device
        return found and {name: leaf[index].to(device) for name, leaf in found.items()}

    def _keep(self, number: int, rows: Integers, buffers: Buffers) -> None:
        """An optimizer's buffers are all zero before a client's first step."""
        whole = self.buffers.setdefault(number, {})
        for name, leaf in buffers.items():
            if name not in whole:
                shape = (len(self.ids), *leaf.shape[1:])
                whole[name] = leaf.new_zeros(shape, device=self._home)
            whole[name][torch.from_numpy(rows)] = leaf.to(self._home)

    def hear(self, round: int, graph: Graph) -> Record:
        """What the round's messages tell is known from now on; the record has who told whom."""
        return {} if self.sight is None else self.sight.hear(round, graph, self.sight.telling)

    @property
    def view(self) -> View | None:
        """What clients know of each other, if the topology looks."""
        return None if self.sight is None else self.sight.view

    def remember(self, chosen: Flags) -> None:
        """Keep what these clients would use now as their last locally trained model."""
        rows = np.flatnonzero(chosen)
        width = self._executor.chunk
        for begin in range(0, len(rows), width):
            some = rows[begin : begin + width]
            self.local.remember(some, self._personal(some))

    def _personal(self, rows: Integers) -> Point:
        return lift_point(self.method.personal)(self.rows(rows))

    def model(self, row: int, stage: str) -> Point:
        """The model one client would use, fine-tuned where the method evaluates it so."""
        group = ClientGroup(np.array([row]), self.ids[row : row + 1])
        point = self._adapted(self._at_stage(group.rows, stage), group)
        return Point(*(part[0].clone() for part in point))

    def _at_stage(self, rows: Integers, stage: str) -> Point:
        own = stage != "local"
        point = self._personal(rows) if own else self.local.replacing(rows, self._personal)
        there: Point = self.visiting(point)
        return there

    def _adapted(self, point: Point, group: ClientGroup) -> Point:
        if self._adaptation is None:
            return point
        adapted, _, _ = self.trainer.train(self._adaptation, point, group, Place(0, ADAPT))
        return Point(*adapted)

    def evaluate(self, round: int, stage: str) -> Metrics:
        """Metrics of every client on its own test split; nothing is changed by looking.

        Stage `local` of a client whose remembered model has been evaluated before is not computed
        again.
        """
        everyone = np.arange(len(self.ids))
        known = self.local.metrics if stage == "local" else {}
        fresh = np.array([row for row in everyone if int(row) not in known], dtype=np.int64)
        found: Metrics = {}

        def work(group: ClientGroup) -> None:
            point = self._adapted(self._at_stage(group.rows, stage), group)
            program = self.context.program()
            metrics = metrics_of(self._task, program, self._executor, self._test, point, group)
            self._check_loss(metrics["loss"], group, round)
            join(found, metrics, group.rows, len(everyone))

        self._side_by_side(work, self.groups(fresh, self._executor.evaluated))
        for row, metrics_of_row in known.items():
            join(found, select(metrics_of_row), np.array([row]), len(everyone))
        if stage == "local":
            self.local.evaluated(found)
        return found

    def record(self, round: int) -> Record:
        """Steps, the range of μ and, in evaluated rounds, how far the clients are apart."""
        return state_record(self, self._settings, round)

    def outbox(self, rows: Integers | None = None) -> Message:
        """A message per row, or per given row. A leaf sent as it stands is the state's own."""
        state = self.state if rows is None else self.rows(rows)
        message: Message = lift(self.method.message)(state)
        if not isinstance(message, dict):
            raise QuiverError(
                f"{self.method.title}: message returned a {type(message).__name__}; it must "
                "return named tensors, such as {'u': state.u}."
            )
        return message

    def payload(self, outbox: Message, rows: Integers | None = None) -> Integers:
        """Bytes of each row's message; 0 for rows that are not in the outbox."""
        sizes = np.zeros(len(self.ids), dtype=np.int64)
        if outbox:
            found = lift(self._payload)(outbox)
            beside = 0 if self.sight is None else self.sight.looks.bytes
            sizes[slice(None) if rows is None else rows] = found.cpu().numpy() + beside
        return sizes

    def deliver(self, mixed: Message) -> None:
        """Merge what arrived, a few rows at a time so that no second copy of all states is made."""
        everyone = np.arange(len(self.ids))
        width = max(self._executor.chunk, 1)
        first, self._merged = not self._merged, True
        if first:
            self._check_given_away(mixed)
        for begin in range(0, len(everyone), width):
            rows = everyone[begin : begin + width]
            arrived = {name: leaf[_index(rows)] for name, leaf in mixed.items()}
            old, merge = self.rows(rows), self.method.merge
            self.write(rows, same_kind(merge, lift(merge)(old, arrived), old))
        if first:
            same_everywhere(self.method, self.state)

    def _check_given_away(self, mixed: Message) -> None:
        """Before the first merge, on one client: a field that was sent as it stands is not read."""
        row = np.zeros(1, dtype=np.int64)
        sent = {leaf.data_ptr() for leaf in self.outbox(row).values()}
        old = self.rows(row)
        gone = {
            name: torch.full_like(leaf, float("nan"))
            for name, leaf in zip(old._fields, old, strict=True)
            if leaf.data_ptr() in sent
        }
        arrived = {name: leaf[:1] for name, leaf in mixed.items()}
        merged = lift(self.method.merge)(old._replace(**gone), arrived)
        for name, leaf in zip(old._fields, merged, strict=True):
            if torch.isnan(leaf).any() and not any(torch.isnan(a).any() for a in arrived.values()):
                raise QuiverError(
                    f"{self.method.title}: merge reads what message sent as it stands in the state "
                    f"({', '.join(gone)}), and so cannot compute field {name!r}. The exchange "
                    "mixes in that memory: send a copy (.clone()) of what merge needs."
                )

    def _check_loss(self, losses: Floats, group: ClientGroup, round: int) -> None:
        bad = np.flatnonzero(~np.isfinite(losses) & (self._test.sizes[group.rows] > 0))
        if len(bad):
            raise Diverged(round, int(group.ids[bad[0]]), "the test loss")

    def _check_finite(self, state: Any, group: ClientGroup, round: int, where: str) -> None:
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
