"""Which client is on which rank: neighbours in number stay together, work is shared out evenly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quiverfl.errors import QuiverError

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

EVERY_CLIENT = 0.2
"""Of the mean work: what a client costs however few examples it has (memory, mixing)."""


@dataclass(frozen=True, eq=False)
class Placement:
    """Rank r has clients cuts[r] … cuts[r + 1] - 1, at least one.

    So what ranks have, one after the other, is in client order, and sums keep their order.
    """

    cuts: Integers

    @classmethod
    def balanced(cls, work: Integers | Floats, ranks: int) -> Placement:
        """Cut where the work so far is nearest to each rank's even share."""
        clients = len(work)
        if ranks > clients:
            raise QuiverError(
                f"{ranks} ranks for {clients} clients: a rank holds at least one client. Start at "
                f"most {clients} ranks."
            )
        costs = np.asarray(work, dtype=np.float64)
        costs = costs + EVERY_CLIENT * max(float(costs.mean()), 1e-9)
        done = np.concatenate([[0.0], np.cumsum(costs)])
        cuts = [0]
        for rank in range(1, ranks):
            wanted = done[-1] * rank / ranks
            nearest = int(np.abs(done - wanted).argmin())
            cuts.append(min(max(nearest, cuts[-1] + 1), clients - (ranks - rank)))
        return cls(np.array([*cuts, clients], dtype=np.int64))

    @property
    def ranks(self) -> int:
        return len(self.cuts) - 1

    @property
    def clients(self) -> int:
        return int(self.cuts[-1])

    @property
    def counts(self) -> list[int]:
        """Clients of each rank."""
        return [int(count) for count in np.diff(self.cuts)]

    def on(self, rank: int) -> Integers:
        """The clients of one rank."""
        return np.arange(self.cuts[rank], self.cuts[rank + 1])

    def counted(self, clients: Integers) -> list[int]:
        """How many of some clients each rank has."""
        places = np.searchsorted(np.sort(clients), self.cuts)
        return [int(count) for count in np.diff(places)]
