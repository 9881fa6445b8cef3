"""What a peer trains, seen from the network: a message, a mass, and a rest that never leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from quiverfl.engine.alterations import Alterations
from quiverfl.engine.shard import Shard
from quiverfl.engine.shares import biased, column, debiased, row
from quiverfl.engine.sight import Sight
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Method
from quiverfl.methods.optional import Weighs
from quiverfl.methods.state import roles
from quiverfl.peer.manifest import Array, Leaves, Manifest
from quiverfl.task import Point, Task
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import Topology
from quiverfl.topologies.view import Looks, View
from quiverfl.transforms.chosen import PLAIN, Transforms
from quiverfl.transforms.coding import Coding
from quiverfl.transforms.privacy import spent

LOCAL, OPTIMIZER, ALTERED, SIGHT = "local/", "optimizer/", "altered/", "sight/"
VISITS = "visits/"
"""In the rest beside the state's fields: the last trained model, what optimizers keep, what
altered messages start from, what others have told, and how often each sample was looked at where
that is counted."""
EVERYBODY = np.ones(1, dtype=np.bool_)


class Learner(Protocol):
    """One client's training. Called from one thread only, never from the event loop."""

    @property
    def manifest(self) -> Manifest: ...
    def train(self, round: int, active: bool, share: float, keep: bool) -> None:
        """`share` of all peers train in this round; with `keep` not this one in the next."""

    def message(self, round: int | None = None) -> Leaves:
        """What is pushed, as push-sum carries it (times μ), without the mass; a copy.

        With a round, as it leaves in this round: forged or blurred, where the run has that.
        """

    def rest(self) -> Leaves:
        """Everything else that must survive a restart, as it is before the merge; a copy."""

    def merge(self, message: Mapping[str, Array], mass: float) -> None:
        """The sum of what arrived, and its mass; after `restore` of the rest it belongs to."""

    def restore(self, rest: Mapping[str, Array]) -> None: ...
    def amend(self, lr: float | None, rounds: int) -> None:
        """The run was changed: it has so many rounds, and this learning rate if one is given."""

    def evaluate(self, round: int, stage: str) -> dict[str, float]: ...
    def record(self) -> dict[str, float]:
        """What the last training took, such as steps, and ε of all that was sent so far."""

    def model(self) -> Leaves:
        """The personal model, by parameter name."""

    @property
    def view(self) -> View | None:
        """What this client was told by others, if the topology looks."""

    def tell(self, to: Sequence[int]) -> Array | None:
        """What it says of itself to these in this round; it remembers that it did."""


class ShardLearner:
    """A shard of one client behind the Learner's face: the same method objects as in simulation.

    Nothing is asked of a method but what it declares. One with a mass has it counted by the peers'
    books. One without is given one: its message travels times μ, and the sum that arrives is
    divided by the μ that arrived with it. A field that `message` gives away as it stands is not
    kept, since `merge` replaces it; everything else in the state is.
    """

    def __init__(
        self,
        shard: Shard,
        task: Task,
        method: Method,
        transforms: Transforms = PLAIN,
        clients: int = 1,
        looks: Looks | None = None,
    ) -> None:
        """`clients` are all of the run, the others' too; `looks` is what the topology asks for."""
        self._shard, self._task = shard, task
        outbox = shard.outbox()
        self._mass = method.mass if method.mass in outbox else None
        self._mu, self._secret = 1.0, b""
        sparse, seed = isinstance(method, Weighs), shard.context.seed
        compression = transforms.compression
        coding = None if compression is None else Coding(compression, seed)
        told = 0 if looks is None else looks.width
        self.manifest = Manifest.of(self.message(), self._parameters(), sparse, coding, told)
        if looks is not None:
            shard.sight = Sight(looks, shard.context, method, shard.ids, clients)
        self._alterations: Alterations | None = None
        if Alterations.asked_for(transforms):
            self._alterations = Alterations(
                transforms, seed, shard.ids, clients, self._mass, outbox
            )

    @property
    def view(self) -> View | None:
        return self._shard.view

    def tell(self, to: Sequence[int]) -> Array | None:
        sight = self._shard.sight
        if sight is None:
            return None
        me = int(self._shard.ids[0])
        sight.view.told[me, me] = sight.telling[0]
        sight.view.sent[me, list(to)] += 1
        telling: Array = sight.telling[0]
        return telling

    def draw_noise_from(self, secret: bytes) -> None:
        """Others know the seed of the run: the noise of privacy is to be known to nobody."""
        self._secret = secret
        self._season()

    def _season(self) -> None:
        """Noise that was used once is used again for the very same release alone.

        A round that is done again from another state, as on a restored backup, must not send
        another update with the same noise: their difference would have none.
        """
        if not self._secret:
            return
        seasoned = hashlib.sha256(self._secret)
        for leaf in self._shard.state:
            seasoned.update(leaf.detach().cpu().contiguous().numpy().tobytes())
        self._shard.context.secret = seasoned.digest()
        if self._alterations is not None:
            self._alterations.secret = seasoned.digest()

    def _parameters(self) -> list[tuple[str, tuple[int, ...]]]:
        """The names and shapes inside the leaves, so that peers with other models do not talk."""
        layouts = {"shared": self._task.shared_layout, "personal": self._task.personal_layout}
        kinds = roles(type(self._shard.state))
        found: list[tuple[str, tuple[int, ...]]] = []
        for name, leaf in sorted(self.message().items()):
            layout = layouts.get(kinds.get(name, "any"))
            if layout is None:
                found.append((name, leaf.shape))
            else:
                parts = zip(layout.names, layout.shapes, strict=True)
                found += [(f"{name}.{part}", shape) for part, shape in parts]
        return found

    def train(self, round: int, active: bool, share: float, keep: bool) -> None:
        self._season()
        if round == 0:  # its first model stays its local one if it does not train
            self._shard.remember(np.array([not active]))
        self._shard.train(round, np.array([active]), share)
        self._shard.remember(np.array([keep]))

    def message(self, round: int | None = None) -> Leaves:
        outbox = self._shard.outbox()
        if round is not None and self._alterations is not None:
            outbox = {name: leaf.clone() for name, leaf in outbox.items()}
            # In every round: a newcomer may ask for the model of one that talks to nobody.
            self._alterations.alter(round, outbox, EVERYBODY, EVERYBODY)
        message = {name: _copied(leaf[0]) for name, leaf in outbox.items() if name != self._mass}
        return message if self._mass is not None else biased(message, self._mu)

    def rest(self) -> Leaves:
        given_away = {leaf.data_ptr() for leaf in self._shard.outbox().values()}
        rest = {
            name: _copied(leaf[0])
            for name, leaf in self._shard.state._asdict().items()
            if leaf.data_ptr() not in given_away
        }
        if 0 in self._shard.local.points:
            kept = self._shard.local.points[0]
            rest |= {f"{LOCAL}{name}": _copied(part) for name, part in kept._asdict().items()}
        for number, buffers in self._shard.buffers.items():
            names = {f"{OPTIMIZER}{number}/{name}": leaf[0] for name, leaf in buffers.items()}
            rest |= {name: _copied(leaf) for name, leaf in names.items()}
        if self._alterations is not None:
            kept_rows = self._alterations.tensors()
            rest |= {f"{ALTERED}{name}": _copied(rows[0]) for name, rows in kept_rows.items()}
        if self._shard.sight is not None:
            known = self._shard.sight.rows()
            rest |= {f"{SIGHT}{name}": _copied(rows[0]) for name, rows in known.items()}
        if self._shard.context.private is not None:
            rest[VISITS] = self._shard.visits.copy()
        return rest

    def merge(self, message: Mapping[str, Array], mass: float) -> None:
        self._mu = mass
        if self._mass is None:
            message = debiased(message, mass)
        mixed = {name: self._tensor(leaf)[None] for name, leaf in message.items()}
        if self._mass is not None:
            mixed[self._mass] = self._tensor(np.array([mass], dtype=np.float64))
        if self._alterations is not None:
            self._alterations.received(mixed, EVERYBODY)
        self._shard.deliver(mixed)

    def _tensor(self, leaf: Array) -> torch.Tensor:
        """A copy, where the shard computes."""
        return torch.from_numpy(np.array(leaf)).to(self._shard.context.device)

    def restore(self, rest: Mapping[str, Array]) -> None:
        tensors = {name: self._tensor(leaf) for name, leaf in rest.items()}
        fields = {name: leaf[None] for name, leaf in tensors.items() if "/" not in name}
        for name, leaf in fields.items():
            here = getattr(self._shard.state, name, None)
            if here is None or here.shape != leaf.shape:
                raise QuiverError(
                    "the model has another size than the one in the store: the data has other "
                    "classes or columns than before, or the model has changed. Put them back, or "
                    "start a new folder."
                )
        self._shard.state = self._shard.state._replace(**fields)
        kept = [tensors[f"{LOCAL}{n}"] for n in Point._fields if f"{LOCAL}{n}" in tensors]
        self._shard.local.points = {0: Point(*kept)} if kept else {}
        self._shard.buffers = {}
        for name, leaf in tensors.items():
            if name.startswith(OPTIMIZER):
                number, _, buffer = name.removeprefix(OPTIMIZER).partition("/")
                self._shard.buffers.setdefault(int(number), {})[buffer] = leaf[None]
        if self._alterations is not None:
            rows = {n.removeprefix(ALTERED): x[None] for n, x in tensors.items() if ALTERED in n}
            self._alterations.restore(rows)
        if self._shard.sight is not None:
            rows = {n.removeprefix(SIGHT): x[None] for n, x in tensors.items() if SIGHT in n}
            self._shard.sight.restore(rows)
        if VISITS in rest:
            self._shard.visits = np.array(rest[VISITS])

    def amend(self, lr: float | None, rounds: int) -> None:
        context = self._shard.context
        context.rounds = rounds
        if lr is not None:
            context.training = replace(context.training, lr=lr)

    def evaluate(self, round: int, stage: str) -> dict[str, float]:
        metrics = self._shard.evaluate(round, stage)
        return {name: float(values[0]) for name, values in metrics.items()}

    def record(self) -> dict[str, float]:
        found: dict[str, float] = {"steps": int(self._shard.steps[0])}
        private, altered = self._shard.context.private, self._alterations
        if private is not None:
            found["epsilon"] = float(spent(self._shard.visits, private)[0])
        elif altered is not None and "epsilon" in (record := altered.record()):
            found["epsilon"] = record["epsilon"][0]
        return found

    def model(self) -> Leaves:
        point = self._shard.model(0, "mixed")
        return {name: _copied(leaf) for name, leaf in self._task.named(point).items()}


def _copied(leaf: torch.Tensor) -> Array:
    copy: Array = leaf.detach().cpu().numpy().copy()
    return copy


def receivers(graph: Graph, names: list[str], me: int) -> dict[str, float]:
    """Whom this peer pushes to and with which weight, itself included."""
    return {names[number]: weight for number, weight in column(graph, me).items()}


def expected_senders(graph: Graph, names: list[str], me: int) -> dict[str, float]:
    """Who pushes to this peer in a round, and which weight that has."""
    return {names[number]: weight for number, weight in row(graph, me).items() if number != me}


def mutual_neighbours(topology: Topology, names: list[str], me: int) -> set[str]:
    """Who pushes to this peer and gets from it, in the first rounds of the graph."""
    if topology.looks is not None:  # whoever is chosen
        return set(names) - {names[me]}
    gives: set[str] = set()
    gets: set[str] = set()
    for round in range(min(256, max(64, 8 * len(names)))):
        graph = topology(round)
        gives |= set(expected_senders(graph, names, me))
        gets |= set(receivers(graph, names, me))
    return gives & gets
