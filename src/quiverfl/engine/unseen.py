"""Unseen clients: a client that comes after the run is handed a model and fits it.

It is handed what participants send: the shared part of a model, or all of it where the method sends
all; from a server, the global model. What is not sent it starts afresh, as a client does in the
first round. It fits that part on its own training data and is tested before and after.

Where a method sends no parameters, it is handed what all clients have a copy of, such as FedProto's
prototypes, and fits a fresh model as the method trains one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quiverfl.data.batches import ADAPT
from quiverfl.data.federated import FederatedData
from quiverfl.data.unseen import Unseen
from quiverfl.engine.checks.model import check_batch_sizes
from quiverfl.engine.checks.probe import ModelProbe
from quiverfl.engine.collective import LocalWorld, compute_groups
from quiverfl.engine.evaluation import compute_metrics
from quiverfl.engine.history import Recorder
from quiverfl.engine.local.context import ClientGroup, PhaseIndex
from quiverfl.engine.local.examples import Examples
from quiverfl.engine.local.trainer import Trainer
from quiverfl.engine.local.vmap import vmap_clients
from quiverfl.engine.settings import RunSettings, is_evaluated
from quiverfl.engine.shard import Shard
from quiverfl.engine.start import initial_states
from quiverfl.engine.states import take_rows, to_device
from quiverfl.errors import Diverged, QuiverError
from quiverfl.methods.contract import Method, Train
from quiverfl.methods.optional import adaptation_phase
from quiverfl.methods.state import replicated_fields, select_fields
from quiverfl.seeds import stream
from quiverfl.task import Params, Task
from quiverfl.topologies.topology import Topology, find_offline
from quiverfl.training import Training
from quiverfl.transforms import Transforms
from quiverfl.transforms.privacy import UpdatePrivacy
from quiverfl.types import Integers, Metrics

EPOCHS = 5
"""Epochs that an unseen client fits, unless it is said or the method fine-tunes by itself."""


class UnseenClients:
    """The unseen clients of one run, which are tested with what a shard's clients have."""

    def __init__(
        self,
        shard: Shard,
        unseen: Unseen,
        graphs: Topology,
        settings: RunSettings,
        participants: Integers,
    ) -> None:
        """`participants` are the clients they may meet."""
        self._shard, self._unseen, self._graphs = shard, unseen, graphs
        self._settings, self._participants = settings, participants
        context, data, task = shard.context, unseen.data, shard.context.task
        as_bytes = context.examples.byte_factors is not None
        train, test = (
            Examples(split, data, context.dtype, context.device).laid_out(
                context.executor.image_format, as_bytes
            )
            for split in (data.train, data.test)
        )
        # What they fit is never sent, so it need not be private.
        self._context = replace(context, examples=train, private=None, by_sample=False)
        self._test = test
        # Numbered after the participants: batches and draws are their own.
        self._ids = len(shard.world.all_ids) + np.arange(data.clients)
        probe = ModelProbe.from_data(task, data, context.dtype)
        host = torch.device("cpu")
        fresh = initial_states(
            task, shard.method, self._context, self._ids, settings, host, probe.shapes
        )
        own = Params(*torch.vmap(shard.method.personal)(fresh))
        self._fresh: Params = to_device(own, context.device)
        self._sent = find_sent_parts(shard.method, probe)
        self._copies = find_copies(shard.method, task, self._sent, type(fresh))
        """Fields of a state that are handed over in place of parameters."""
        self._fresh_state: Any = to_device(fresh, context.device) if self._copies else None
        self._find_model = vmap_clients(shard.method.personal)
        if self._copies and unseen.start == "average" and not graphs(0, shard.view).hub:
            raise QuiverError(
                f'data.unseen_start = "average": {shard.method.title} hands over '
                f"{', '.join(self._copies)}, of which there is no mean without a server: choose "
                '"random" or "nearest".'
            )
        self._phase = choose_fit(shard.method, task, unseen, self._sent)
        self._trainer = Trainer.prepare(self._context, shard.method.personal, [self._phase])

    def due(self, round: int, over: bool) -> bool:
        """Whether unseen clients are tested after this round; `over`: it is the last one."""
        each = self._unseen.when == "evaluated"
        settings = self._settings
        return over or (each and is_evaluated(round, settings.evaluate_every, settings.rounds))

    def test(self, round: int, recorder: Recorder) -> None:
        """Record stage `unseen`, as handed over, and stage `fitted`."""
        start, statistics = self._hand_over(round)
        before: Metrics = {}
        after: Metrics = {}

        def test_group(group: ClientGroup) -> None:
            state = take_rows(start, group.rows)
            if statistics is not None:
                self._context.programs.open_client(None, statistics[group.rows].clone())
            self._record(before, self._model(state), group, round)
            index = PhaseIndex(0, ADAPT)  # the first round's rate: they have not trained yet
            fitted, *_ = self._trainer.train(self._phase, state, group, index)
            self._record(after, self._model(fitted), group, round)

        rows = np.arange(len(self._ids))
        world = LocalWorld(self._ids, self._unseen.data.train.sizes)
        width = self._context.executor.chunk
        compute_groups(world, test_group, rows, width, self._shard.workers)
        recorder.on_evaluation(round, "unseen", before)
        recorder.on_evaluation(round, "fitted", after)

    def _record(self, known: Metrics, params: Params, group: ClientGroup, round: int) -> None:
        metrics = compute_metrics(self._context, self._test, params, group)
        bad = ~np.isfinite(metrics["loss"]) & (self._test.sizes[group.rows] > 0)
        if bad.any():
            row = int(group.rows[np.flatnonzero(bad)[0]])
            name = self._unseen.name(row)
            raise Diverged(round, row, f"the test loss of unseen client {name}")
        for name, values in metrics.items():
            known.setdefault(name, np.full(len(self._ids), np.nan))[group.rows] = values

    def _model(self, state: Any) -> Params:
        """The models that are trained: the state itself, or the models in the method's states."""
        return self._find_model(state) if self._copies else Params(*state)

    def _hand_over(self, round: int) -> tuple[Any, Tensor | None]:
        """The initial states of unseen clients, stacked, and their running statistics if any."""
        if self._fresh_state is not None:
            chosen = self._choose(round)
            assert chosen is not None  # of copies there is no average
            theirs = to_device(take_rows(self._shard.state, chosen), self._context.device)
            copies = {name: getattr(theirs, name) for name in self._copies}
            begun = self._fresh_state._replace(**copies)
            return begun, self._hand_over_statistics(None, fresh=True)
        if not any(self._sent):
            return self._fresh, self._hand_over_statistics(None, fresh=True)
        chosen = self._choose(round)
        given = self._average() if chosen is None else self._read(chosen)
        shared, personal = (
            theirs if sent else own
            for theirs, own, sent in zip(given, self._fresh, self._sent, strict=True)
        )
        return Params(shared, personal), self._hand_over_statistics(chosen)

    def _hand_over_statistics(self, chosen: Integers | None, fresh: bool = False) -> Tensor | None:
        """Running statistics of a fresh model, unless they are sent with the shared part."""
        task, known, count = self._context.task, self._shard.statistics, len(self._ids)
        if known is None:
            return None
        if fresh or task.buffers == "personal":
            start = task.initial_statistics().to(self._context.device, known.dtype)
            return start.expand(count, -1)
        sent = known[:, -1].to(self._context.device)
        if chosen is None:
            mean = known[torch.from_numpy(self._participants), -1].cpu().double().mean(dim=0)
            return mean.to(sent).expand(count, -1)
        return sent[torch.from_numpy(chosen)]

    def _choose(self, round: int) -> Integers | None:
        """The participant whose model each unseen client receives; None for the average of all."""
        if self._graphs(0, self._shard.view).hub:
            return np.full(len(self._ids), self._find_current(round))
        if self._unseen.start == "average":
            return None
        return (
            self._find_nearest() if self._unseen.start == "nearest" else self._draw_participants()
        )

    def _find_current(self, round: int) -> int:
        """A client that has the newest model of the server."""
        for earlier in range(round, -1, -1):
            online = np.flatnonzero(~find_offline(self._graphs(earlier, self._shard.view)))
            if len(online):
                return int(online[0])
        return 0

    def _draw_participants(self) -> Integers:
        """The participant drawn for each unseen client: the same one in every round."""
        seed, count = self._settings.seed, len(self._ids)
        drawn = [stream(seed, "unseen-meets", i).choice(self._participants) for i in range(count)]
        return np.array(drawn, dtype=np.int64)

    def _find_nearest(self) -> Integers:
        """The participant whose own model has the lowest loss on the client's training data."""
        nearest, width = [], self._context.executor.evaluation_chunk
        for row in range(len(self._ids)):
            losses = []
            for begin in range(0, len(self._participants), width):
                theirs = self._participants[begin : begin + width]
                params = to_device(self._shard.personal(theirs), self._context.device)
                group = ClientGroup(np.full(len(theirs), row), theirs)
                if self._shard.statistics is not None:
                    own = self._shard.statistics[int(theirs[0])]
                    self._context.programs.open_client(None, own.to(self._context.device))
                metrics = compute_metrics(self._context, self._context.examples, params, group)
                losses.append(metrics["loss"])
            nearest.append(self._participants[np.argmin(np.concatenate(losses))])
        return np.array(nearest, dtype=np.int64)

    def _average(self) -> Params:
        """The mean of the participants' models, added in float64 one after the other."""
        sums: list[Tensor] | None = None
        for client in self._participants:
            one = [part[0].cpu().double() for part in self._read(np.array([client]))]
            sums = one if sums is None else [a.add_(b) for a, b in zip(sums, one, strict=True)]
        assert sums is not None
        count, like = len(self._participants), self._context.dtype
        return Params(
            *(
                (s / count).to(like).to(self._context.device).expand(len(self._ids), -1)
                for s in sums
            )
        )

    def _read(self, clients: Integers) -> Params:
        """The models that these participants hand over: the model that each sends, de-biased."""
        shard = self._shard
        state = to_device(take_rows(shard.state, clients), self._context.device)
        parts = [next(iter(select_fields(state, role).values())) for role in ("shared", "personal")]
        mass = None if shard.method.mass is None else getattr(state, shard.method.mass)
        if mass is not None:
            parts = [part / mass.to(part.dtype).unsqueeze(1) for part in parts]
        return Params(*parts)


def check_unseen(
    unseen: Unseen,
    task: Task,
    data: FederatedData,
    method: Method,
    training: Training,
    transforms: Transforms,
    settings: RunSettings,
) -> None:
    """Refuse a method whose model an unseen client could not be handed, or could not fit."""
    if isinstance(transforms.privacy, UpdatePrivacy):
        raise QuiverError(
            'data.unseen with privacy.name = "update": what a client is handed when it comes later '
            'would carry no noise. Leave data.unseen out, or set privacy.name = "dp_sgd".'
        )
    if task.own_models:
        raise QuiverError(
            "data.unseen with a model for each client: which one somebody has who comes later, "
            "nobody knows. Leave data.unseen out, or give one model for all."
        )
    if unseen.part == "personal" and not task.personal_layout.size:
        raise QuiverError(
            'data.unseen_part = "personal", and nothing in this model is personal: name a part, '
            'such as model.personal = ["head"], or set unseen_part = "whole".'
        )
    probe = ModelProbe.from_data(task, data, settings.dtype)
    sent = find_sent_parts(method, probe)
    nothing = not any(sent) and method.topology != "isolated"
    if nothing and not find_copies(method, task, sent, type(probe.first_state(method))):
        raise QuiverError(
            f"data.unseen: {method.title} sends no parameters that its state declares Shared or "
            "Personal, so a client that comes later would be handed nothing. Leave data.unseen "
            "out for this method."
        )
    try:
        check_batch_sizes(task, unseen.data, [choose_fit(method, task, unseen, sent)], training)
    except QuiverError as error:
        raise QuiverError(f"unseen {error}") from error


def find_sent_parts(method: Method, probe: ModelProbe) -> tuple[bool, bool]:
    """Whether the shared and the personal part of a model reach a message: NaN is followed."""
    state = probe.first_state(method)
    sent = []
    for role in ("shared", "personal"):
        name = next(iter(select_fields(state, role)), None)
        sent.append(name is not None and _is_sent(method, state, name))
    return sent[0], sent[1]


def _is_sent(method: Method, state: Any, name: str) -> bool:
    leaf = getattr(state, name)
    marked = state._replace(**{name: torch.full_like(leaf, float("nan"))})
    return any(bool(part.isnan().any()) for part in method.message(marked).values())


def find_copies(method: Method, task: Task, sent: tuple[bool, bool], kind: type) -> tuple[str, ...]:
    """Fields that all clients have a copy of, if no parameters are sent and one phase trains.

    Such as FedProto's prototypes.
    """
    trains = [phase for phase in method.phases(task) if isinstance(phase, Train)]
    if any(sent) or method.topology == "isolated" or len(trains) != 1:
        return ()
    return tuple(replicated_fields(kind))


def choose_fit(method: Method, task: Task, unseen: Unseen, sent: tuple[bool, bool]) -> Train[Any]:
    """The method's own fine-tuning, or training of what it does not send.

    If the method sends no parameters, it is the method's own training phase.
    """
    own = adaptation_phase(method, task)
    if own is not None and unseen.part is None:
        return own if unseen.epochs is None else replace(own, epochs=unseen.epochs, steps=None)
    if not any(sent) and method.topology != "isolated":
        (trained,) = (phase for phase in method.phases(task) if isinstance(phase, Train))
        epochs = EPOCHS if unseen.epochs is None else unseen.epochs
        return replace(trained, part=unseen.part or trained.part, epochs=epochs, steps=None)
    keeps = sent == (True, False) and task.personal_layout.size > 0
    part = unseen.part or ("personal" if keeps else "whole")
    return Train(
        part=part,
        epochs=EPOCHS if unseen.epochs is None else unseen.epochs,
        params=lambda copy: copy,
        update=lambda _, fitted: Params(fitted.shared, fitted.personal),
        use_personal_lr=part == "personal",
    )
