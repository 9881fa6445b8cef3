"""A peer's training, as the network sees it: a message, a mass, and a rest that never leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from quiverfl.engine.client_reports import ReportExchange
from quiverfl.engine.evaluation import client_model
from quiverfl.engine.exchange.build import build_update_stages, changes_updates
from quiverfl.engine.exchange.fixed_point import (
    bias_message,
    debias_message,
    receiver_weights,
    sender_weights,
)
from quiverfl.engine.exchange.stages import NoiseStage, UpdateStage
from quiverfl.engine.shard import Shard
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Method
from quiverfl.methods.optional import SizesMessages
from quiverfl.methods.state import field_roles
from quiverfl.peer.link.messages import Leaves, Manifest
from quiverfl.task import Params, Task
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.reports import ReportSpec, ReportView
from quiverfl.topologies.topology import Topology
from quiverfl.transforms import PLAIN, Transforms
from quiverfl.transforms.codec import MessageCodec
from quiverfl.transforms.privacy import spent_epsilon
from quiverfl.types import AnyArray

LOCAL, OPTIMIZER, ALTERED, REPORTS = "local/", "optimizer/", "altered/", "sight/"
VISITS, RUNNING = "visits/", "statistics/"
"""Keys of the rest, beside the fields of the state: the last trained model, optimizer buffers, the
base of altered messages, reports of others, how often each sample was used where privacy needs
that, and running statistics."""
EVERYBODY = np.ones(1, dtype=np.bool_)


class Learner(Protocol):
    """One client's training. Called from one thread only, never from the event loop."""

    @property
    def manifest(self) -> Manifest: ...
    def train(self, round: int, active: bool, active_fraction: float, keep: bool) -> None:
        """Train. With `keep` this client rests in the next round, and its model stays."""

    def message(self, round: int | None = None) -> Leaves:
        """Copy what is pushed, as push-sum carries it (times μ), without the mass.

        With `round`: after the attack or noise of that round.
        """

    def rest(self) -> Leaves:
        """Copy everything else that must survive a restart, as it is before the merge."""

    def merge(self, message: Mapping[str, AnyArray], mass: float) -> None:
        """Take in the sum of what arrived and its mass, after `restore` of its rest."""

    def restore(self, rest: Mapping[str, AnyArray]) -> None: ...
    def change_run(self, lr: float | None, rounds: int) -> None:
        """Change the number of rounds, and the learning rate if one is given."""

    def evaluate(self, round: int, stage: str) -> dict[str, float]: ...
    def record(self) -> dict[str, float]:
        """Count the steps of the last training; report ε of all that was sent so far."""

    def model(self) -> Leaves:
        """Copy the personal model, by parameter name."""

    @property
    def view(self) -> ReportView | None:
        """Reports that this client has received, if the topology is adaptive."""

    def report_to(self, clients: Sequence[int]) -> AnyArray | None:
        """This client's report to these clients in this round; it remembers that it sent one."""


class ShardLearner:
    """A shard of one client as a Learner, with the same method objects as in simulation.

    A method needs no more than it declares. Its mass, if it has one, is counted in the peers'
    records. A method without mass gets one: its message travels times μ, and the sum that arrives
    is divided by the μ that arrived with it. A field that `message` gives away as it stands is not
    in the rest, since `merge` replaces it; everything else in the state is.
    """

    def __init__(
        self,
        shard: Shard,
        task: Task,
        method: Method,
        transforms: Transforms = PLAIN,
        clients: int = 1,
        report_spec: ReportSpec | None = None,
        classes: Sequence[str] = (),
    ) -> None:
        """`clients` counts all clients of the run; `report_spec`: reports for the topology.

        `classes` are names on which all peers must agree, in this order.
        """
        self._shard, self._task, self._classes = shard, task, classes
        outbox = shard.outbox()
        self._mass = method.mass if method.mass in outbox else None
        self._mu, self._secret = 1.0, b""
        sparse, seed = isinstance(method, SizesMessages), shard.context.seed
        compression = transforms.compression
        coding = None if compression is None else MessageCodec(compression, seed)
        report_size = 0 if report_spec is None else report_spec.width
        self.manifest = Manifest.of(self.message(), self._parameters(), sparse, coding, report_size)
        if report_spec is not None:
            shard.reports = ReportExchange(report_spec, shard.context, method, shard.ids, clients)
        self._stages: list[UpdateStage] = []
        if changes_updates(transforms):
            self._stages = build_update_stages(
                transforms, seed, shard.world, clients, self._mass, outbox
            )

    @property
    def view(self) -> ReportView | None:
        return self._shard.view

    def report_to(self, clients: Sequence[int]) -> AnyArray | None:
        reports = self._shard.reports
        if reports is None:
            return None
        me = int(self._shard.ids[0])
        reports.view.values[me, me] = reports.outgoing[0]
        reports.view.sent[me, list(clients)] += 1
        outgoing: AnyArray = reports.outgoing[0]
        return outgoing

    def draw_noise_from(self, secret: bytes) -> None:
        """Draw the noise of privacy from a secret; the run's seed is known to all peers."""
        self._secret = secret
        self._refresh_noise()

    def _refresh_noise(self) -> None:
        """Make the same noise come back for the very same release only.

        A round that is repeated from another state, as on a restored backup, must not send another
        update with the same noise: their difference would have none.
        """
        if not self._secret:
            return
        digest = hashlib.sha256(self._secret)
        for leaf in self._shard.state:
            digest.update(leaf.detach().cpu().contiguous().numpy().tobytes())
        self._shard.context.secret = digest.digest()
        for stage in self._stages:
            if isinstance(stage, NoiseStage):
                stage.secret = digest.digest()

    def _parameters(self) -> list[tuple[str, tuple[int, ...]]]:
        """List names and shapes inside the leaves, so that peers with other models do not talk.

        Nor do peers whose common head would stand for other classes.
        """
        layouts = {"shared": self._task.shared_layout, "personal": self._task.personal_layout}
        kinds = field_roles(type(self._shard.state))
        parameters: list[tuple[str, tuple[int, ...]]] = []
        for name, leaf in sorted(self.message().items()):
            layout = layouts.get(kinds.get(name, "any"))
            if layout is None:
                parameters.append((name, leaf.shape))
            else:
                parts = zip(layout.names, layout.shapes, strict=True)
                parameters += [(f"{name}.{part}", shape) for part, shape in parts]
        return parameters + [(f"class {name}", ()) for name in self._classes]

    def train(self, round: int, active: bool, active_fraction: float, keep: bool) -> None:
        self._refresh_noise()
        if round == 0:  # its first model stays its local one if it does not train
            self._shard.keep_local_models(np.array([not active]))
        self._shard.train(round, np.array([active]), active_fraction)
        self._shard.keep_local_models(np.array([keep]))

    def message(self, round: int | None = None) -> Leaves:
        outbox = self._shard.outbox()
        if round is not None and self._stages:
            outbox = {name: leaf.clone() for name, leaf in outbox.items()}
            # In every round: a newcomer may ask for the model of an isolated peer.
            for stage in self._stages:
                stage.rewrite(round, outbox, EVERYBODY, EVERYBODY)
        message = {name: _copy_leaf(leaf[0]) for name, leaf in outbox.items() if name != self._mass}
        return message if self._mass is not None else bias_message(message, self._mu)

    def rest(self) -> Leaves:
        given_away = {leaf.data_ptr() for leaf in self._shard.outbox().values()}
        rest = {
            name: _copy_leaf(leaf[0])
            for name, leaf in self._shard.state._asdict().items()
            if leaf.data_ptr() not in given_away
        }
        if 0 in self._shard.local.points:
            local = self._shard.local.points[0]
            rest |= {f"{LOCAL}{name}": _copy_leaf(part) for name, part in local._asdict().items()}
        if self._shard.statistics is not None:
            rest[RUNNING] = _copy_leaf(self._shard.statistics[0])
        if 0 in self._shard.local.statistics:
            rest[f"{LOCAL}{RUNNING}"] = _copy_leaf(self._shard.local.statistics[0])
        for number, buffers in self._shard.buffers.items():
            names = {f"{OPTIMIZER}{number}/{name}": leaf[0] for name, leaf in buffers.items()}
            rest |= {name: _copy_leaf(leaf) for name, leaf in names.items()}
        for stage in self._stages:
            tensors = stage.tensors()
            rest |= {f"{ALTERED}{name}": _copy_leaf(rows[0]) for name, rows in tensors.items()}
        if self._shard.reports is not None:
            reports = self._shard.reports.rows()
            rest |= {f"{REPORTS}{name}": _copy_leaf(rows[0]) for name, rows in reports.items()}
        if self._shard.context.private is not None:
            rest[VISITS] = self._shard.visits.copy()
        return rest

    def merge(self, message: Mapping[str, AnyArray], mass: float) -> None:
        self._mu = mass
        if self._mass is None:
            message = debias_message(message, mass)
        mixed = {name: self._to_tensor(leaf)[None] for name, leaf in message.items()}
        if self._mass is not None:
            mixed[self._mass] = self._to_tensor(np.array([mass], dtype=np.float64))
        for stage in self._stages:
            stage.receive(mixed, EVERYBODY)
        self._shard.merge(mixed)

    def _to_tensor(self, leaf: AnyArray) -> torch.Tensor:
        """Copy to the shard's device."""
        return torch.from_numpy(np.array(leaf)).to(self._shard.context.device)

    def restore(self, rest: Mapping[str, AnyArray]) -> None:
        tensors = {name: self._to_tensor(leaf) for name, leaf in rest.items()}
        fields = {name: leaf[None] for name, leaf in tensors.items() if "/" not in name}
        for name, leaf in fields.items():
            current = getattr(self._shard.state, name, None)
            if current is None or current.shape != leaf.shape:
                raise QuiverError(
                    "the model has another size than the one in the store: the data has other "
                    "classes or columns than before, or the model has changed. Put them back, or "
                    "start a new folder."
                )
        self._shard.state = self._shard.state._replace(**fields)
        local = [tensors[f"{LOCAL}{n}"] for n in Params._fields if f"{LOCAL}{n}" in tensors]
        self._shard.local.points = {0: Params(*local)} if local else {}
        before = tensors.get(f"{LOCAL}{RUNNING}")
        self._shard.local.statistics = {} if before is None else {0: before}
        if self._shard.statistics is not None:
            self._shard.statistics[0] = tensors[RUNNING]
        self._shard.buffers.clear()
        for name, leaf in tensors.items():
            if name.startswith(OPTIMIZER):
                number, _, buffer = name.removeprefix(OPTIMIZER).partition("/")
                self._shard.buffers.setdefault(int(number), {})[buffer] = leaf[None]
        rows = {n.removeprefix(ALTERED): x[None] for n, x in tensors.items() if ALTERED in n}
        for stage in self._stages:
            stage.restore(rows)
        if self._shard.reports is not None:
            rows = {n.removeprefix(REPORTS): x[None] for n, x in tensors.items() if REPORTS in n}
            self._shard.reports.restore(rows)
        if VISITS in rest:
            self._shard.visits = np.array(rest[VISITS])

    def change_run(self, lr: float | None, rounds: int) -> None:
        context = self._shard.context
        context.rounds = rounds
        if lr is not None:
            context.training = replace(context.training, lr=lr)

    def evaluate(self, round: int, stage: str) -> dict[str, float]:
        metrics = self._shard.evaluate(round, stage)
        return {name: float(values[0]) for name, values in metrics.items()}

    def record(self) -> dict[str, float]:
        record: dict[str, float] = {"steps": int(self._shard.steps[0])}
        private = self._shard.context.private
        if private is not None:
            record["epsilon"] = float(spent_epsilon(self._shard.visits, private)[0])
        for stage in self._stages:
            if isinstance(stage, NoiseStage):
                record["epsilon"] = float(stage.epsilon()[0])
        return record

    def model(self) -> Leaves:
        params, statistics = client_model(self._shard, 0, "mixed")
        named = self._task.named_params(params)
        if statistics is not None:
            named |= self._task.statistics_layout.split(statistics)
        return {name: _copy_leaf(leaf) for name, leaf in named.items()}


def _copy_leaf(leaf: torch.Tensor) -> AnyArray:
    copy: AnyArray = leaf.detach().cpu().numpy().copy()
    return copy


def receivers(graph: Graph, names: list[str], me: int) -> dict[str, float]:
    """The receivers of this peer's push with their weights, itself included."""
    return {names[number]: weight for number, weight in receiver_weights(graph, me).items()}


def expected_senders(graph: Graph, names: list[str], me: int) -> dict[str, float]:
    """The neighbours that push to this peer in a round, with their weights."""
    return {
        names[number]: weight
        for number, weight in sender_weights(graph, me).items()
        if number != me
    }


def mutual_neighbours(topology: Topology, names: list[str], me: int) -> set[str]:
    """Find the neighbours on both ends of a link with this peer in the graph's first rounds."""
    if topology.reports is not None:  # any of them may be chosen
        return set(names) - {names[me]}
    gives: set[str] = set()
    gets: set[str] = set()
    for round in range(min(256, max(64, 8 * len(names)))):
        graph = topology(round)
        gives |= set(expected_senders(graph, names, me))
        gets |= set(receivers(graph, names, me))
    return gives & gets
