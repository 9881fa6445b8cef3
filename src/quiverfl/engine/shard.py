"""The clients hosted together: their states stacked on axis 0. Trains, sends, merges, evaluates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from quiverfl.data.federated import FederatedData
from quiverfl.engine.client_reports import ReportExchange
from quiverfl.engine.collective import LocalWorld, World, compute_groups
from quiverfl.engine.evaluation import LocalModels, evaluate_shard, state_record
from quiverfl.engine.execution import Measurement, prepare_computation
from quiverfl.engine.history import Record
from quiverfl.engine.local.context import ClientGroup, PhaseIndex
from quiverfl.engine.local.trainer import Trainer
from quiverfl.engine.local.vmap import vmap_clients
from quiverfl.engine.local.workers import worker_count
from quiverfl.engine.members import Members
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.start import initial_states, initial_statistics
from quiverfl.engine.states import (
    STATISTICS,
    PhaseBuffers,
    check_finite,
    emit_messages,
    merge_states,
    merge_statistics,
    message_bytes,
    open_client,
    take_rows,
    to_device,
    write_rows,
)
from quiverfl.methods.contract import Message, Method, Phase, SingleStep, Train
from quiverfl.methods.optional import adaptation_phase
from quiverfl.methods.state import select_fields
from quiverfl.task import Params, Task
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.membership import Membership
from quiverfl.topologies.reports import ReportSpec, ReportView
from quiverfl.training import Training
from quiverfl.transforms.privacy import DPSGD, enforce_budget
from quiverfl.types import Flags, Integers, Metrics


class Shard:
    """Some clients of a federation, in one place.

    State, buffers and local models have a row for each client here. Flags, bytes and metrics that
    the round loop gives and takes are those of all clients of the shard's world.
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

        `report_spec` is what clients report for an adaptive topology, `measured` the executor that
        this run or another rank measured before. `world` is given where clients are elsewhere.
        """
        self.ids: Integers = np.arange(data.clients) if clients is None else np.asarray(clients)
        self.world: World = world or LocalWorld.of_data(self.ids, data, settings)
        self.method, self._settings = method, settings
        self.members = None if membership is None else Members(membership)
        computation = prepare_computation(task, data, method, training, settings, private, measured)
        self.execution, self.context = computation.execution, computation.context
        self.test, home, self.blocks = computation.test, computation.home, computation.blocks
        self._width = self.context.executor.chunk * self.blocks.training
        self.workers = worker_count(len(self.ids)) if computation.one_by_one else 1
        self._phases, self.adaptation = method.phases(task), adaptation_phase(method, task)
        self._find_personal = vmap_clients(method.personal)
        self.trainer = Trainer.prepare(self.context, method.personal, self._phases)
        given = (self.context, self.ids, settings, home, computation.shapes)
        self.state: Any = initial_states(task, method, *given)
        self.shared = next(iter(select_fields(self.state, "shared")), None)
        """The shared field of the state, if there is one."""
        count = len(self.ids)
        self.buffers = PhaseBuffers(count, self.context.device, home)
        self.statistics = initial_statistics(task, self._phases, count, settings.dtype, home)
        """Running statistics, [clients, models, size]; None if the model has none."""
        self.opens_clients = self.statistics is not None or bool(task.own_models)
        """Whether modules must be bound to a client before they compute its model."""
        self._mixed_statistics = self.statistics if task.buffers == "mixed" else None
        self.local = LocalModels()
        self.steps: Integers = np.zeros(count, dtype=np.int64)
        """Local steps of the last round."""
        self.visits: Integers = np.zeros(count, dtype=np.int64)
        """Visits of each of a client's samples, counted for a privacy budget."""
        self.reports = ReportExchange.make(report_spec, self.context, method, self.world)

    @property
    def view(self) -> ReportView | None:
        """Reports that clients have exchanged, if the topology is adaptive."""
        return None if self.reports is None else self.reports.view

    def train(
        self, round: int | Integers, active: Flags, active_fraction: float | None = None
    ) -> None:
        """Train the active clients. `round` is one for all, or every client's own.

        `active_fraction` of all clients train; by default that of the clients of this world.
        """
        if self.members is not None and isinstance(round, int):
            self.members.begin_round(self, round)
        self.steps = np.zeros(len(self.ids), dtype=np.int64)
        fraction = float(active.mean()) if active_fraction is None else active_fraction
        work, chosen = partial(self._train_group, round, fraction), np.flatnonzero(active)
        width, blocks = self.context.executor.chunk, self.blocks.training
        compute_groups(self.world, work, chosen, width, self.workers, blocks)
        if self.context.private is not None and isinstance(round, int):
            visits = self.world.gather(torch.from_numpy(self.visits)).numpy()
            enforce_budget(visits, self.context.private, round, self.world.all_ids)

    def _train_group(self, round: int | Integers, fraction: float, group: ClientGroup) -> None:
        state = to_device(take_rows(self.state, group.rows), self.context.device)
        statistics = open_client(self, group.rows) if self.opens_clients else None
        record_updates = None if self.reports is None else self.reports.record_losses(state, group)
        for number, phase in enumerate(self._phases):
            state = self._take_phase(phase, state, group, PhaseIndex(round, number, fraction))
        check_finite(state, group.ids, round)
        if record_updates is not None:
            record_updates(state)
        write_rows(self.state, group.rows, state)
        if self.statistics is not None and statistics is not None:
            check_finite((statistics[None],), group.ids, round, "a running statistic")
            self.statistics[group.rows] = statistics.to(self.statistics.device)
        self.local.forget(group.rows)

    def _take_phase(self, phase: Phase, state: Any, group: ClientGroup, index: PhaseIndex) -> Any:
        rows, replaces = group.rows, getattr(phase, "trains_message", False)
        epochs = self._settings.epochs_per_client if replaces else None
        own_epochs = None if epochs is None else np.asarray(epochs)[rows]
        keeps = isinstance(phase, Train) and phase.keep_optimizer
        buffers = self.buffers.take(index.number, rows) if keeps else None
        state, steps, buffers = self.trainer.train(phase, state, group, index, own_epochs, buffers)
        self.steps[rows] += steps
        if self.context.private is not None and not isinstance(phase, SingleStep):
            self.visits[rows] += self.trainer.count_visits(phase, group, steps)
        if keeps:
            self.buffers.write(index.number, rows, buffers)
        return state

    def exchange_reports(self, round: int, graph: Graph) -> Record:
        """Give clients the reports of the senders of their messages; record the links used."""
        return {} if self.reports is None else self.reports.exchange(round, graph, self.world)

    def keep_local_models(self, chosen: Flags) -> None:
        """Keep the models that these clients would use now as their last locally trained ones."""
        rows = np.flatnonzero(self.world.select_local(chosen))
        self.local.keep(rows, self.personal, self._mixed_statistics, self._width)

    def personal(self, rows: Integers) -> Params:
        """The models that the clients of these rows would use now."""
        return Params(*self._find_personal(take_rows(self.state, rows)))

    def evaluate(self, round: int, stage: str) -> Metrics:
        """Metrics of every client on its own test split. Nothing is changed."""
        return evaluate_shard(self, round, stage)

    def record(self, evaluated: bool) -> Record:
        """Steps, the range of μ and, in evaluated rounds, how far the clients are apart."""
        return state_record(self, evaluated, self._settings.gradients)

    def outbox(self, senders: Integers | None = None) -> Message:
        """The messages of all or of these senders. A leaf sent as it stands is the state's own."""
        rows = None if senders is None else self.world.rows_of(senders)
        return emit_messages(self.method, self.state, rows, self._mixed_statistics)

    def payload(self, outbox: Message, senders: Integers | None = None) -> Integers:
        """Bytes of each client's message; 0 for clients that do not send."""
        sizes = np.zeros(len(self.ids), dtype=np.int64)
        rows = slice(None) if senders is None else self.world.rows_of(senders)
        if outbox and len(sizes[rows]):
            beside = 0 if self.reports is None else self.reports.spec.bytes
            sizes[rows] = message_bytes(self.method, outbox) + beside
        return np.asarray(self.world.gather(torch.from_numpy(sizes)))

    def merge(self, mixed: Message, offline: Flags | None = None) -> None:
        """Merge what arrived. Offline clients receive nothing from a server: its state stays."""
        away = None if offline is None else self.world.select_local(offline)
        if self._mixed_statistics is not None and STATISTICS in mixed:
            mixed = merge_statistics(self._mixed_statistics, mixed, self.method, self.state)
        merge_states(self.state, mixed, self.method.merge, away, self._width)
        if self.members is not None:
            self.members.restore_leaving(self)
