"""The clients hosted together: their states stacked on axis 0. Trains, sends, merges, evaluates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quiverfl.data.federated import FederatedData
from quiverfl.engine.client_reports import ReportExchange
from quiverfl.engine.collective import LocalWorld, World, compute_groups
from quiverfl.engine.evaluation import LocalModels, evaluate_shard, find_models, state_record
from quiverfl.engine.execution import Measurement, prepare_computation
from quiverfl.engine.history import Record
from quiverfl.engine.local.context import ClientGroup, PhaseIndex
from quiverfl.engine.local.trainer import Trainer
from quiverfl.engine.local.vmap import vmap_clients, vmap_params
from quiverfl.engine.local.workers import worker_count
from quiverfl.engine.members import Members
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.states import (
    PhaseBuffers,
    check_finite,
    initial_states,
    initial_statistics,
    merge_states,
    statistics_weight,
    take_rows,
    to_device,
    write_rows,
)
from quiverfl.methods.contract import Message, Method, Phase, SingleStep, Train
from quiverfl.methods.optional import SizesMessages, adaptation_phase
from quiverfl.methods.state import select_fields
from quiverfl.task import Params, Task
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.membership import Membership
from quiverfl.topologies.reports import ReportSpec, ReportView
from quiverfl.training import Training
from quiverfl.transforms.privacy import DPSGD, check_budget
from quiverfl.types import Flags, Integers, Metrics

STATISTICS = "running_statistics"
"""The leaf of a message that holds running statistics, where they are averaged."""


class Shard:
    """Some clients of a federation, in one place.

    Rows of state, buffers and local models are those of the clients here. Flags, bytes and metrics
    that the round loop gives and takes are those of all clients of the shard's world.
    """

    def __init__(
        self,
        task: Task,
        data: FederatedData,
        method: Method,
        training: Training,
        settings: RunSettings,
        clients: Sequence[int] | None = None,
        report_spec: ReportSpec | None = None,
        private: DPSGD | None = None,
        measured: Measurement | None = None,
        world: World | None = None,
        membership: Membership | None = None,
    ) -> None:
        """`clients` and `settings.epochs_per_client` have one entry per client of `data`.

        `looks` says what the topology looks at, `measured` which executor was measured before, by
        this run or by another rank. `world` is given where other clients are elsewhere.
        """
        self.ids: Integers = np.arange(data.clients) if clients is None else np.asarray(clients)
        self.world: World = world or _local_world(self.ids, data, settings)
        self.method, self._settings = method, settings
        self.members = None if membership is None else Members(membership)
        computation = prepare_computation(task, data, method, training, settings, private, measured)
        self.execution, self.context = computation.execution, computation.context
        self.test, home = computation.test, computation.home
        self.blocks = computation.blocks
        self._width = self.context.executor.chunk * self.blocks.training
        self.workers = worker_count(len(self.ids)) if computation.one_by_one else 1
        self._phases, self.adaptation = method.phases(task), adaptation_phase(method, task)
        self._find_personal = vmap_params(method.personal)
        self.trainer = Trainer.prepare(self.context, method.personal, self._phases)
        self.state: Any = initial_states(
            task, method, self.context, self.ids, settings, home, computation.shapes
        )
        self.shared = next(iter(select_fields(self.state, "shared")), None)
        """The field of the state that is shared, if there is one."""
        self.buffers = PhaseBuffers(len(self.ids), self.context.device, home)
        self.statistics = initial_statistics(
            task, self._phases, len(self.ids), settings.dtype, home
        )
        """Running statistics, [clients, models, size]; None if the model has none."""
        self.opens_clients = self.statistics is not None or bool(task.own_models)
        """Whether modules must be told whose model they are computing."""
        self._mixes_statistics = self.statistics is not None and task.buffers == "mixed"
        self.local = LocalModels()
        self.steps: Integers = np.zeros(len(self.ids), dtype=np.int64)
        """Local steps of the last round."""
        self.visits: Integers = np.zeros(len(self.ids), dtype=np.int64)
        """How often each sample of a client was looked at, counted where that must be few."""
        self.reports: ReportExchange | None = None
        if report_spec is not None:
            everybody = len(self.world.all_ids)
            self.reports = ReportExchange(report_spec, self.context, method, self.ids, everybody)

    @property
    def view(self) -> ReportView | None:
        """What clients know of each other, if the topology looks."""
        return None if self.reports is None else self.reports.view

    def train(
        self, round: int | Integers, active: Flags, active_fraction: float | None = None
    ) -> None:
        """Train the active clients. `round` is one for all, or every client's own.

        `active_fraction` of all clients train; by default that of the clients of this world.
        """
        if self.members is not None and isinstance(round, int):
            self.members.begin_round(self, round)
        active_fraction = float(active.mean()) if active_fraction is None else active_fraction
        self.steps = np.zeros(len(self.ids), dtype=np.int64)
        work = partial(self._train_group, round, active_fraction)
        width = self.context.executor.chunk
        chosen, blocks = np.flatnonzero(active), self.blocks.training
        compute_groups(self.world, work, chosen, width, self.workers, blocks)
        if self.context.private is not None and isinstance(round, int):
            visits = self.world.gather(torch.from_numpy(self.visits)).numpy()
            check_budget(visits, self.context.private, round, self.world.all_ids)

    def _train_group(
        self, round: int | Integers, active_fraction: float, group: ClientGroup
    ) -> None:
        reports = self.reports
        state = to_device(take_rows(self.state, group.rows), self.context.device)
        statistics = self.open_client(group.rows) if self.opens_clients else None
        record_updates = None if reports is None else reports.record_losses(state, group)
        for number, phase in enumerate(self._phases):
            state = self._take_phase(
                phase, state, group, PhaseIndex(round, number, active_fraction)
            )
        check_finite(state, group.ids, round)
        if record_updates is not None:
            record_updates(state)
        write_rows(self.state, group.rows, state)
        if self.statistics is not None and statistics is not None:
            check_finite((statistics[None],), group.ids, round, "a running statistic")
            self.statistics[group.rows] = statistics.to(self.statistics.device)
        self.local.forget(group.rows)

    def open_client(self, rows: Integers, stage: str = "mixed") -> Tensor | None:
        """Compute the model of this one client; on a copy of its statistics, if it has any."""
        row, copy, task = int(rows[0]), None, self.context.task
        if self.statistics is not None:
            statistics = self.statistics[row]
            if stage == "local":
                statistics = self.local.statistics.get(row, statistics)
            copy = statistics.to(self.context.device, copy=True)
        own = task.of_client(int(self.ids[row])) if task.own_models else None
        self.context.programs.open_client(own, copy)
        return copy

    def _take_phase(self, phase: Phase, state: Any, group: ClientGroup, index: PhaseIndex) -> Any:
        rows, epochs = group.rows, self._settings.epochs_per_client
        replaces = epochs is not None and getattr(phase, "trains_message", False)
        own_epochs = np.asarray(epochs)[rows] if replaces else None
        keeps = isinstance(phase, Train) and phase.keep_optimizer
        buffers = self.buffers.take(index.number, rows) if keeps else None
        given = (phase, state, group, index, own_epochs, buffers)
        state, steps, buffers = self.trainer.train(*given)
        self.steps[rows] += steps
        if self.context.private is not None and not isinstance(phase, SingleStep):
            self.visits[rows] += self.trainer.count_visits(phase, group, steps)
        if keeps:
            self.buffers.write(index.number, rows, buffers)
        return state

    def exchange_reports(self, round: int, graph: Graph) -> Record:
        """Clients learn what the senders of their messages report; the record has who told whom."""
        if self.reports is None:
            return {}
        outgoing = self.world.gather(torch.from_numpy(self.reports.outgoing)).numpy()
        return self.reports.exchange(round, graph, outgoing)

    def share_reports(self) -> None:
        """After a checkpoint of its own clients a rank learns what those of others know."""
        if self.reports is not None:
            rows = self.reports.rows()
            known = {name: self.world.gather(own).numpy() for name, own in rows.items()}
            self.reports.view = ReportView.from_arrays(self.reports.spec, known)

    def keep_local_models(self, chosen: Flags) -> None:
        """Keep what these clients would use now as their last locally trained model."""
        rows, width = np.flatnonzero(self.world.select_local(chosen)), self._width
        for begin in range(0, len(rows), width):
            chunk = rows[begin : begin + width]
            self.local.keep(chunk, self.personal(chunk))
            if self._mixes_statistics and self.statistics is not None:
                own = {row: self.statistics[row].clone() for row in chunk.tolist()}
                self.local.statistics.update(own)

    def personal(self, rows: Integers) -> Params:
        """The models that the clients of these rows would use now."""
        return self._find_personal(take_rows(self.state, rows))

    def model(self, row: int, stage: str) -> Params:
        """The model one client would use, fine-tuned where the method evaluates it so."""
        group = ClientGroup(np.array([row]), self.ids[row : row + 1])
        return Params(*(part[0].clone() for part in find_models(self, group, stage)))

    def model_statistics(self, row: int, stage: str) -> Tensor | None:
        """The running statistics of that model; None if it has none."""
        if self.statistics is None:
            return None
        group = ClientGroup(np.array([row]), self.ids[row : row + 1])
        find_models(self, group, stage)
        return self.context.programs.statistics[0]

    def evaluate(self, round: int, stage: str) -> Metrics:
        """Metrics of every client on its own test split; nothing is changed by looking."""
        return evaluate_shard(self, round, stage)

    def record(self, evaluated: bool) -> Record:
        """Steps, the range of μ and, in evaluated rounds, how far the clients are apart."""
        return state_record(self, evaluated, self._settings.gradients)

    def outbox(self, senders: Integers | None = None) -> Message:
        """The messages of all or of these senders. A leaf sent as it stands is the state's own."""
        emit = vmap_clients(self.method.message)
        if senders is None:
            return self._add_statistics(dict(emit(self.state)))
        rows = self.world.rows_of(senders)
        # vmap takes no empty stack: one client gives the shapes of a message without any.
        messages = emit(take_rows(self.state, rows if len(rows) else np.array([0])))
        messages = self._add_statistics(messages, rows)
        return {name: leaf[: len(rows)] for name, leaf in messages.items()}

    def payload(self, outbox: Message, senders: Integers | None = None) -> Integers:
        """Bytes of each client's message; 0 for clients that do not send."""
        sizes = np.zeros(len(self.ids), dtype=np.int64)
        rows = np.arange(len(self.ids)) if senders is None else self.world.rows_of(senders)
        if outbox and len(rows):
            beside = 0 if self.reports is None else self.reports.spec.bytes
            if isinstance(self.method, SizesMessages):
                sent = {name: leaf for name, leaf in outbox.items() if name != STATISTICS}
                beside += outbox[STATISTICS][0].nbytes if STATISTICS in outbox else 0
                sizes[rows] = vmap_clients(self.method.payload)(sent).cpu().numpy() + beside
            else:
                sizes[rows] = sum(leaf[0].nbytes for leaf in outbox.values()) + beside
        return np.asarray(self.world.gather(torch.from_numpy(sizes)))

    def merge(self, mixed: Message, offline: Flags | None = None) -> None:
        """Merge what arrived. Offline clients receive nothing from a server: its state stays."""
        away = None if offline is None else self.world.select_local(offline)
        if STATISTICS in mixed:
            mixed = self._merge_statistics(mixed)
        merge_states(self.state, mixed, self.method.merge, away, self._width)
        if self.members is not None:
            self.members.restore_leaving(self)

    def merge_rows(self, rows: Integers, message: Message) -> None:
        """Merge a message into the states of some clients alone, as when they join."""
        old = take_rows(self.state, rows)
        write_rows(self.state, rows, vmap_clients(self.method.merge)(old, message))

    def _add_statistics(self, message: Message, rows: Integers | None = None) -> Message:
        """The message with the running statistics, weighed as its shared part is, if they are sent.

        Of several models it is the last one's: the one that is sent.
        """
        if not self._mixes_statistics or self.statistics is None:
            return message
        weight = statistics_weight(self.method, self.state, message)
        places = slice(None) if rows is None else torch.from_numpy(rows)
        own = self.statistics[places, -1]
        if weight is not None:
            return {**message, STATISTICS: own * message[weight].to(own.dtype).unsqueeze(1)}
        return {**message, STATISTICS: own.clone()}

    def _merge_statistics(self, mixed: Message) -> Message:
        """Keep the average of the statistics that arrived; the rest of the message."""
        assert self.statistics is not None
        rest = {name: leaf for name, leaf in mixed.items() if name != STATISTICS}
        weight = statistics_weight(self.method, self.state, rest)
        average = mixed[STATISTICS]
        if weight is not None:
            average = average / rest[weight].to(average.dtype).unsqueeze(1)
        self.statistics[:, -1] = average.to(self.statistics.device)
        return rest


def _local_world(ids: Integers, data: FederatedData, settings: RunSettings) -> LocalWorld:
    sizes, epochs = data.train.sizes, settings.epochs_per_client
    same = np.zeros(len(ids), dtype=np.int64) if epochs is None else np.asarray(epochs)
    return LocalWorld(ids, sizes, np.stack([sizes, data.test.sizes, same], axis=1))
