"""Stages that change who sends what: attacks, privacy noise and robust aggregation.

Attacks and noise replace a client's update: its message relative to what it received last, which
others have seen. A client that neither sends nor receives in a round sends what it has learned
meanwhile when it is back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from quiverfl.engine.collective import World, sum_columns
from quiverfl.engine.exchange.exchange import MessageStage, traffic
from quiverfl.methods.contract import Message
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import count_downloads, count_uploads
from quiverfl.transforms.attacks import Adaptive, Adversary, ForgedMass
from quiverfl.transforms.noise import Noise
from quiverfl.transforms.privacy import UpdatePrivacy, enforce_budget, spent_epsilon
from quiverfl.transforms.robustness import (
    ReceivedMessage,
    Robustness,
    count_sketch,
    cross_links,
    reweigh_graph,
)
from quiverfl.types import Flags, Floats, Integers

Rewrite: TypeAlias = Callable[[Message, Message, str | None, Noise], Message]
"""(messages, what their clients had before the round, name of the mass, noise) → messages."""
COLUMNS = 4096
"""Columns whose differences over all links are in memory at a time."""
BEFORE, RELEASES = "before/", "before//releases"
"""Names in a checkpoint."""


class UpdateStage(MessageStage):
    """Changes updates, given who sends and who is present: sends or receives in this round.

    The rows here are those of the clients `ids`. A peer calls `rewrite` and `receive` itself.
    """

    def __init__(self, ids: Integers) -> None:
        self.ids = ids
        self._present: Flags = np.ones(len(ids), dtype=bool)

    def rewrite(self, round: int, outbox: Message, sends: Flags, present: Flags) -> None:
        """Change outgoing messages in place."""

    def receive(self, mixed: Message, present: Flags) -> None:
        """Take note of what arrived."""

    def before(self, round: int, graph: Graph, outbox: Message) -> tuple[Graph, Message]:
        sends = count_uploads(graph)[self.ids] > 0
        self._present = sends | (count_downloads(graph)[self.ids] > 0)
        self.rewrite(round, outbox, sends, self._present)
        return graph, outbox

    def after(self, round: int, graph: Graph, mixed: Message) -> Message:
        self.receive(mixed, self._present)
        return mixed


class LastMessages(UpdateStage):
    """Every client's last received message, without the mass: its next update starts there."""

    def __init__(
        self, first: Message, ids: Integers, mass: str | None, seed: int, by_row: bool = False
    ) -> None:
        """`first` are the messages of clients before any training.

        `by_row`: every row is rewritten by itself, as peers rewrite theirs.
        """
        super().__init__(ids)
        self._mass, self._seed, self._by_row = mass, seed, by_row
        self.leaves = {name: leaf.clone() for name, leaf in first.items() if name != mass}

    def receive(self, mixed: Message, present: Flags) -> None:
        index = torch.from_numpy(np.flatnonzero(present))
        for name, leaf in self.leaves.items():
            leaf[index] = mixed[name][index]

    def rewrite_rows(
        self,
        rewrite: Rewrite,
        round: int,
        outbox: Message,
        chosen: Flags,
        purpose: str,
        secret: bytes = b"",
    ) -> None:
        """Apply a function to the messages of some rows, in place.

        Its noise is drawn for `purpose`, and from `secret` if other clients know the seed.
        """
        rows = np.flatnonzero(chosen)
        for group in np.split(rows, len(rows)) if self._by_row and len(rows) else [rows]:
            if not len(group):
                continue
            index = torch.from_numpy(group)
            noise = Noise(self._seed, purpose, round, self.ids[group], secret)
            sent = {name: leaf[index] for name, leaf in outbox.items()}
            before = {name: leaf[index] for name, leaf in self.leaves.items()}
            for name, leaf in rewrite(sent, before, self._mass, noise).items():
                outbox[name][index] = leaf

    def tensors(self) -> dict[str, Tensor]:
        return {f"{BEFORE}{name}": leaf for name, leaf in self.leaves.items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        names = [name for name in tensors if name.startswith(BEFORE) and name != RELEASES]
        self.leaves = {name.removeprefix(BEFORE): tensors[name] for name in names}


class AttackStage(UpdateStage):
    """Replaces what attackers send.

    An attacker that claims a false mass deceives other clients and not itself: the part of its own
    message that it keeps, and parts that are refused and return to it, have their true mass.
    """

    def __init__(
        self,
        adversary: Adversary,
        attackers: Flags,
        last: LastMessages,
        mass: str | None,
        rule: Robustness | None = None,
        rounds: int = 1,
    ) -> None:
        """`rule` is the receivers' rule, which an adaptive attack evades."""
        super().__init__(last.ids)
        self._adversary, self._attackers, self._last = adversary, attackers, last
        self._mass = mass if isinstance(adversary, ForgedMass) else None
        self._rule, self._rounds = rule, rounds
        self._missing: Tensor | None = None
        """True mass minus claimed mass, where attackers lie about it."""

    def rewrite(self, round: int, outbox: Message, sends: Flags, present: Flags) -> None:
        attack = self._adversary.attack
        if isinstance(self._adversary, Adaptive):
            progress = round / max(1, self._rounds)
            attack = self._adversary.adapt_to(self._rule, progress).attack
        true = None if self._mass is None else outbox[self._mass].clone()
        attacking = sends & self._attackers
        self._last.rewrite_rows(attack, round, outbox, attacking, "adversary")
        if true is not None and self._mass is not None:
            self._missing = true - outbox[self._mass]

    def after(self, round: int, graph: Graph, mixed: Message) -> Message:
        if self._missing is not None and self._mass is not None:
            own = torch.from_numpy(graph.sparse.diagonal()[self.ids]).to(self._missing)
            mixed[self._mass] = mixed[self._mass] + own * self._missing
        return mixed


class NoiseStage(UpdateStage):
    """Clips and noises the updates of honest clients, and counts the privacy cost."""

    def __init__(
        self,
        privacy: UpdatePrivacy,
        honest: Flags,
        last: LastMessages,
        world: World,
    ) -> None:
        super().__init__(last.ids)
        self._privacy, self._honest, self._last = privacy, honest, last
        self._world = world
        self._releases: Integers = np.zeros(len(last.ids), dtype=np.int64)
        self.secret = b""
        """Secret that the noise is drawn from, if other clients know the run's seed."""

    def rewrite(self, round: int, outbox: Message, sends: Flags, present: Flags) -> None:
        # A client that only receives adds its own share to a sum that other clients see later.
        released = present & self._honest
        self._count_releases(round, released)
        self._last.rewrite_rows(
            self._privacy.privatize, round, outbox, released, "privacy", self.secret
        )

    def _count_releases(self, round: int, released: Flags) -> None:
        """Refuse the round if one of its releases would cost more than the budget."""
        releases = self._releases + released
        enforce_budget(self._gather(releases), self._privacy, round, self._gather(self.ids))
        self._releases = releases

    def _gather(self, own: Integers) -> Integers:
        every: Integers = self._world.gather(torch.from_numpy(own)).numpy()
        return every

    def record(self, graph: Graph, sizes: Integers) -> dict[str, Any]:
        """ε of every client."""
        return {"epsilon": self.epsilon().tolist()}

    def epsilon(self) -> Floats:
        """ε spent so far, per client."""
        return spent_epsilon(self._gather(self._releases), self._privacy)

    def tensors(self) -> dict[str, Tensor]:
        return {RELEASES: torch.from_numpy(self._releases)}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self._releases = tensors[RELEASES].cpu().numpy()


class RobustStage(MessageStage):
    """Weighs links by a robust rule: receivers compare each message with their own.

    With a sketch, random projections go ahead of the messages, and refused messages are not sent.
    """

    def __init__(
        self,
        rule: Robustness,
        seed: int,
        rounds: int,
        mass: str | None,
        world: World,
    ) -> None:
        self._rule, self._seed, self._rounds, self._mass = rule, seed, rounds, mass
        self._world = world
        self._weighed: Graph | None = None

    def before(self, round: int, graph: Graph, outbox: Message) -> tuple[Graph, Message]:
        receivers, senders = cross_links(graph)
        lengths = np.sqrt(self._squares(outbox, graph))
        distances, norms = lengths[: len(receivers)], lengths[len(receivers) :]
        progress = round / max(1, self._rounds)
        messages = ReceivedMessage(receivers, distances, norms[receivers], norms[senders], progress)
        factors = np.where(np.isfinite(distances), self._rule.factors(messages), 0.0)
        self._weighed = reweigh_graph(graph, factors, self._mass is not None)
        return self._weighed, _replace_infinite(outbox)

    def _squares(self, outbox: Message, graph: Graph) -> Floats:
        """‖z_j - z_i‖² of every link, then ‖z_i‖² of every client; of sketches if they go ahead."""
        mass = None if self._mass is None else outbox[self._mass]
        masses = None if mass is None else self._world.gather(mass)
        receivers, senders = (torch.from_numpy(ends) for ends in cross_links(graph))

        def squares(z: Tensor) -> Tensor:
            parts = (z[senders] - z[receivers], z)
            return torch.cat([p.to(torch.float64).square().sum(dim=1) for p in parts]).cpu()

        def squares_of_messages(columns: Tensor) -> Tensor:
            return squares(_debias(columns, masses))

        size = self._rule.sketch
        total = torch.zeros(len(receivers) + graph.clients, dtype=torch.float64)
        for name, leaf in outbox.items():
            if name == self._mass:
                continue
            flat = leaf.reshape(len(leaf), math.prod(leaf.shape[1:]))
            if size is None:
                total = self._world.sum_columns(flat, COLUMNS, squares_of_messages, total)
                continue
            sketch = count_sketch(_debias(flat, mass), size, self._seed, name)
            total = sum_columns(self._world.gather(sketch), COLUMNS, squares, total)
        sums: Floats = total.numpy()
        return sums

    def record(self, graph: Graph, sizes: Integers) -> dict[str, Any]:
        """Messages travel on all links, or with a sketch on those that were accepted."""
        size = self._rule.sketch
        if size is None or self._weighed is None:
            return {}
        sketches = np.where(sizes > 0, 4 * size, 0)
        messages, ahead = traffic(self._weighed, sizes), traffic(graph, sketches)
        return {name: _add(messages[name], ahead[name]) for name in messages}


def _debias(rows: Tensor, mass: Tensor | None) -> Tensor:
    return rows if mass is None else rows / mass.to(rows.dtype).unsqueeze(1)


def _replace_infinite(outbox: Message) -> Message:
    """Messages that are not finite are refused on every link, and 0 · ∞ is not 0."""
    return {
        name: torch.nan_to_num(leaf, nan=0.0, posinf=0.0, neginf=0.0)
        if not bool(torch.isfinite(leaf).all())
        else leaf
        for name, leaf in outbox.items()
    }


def _add(first: Any, second: Any) -> Any:
    if isinstance(first, list):
        return [a + b for a, b in zip(first, second, strict=True)]
    return first + second
