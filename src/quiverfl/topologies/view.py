"""What clients know of each other when a round is over: what a topology that looks may look at.

With every message a client tells a few numbers about itself, and it remembers what it was told.
Nobody knows more than that: there is no server, and nothing is passed on. The numbers travel
beside the message and are counted with it; only topologies read them, never a method.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from quiverfl.errors import QuiverError
from quiverfl.topologies.arguments import checked_whole
from quiverfl.topologies.graph import Floats, Graph

Told = npt.NDArray[np.float32]
Rounds = npt.NDArray[np.int32]

MOST_CLIENTS = 2_000
"""Everybody remembers everybody: tables of clients × clients."""


def not_too_many(topology: str, clients: int) -> None:
    if clients > MOST_CLIENTS:
        raise QuiverError(
            f"{topology}: {clients:,} clients would each remember what all others told them; "
            f"topologies that look are for {MOST_CLIENTS:,} clients at most, use random_push."
        )


@dataclass(frozen=True)
class Looks:
    """What a topology wants to be told: float32 numbers that go with every message.

    loss    the client's mean training loss with the model it began the round with
    norm    of its update: how far training moved its shared parameters
    sketch  of that update, so many numbers: coordinates with random signs, added up in random
            buckets (a count sketch), which keeps inner products in expectation
    """

    loss: bool = False
    norm: bool = False
    sketch: int = 0
    seed: int = 0
    """Of the sketch; all clients must use the same one."""

    def __post_init__(self) -> None:
        checked_whole(
            "looks", "sketch", self.sketch, 0, None, "it is how many numbers a sketch has"
        )
        if not self.width:
            raise QuiverError("looks: nothing to look at; ask for loss, norm or sketch = 32.")

    @property
    def width(self) -> int:
        """How many numbers a client tells."""
        return int(self.loss) + int(self.norm) + self.sketch

    @property
    def bytes(self) -> int:
        return 4 * self.width

    def memory(self, clients: int) -> int:
        """Bytes of what so many clients know of each other, while a graph is chosen by it.

        Four for every number told and eight for when and how often, as they are kept; eight for
        every number and its square as scores are computed of them, and three tables of scores.
        """
        return clients**2 * (20 * self.width + 32)


@dataclass(frozen=True, eq=False)
class View:
    """Row i is what client i knows, column j is whom it is about; i knows itself best."""

    looks: Looks
    told: Told
    """[clients, clients, looks.width], as last told; NaN where nothing was."""
    heard: Rounds
    """[clients, clients]: the round of the last message from j to i, -1 if there was none."""
    sent: Rounds
    """[clients, clients]: how many messages i has sent to j."""

    @classmethod
    def nothing(cls, looks: Looks, clients: int) -> View:
        """Before the first round nobody has been told anything."""
        square = (clients, clients)
        return cls(
            looks,
            np.full((*square, looks.width), np.nan, dtype=np.float32),
            np.full(square, -1, dtype=np.int32),
            np.zeros(square, dtype=np.int32),
        )

    def after(self, round: int, graph: Graph, telling: Told) -> View:
        """What is known when the messages of a round have arrived; `telling` [clients, width] is
        what each client said of itself in it."""
        told, heard, sent = self.told.copy(), self.heard.copy(), self.sent.copy()
        receivers, senders = graph.sparse.nonzero()
        across = receivers != senders
        receivers, senders = receivers[across], senders[across]
        told[receivers, senders], heard[receivers, senders] = telling[senders], round
        sent[senders, receivers] += 1
        everyone = np.arange(len(told))
        told[everyone, everyone] = telling
        return View(self.looks, told, heard, sent)

    def only(self, client: int) -> View:
        """What one client knows, and of the others' knowledge nothing."""
        nothing = View.nothing(self.looks, self.clients)
        for name, array in nothing.arrays().items():
            array[client] = getattr(self, name)[client]
        return nothing

    @property
    def clients(self) -> int:
        return len(self.heard)

    @property
    def loss(self) -> Floats:
        """[clients, clients]"""
        return self._asked("loss", self.looks.loss, slice(0, 1))[:, :, 0]

    @property
    def norm(self) -> Floats:
        """[clients, clients]"""
        place = int(self.looks.loss)
        return self._asked("norm", self.looks.norm, slice(place, place + 1))[:, :, 0]

    @property
    def sketch(self) -> Floats:
        """[clients, clients, numbers]"""
        place = int(self.looks.loss) + int(self.looks.norm)
        return self._asked("sketch", self.looks.sketch > 0, slice(place, None))

    def _asked(self, name: str, there: bool, places: slice) -> Floats:
        if not there:
            wanted = "sketch=32" if name == "sketch" else f"{name}=True"
            raise QuiverError(
                f"the view has no {name}: the topology did not ask for it; looks=Looks({wanted})."
            )
        return self.told[:, :, places].astype(np.float64)

    def arrays(self) -> dict[str, npt.NDArray[np.float32] | npt.NDArray[np.int32]]:
        """By name, each with a row for every client."""
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}
