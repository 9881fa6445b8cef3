"""What leaves a client is not always what its method says: it is forged, or blurred for privacy.

Both start from what the client had when the round began, which is what it received last: a function
of messages that others have seen. Who neither sends nor receives has nothing altered, and what it
learns meanwhile is part of the update that it sends when it is back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.engine.everyone import HERE, Everyone
from quiverfl.methods.contract import Message
from quiverfl.transforms.adversary import Adaptive, Adversary, ForgedMass, attackers
from quiverfl.transforms.chosen import Transforms
from quiverfl.transforms.noise import Noise
from quiverfl.transforms.privacy import UpdatePrivacy, check_budget, spent

Flags = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]
Alter = Callable[[Message, Message, str | None, Noise], Message]


class Alterations:
    """Of some clients' messages, a row each; `ids` are their numbers among `clients`."""

    def __init__(
        self,
        transforms: Transforms,
        seed: int,
        ids: Integers,
        clients: int,
        mass: str | None,
        first: Message,
        everyone: Everyone = HERE,
        apart: bool = False,
        rounds: int = 1,
    ) -> None:
        """`first` is what clients would have sent before they trained at all, `rounds` how many
        there will be.

        With `apart` every row is computed by itself, as peers compute theirs.
        """
        blurred = transforms.privacy
        self._adversary: Adversary | None = transforms.adversary
        self._privacy = blurred if isinstance(blurred, UpdatePrivacy) else None
        self._seed, self._ids, self._mass = seed, ids, mass
        self._everyone, self._apart = everyone, apart
        self._rule, self._rounds = transforms.robustness, rounds
        lied = isinstance(self._adversary, ForgedMass)
        self.forges: tuple[str, ...] = (mass,) if lied and mass is not None else ()
        """The mass that attackers lie about, if they do."""
        self._attack: Flags = np.isin(ids, attackers(self._adversary, seed, clients))
        self._before = {n: x.clone() for n, x in first.items() if n != mass}
        self._releases: Integers = np.zeros(len(ids), dtype=np.int64)
        self.secret = b""
        """What the noise of privacy is drawn from where others know the seed."""

    @staticmethod
    def asked_for(transforms: Transforms) -> bool:
        return transforms.adversary is not None or isinstance(transforms.privacy, UpdatePrivacy)

    def alter(self, round: int, outbox: Message, sends: Flags, there: Flags) -> None:
        """In place; `there` are those who send or receive in this round."""
        if self._adversary is not None:
            forged = self._forged(self._adversary, round)
            self._rows(outbox, sends & self._attack, round, "adversary", forged)
        if self._privacy is not None:
            # What one that only receives adds to its own is not to be known either.
            honest = there & ~self._attack
            self._spend(self._privacy, round, honest)
            self._rows(outbox, honest, round, "privacy", self._privacy.released)

    def _forged(self, adversary: Adversary, round: int) -> Alter:
        if isinstance(adversary, Adaptive):
            return adversary.against(self._rule, round / max(1, self._rounds)).forged
        return adversary.forged

    def _spend(self, privacy: UpdatePrivacy, round: int, sends: Flags) -> None:
        """Count this round's releases, unless one of them would cost more than the budget."""
        after = self._releases + sends
        check_budget(self._everybodys(after), privacy, round, self._everybodys(self._ids))
        self._releases = after

    def _everybodys(self, own: Integers) -> Integers:
        found: Integers = self._everyone.rows(torch.from_numpy(own)).numpy()
        return found

    def _rows(self, outbox: Message, chosen: Flags, round: int, why: str, alter: Alter) -> None:
        rows = np.flatnonzero(chosen)
        for some in np.split(rows, len(rows)) if self._apart and len(rows) else [rows]:
            if not len(some):
                continue
            index = torch.from_numpy(some)
            secret = self.secret if why == "privacy" else b""
            noise = Noise(self._seed, why, round, self._ids[some], secret)
            sent = {name: leaf[index] for name, leaf in outbox.items()}
            before = {name: leaf[index] for name, leaf in self._before.items()}
            for name, leaf in alter(sent, before, self._mass, noise).items():
                outbox[name][index] = leaf

    def received(self, mixed: Message, there: Flags) -> None:
        """The next update starts from what these clients have now."""
        index = torch.from_numpy(np.flatnonzero(there))
        for name, leaf in self._before.items():
            leaf[index] = mixed[name][index]

    def record(self) -> dict[str, Any]:
        """ε of every client, if its messages are blurred."""
        if self._privacy is None:
            return {}
        return {"epsilon": spent(self._everybodys(self._releases), self._privacy).tolist()}

    def tensors(self) -> dict[str, Tensor]:
        kept = {f"before/{name}": leaf for name, leaf in self._before.items()}
        kept["before//releases"] = torch.from_numpy(self._releases)
        return kept

    def restore(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take back what `tensors` gave; what is left of the given ones."""
        own = {name for name in tensors if name.startswith("before/")}
        self._releases = tensors["before//releases"].cpu().numpy()
        leaves = own - {"before//releases"}
        self._before = {name.removeprefix("before/"): tensors[name] for name in leaves}
        return {name: leaf for name, leaf in tensors.items() if name not in own}
