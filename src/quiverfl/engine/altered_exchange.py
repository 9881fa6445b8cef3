"""What leaves a client is not always what its method says: it is forged, or blurred for privacy.

Both start from what the client had when the round began, which is what it received last: a function
of messages that others have seen. Who neither sends nor receives has nothing altered, and what it
learns meanwhile is part of the update that it sends when it is back. An attacker deceives others,
not itself: what it keeps of its own message, and what is refused and comes home, is honest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.engine.everyone import HERE, Everyone
from quiverfl.engine.exchange import Exchange
from quiverfl.methods.contract import Message
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import downloads, uploads
from quiverfl.transforms.adversary import Adaptive, Adversary
from quiverfl.transforms.noise import Noise
from quiverfl.transforms.privacy import UpdatePrivacy, check_budget, spent
from quiverfl.transforms.robustness import Robustness

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Alter = Callable[[Message, Message, str | None, Noise], Message]


class AlteredExchange:
    """Wraps the exchange that moves what was altered; `ids` are the clients of the rows here."""

    def __init__(
        self,
        inner: Exchange,
        adversary: Adversary | None,
        privacy: UpdatePrivacy | None,
        attackers: Integers,
        seed: int,
        ids: Integers,
        mass: str | None,
        first: Message,
        everyone: Everyone = HERE,
        rule: Robustness | None = None,
        rounds: int = 1,
    ) -> None:
        """`first` is what clients would have sent before they trained at all. `rule` is what an
        attacker that adapts knows of the receivers."""
        self._inner, self._seed = inner, seed
        self._adversary, self._privacy = adversary, privacy
        self._ids, self._mass, self._everyone = ids, mass, everyone
        self._rule, self._rounds = rule, rounds
        self._lies: Message = {}
        """The attackers' own messages less what they sent in their place."""
        self._liars = np.zeros(0, dtype=np.int64)
        self._attack: npt.NDArray[np.bool_] = np.isin(ids, attackers)
        self._before = {n: x.clone() for n, x in first.items() if n != mass}
        self._there: npt.NDArray[np.bool_] = np.ones(len(ids), dtype=bool)
        self._releases: Integers = np.zeros(len(ids), dtype=np.int64)

    def senders(self, graph: Graph) -> None:
        """Everybody's: a client that does not send keeps what it has."""

    def weigh(self, outbox: Message, payload: Integers) -> Integers:
        return self._inner.weigh(outbox, payload)

    def push(self, round: int, graph: Graph, outbox: Message) -> None:
        sends = uploads(graph)[self._ids] > 0
        self._there = sends | (downloads(graph)[self._ids] > 0)
        if self._adversary is not None:
            self._forge(self._adversary, outbox, sends & self._attack, round)
        if self._privacy is not None:
            # What one that only receives adds to its own is not to be known either.
            honest = self._there & ~self._attack
            self._spend(self._privacy, round, honest)
            self._alter(outbox, honest, round, "privacy", self._privacy.released)
        self._inner.push(round, graph, outbox)

    def _forge(self, adversary: Adversary, outbox: Message, chosen: Any, round: int) -> None:
        forged: Alter = adversary.forged
        if isinstance(adversary, Adaptive):
            forged = adversary.against(self._rule, round / max(1, self._rounds)).forged
        self._liars = np.flatnonzero(chosen)
        index = torch.from_numpy(self._liars)
        honest = {name: leaf[index] for name, leaf in outbox.items()}
        self._alter(outbox, chosen, round, "adversary", forged)
        self._lies = {name: leaf.sub_(outbox[name][index]) for name, leaf in honest.items()}

    def _spend(self, privacy: UpdatePrivacy, round: int, sends: Any) -> None:
        """Count this round's releases, unless one of them would cost more than the budget."""
        after = self._releases + sends
        every = self._everybodys(after)
        check_budget(every, privacy, round, np.arange(len(every)))
        self._releases = after

    def _everybodys(self, own: Integers) -> Integers:
        found: Integers = self._everyone.rows(torch.from_numpy(own)).numpy()
        return found

    def _alter(self, outbox: Message, chosen: Any, round: int, why: str, alter: Alter) -> None:
        rows = np.flatnonzero(chosen)
        if not len(rows):
            return
        index = torch.from_numpy(rows)
        noise = Noise(self._seed, why, round, self._ids[rows])
        sent = {name: leaf[index] for name, leaf in outbox.items()}
        before = {name: leaf[index] for name, leaf in self._before.items()}
        for name, leaf in alter(sent, before, self._mass, noise).items():
            outbox[name][index] = leaf

    def collect(self, round: int) -> Message:
        mixed = self._inner.collect(round)
        if len(self._liars):
            index = torch.from_numpy(self._liars)
            kept = torch.from_numpy(self._inner.kept()[self._ids[self._liars]])
            for name, lie in self._lies.items():
                share = kept.to(lie).view(-1, *(1 for _ in lie.shape[1:]))
                mixed[name] = mixed[name].contiguous()  # one row may stand for all
                mixed[name][index] += share * lie
        self._lies = {}
        there = torch.from_numpy(np.flatnonzero(self._there))
        for name, leaf in self._before.items():
            leaf[there] = mixed[name][there]
        return mixed

    def kept(self) -> Floats:
        return self._inner.kept()

    def traffic(self, graph: Graph, payload: Integers) -> dict[str, Any]:
        record = self._inner.traffic(graph, payload)
        if self._privacy is not None:
            record["epsilon"] = spent(self._everybodys(self._releases), self._privacy).tolist()
        return record

    def in_flight(self) -> dict[str, Tensor]:
        kept = {f"before/{name}": leaf for name, leaf in self._before.items()}
        kept["before//releases"] = torch.from_numpy(self._releases)
        return {**self._inner.in_flight(), **kept}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        own = {name for name in tensors if name.startswith("before/")}
        self._releases = tensors["before//releases"].cpu().numpy()
        own.discard("before//releases")
        tensors = {n: x for n, x in tensors.items() if n != "before//releases"}
        self._before = {name.removeprefix("before/"): tensors[name] for name in own}
        self._inner.restore({n: x for n, x in tensors.items() if n not in own})
