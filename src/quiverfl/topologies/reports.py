"""Reports that clients exchange for adaptive topologies.

With every message a client reports a few numbers about itself, and each receiver remembers the
last report that reached it. Reports are not forwarded and there is no server, so a client knows
only what reached it directly. They travel beside the message and are counted with it. Topologies
alone read them; a method never does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quiverfl.errors import QuiverError
from quiverfl.options import refuse_old_names
from quiverfl.topologies.arguments import check_whole
from quiverfl.topologies.graph import Graph
from quiverfl.types import Floats

ReportValues = npt.NDArray[np.float32]
Rounds = npt.NDArray[np.int32]

MOST_CLIENTS = 2_000
"""Every client remembers every other: tables of clients × clients."""


def check_client_count(topology: str, clients: int) -> None:
    """Refuse more clients than a table of clients × clients should have."""
    if clients > MOST_CLIENTS:
        raise QuiverError(
            f"{topology}: {clients:,} clients would each remember the reports of all others; "
            f"adaptive topologies take {MOST_CLIENTS:,} clients at most, use random_push."
        )


@dataclass(frozen=True)
class ReportSpec:
    """Contents of a client's report for a topology: float32 numbers sent with every message.

    loss    the client's mean training loss with the model it began the round with
    norm    norm of its update: how far training moved its shared parameters
    sketch  count sketch of that update, of so many numbers: coordinates with random signs, added
            up in random buckets, which keeps inner products in expectation
    model   the same of its shared parameters themselves, as training left them
    """

    loss: bool = False
    norm: bool = False
    sketch: int = 0
    seed: int = 0
    """Seed of the sketches; all clients must use the same one."""
    model: int = 0

    def __post_init__(self) -> None:
        why = "it is how many numbers a sketch has"
        check_whole("ReportSpec", "sketch", self.sketch, 0, None, why)
        check_whole("ReportSpec", "model", self.model, 0, None, why)
        if not self.width:
            raise QuiverError(
                "ReportSpec: nothing to report; ask for loss, norm, sketch = 32 or model = 32."
            )

    @property
    def width(self) -> int:
        """Numbers in one report."""
        return int(self.loss) + int(self.norm) + self.sketch + self.model

    @property
    def bytes(self) -> int:
        return 4 * self.width

    def memory(self, clients: int) -> int:
        """Bytes of all clients' reports about each other, while a graph is chosen by them.

        Four for every number and eight for its round and count, as they are stored; eight for
        every number and its square while scores are computed, and three tables of scores.
        """
        return clients**2 * (20 * self.width + 32)


@refuse_old_names(
    looks="spec", told="values", nothing="empty", after="with_messages", only="of_client"
)
@dataclass(frozen=True, eq=False)
class ReportView:
    """The reports that reached each client: row i is what client i knows, column j is about j.

    Row i, column i is the client's own latest report.
    """

    spec: ReportSpec
    values: ReportValues
    """[clients, clients, spec.width]: the last report of j that reached i; NaN if none did."""
    heard: Rounds
    """[clients, clients]: the round of the last message from j to i, -1 if there was none."""
    sent: Rounds
    """[clients, clients]: how many messages i has sent to j."""

    @classmethod
    def empty(cls, spec: ReportSpec, clients: int) -> ReportView:
        """Before the first round no client has received a report."""
        square = (clients, clients)
        return cls(
            spec,
            np.full((*square, spec.width), np.nan, dtype=np.float32),
            np.full(square, -1, dtype=np.int32),
            np.zeros(square, dtype=np.int32),
        )

    def with_messages(self, round: int, graph: Graph, reports: ReportValues) -> ReportView:
        """The view after a round's messages; `reports` [clients, width] went with them."""
        values, heard, sent = self.values.copy(), self.heard.copy(), self.sent.copy()
        receivers, senders = graph.sparse.nonzero()
        across = receivers != senders
        receivers, senders = receivers[across], senders[across]
        values[receivers, senders], heard[receivers, senders] = reports[senders], round
        sent[senders, receivers] += 1
        everyone = np.arange(len(values))
        values[everyone, everyone] = reports
        return ReportView(self.spec, values, heard, sent)

    def of_client(self, client: int) -> ReportView:
        """The reports that one client has received: all other rows are empty."""
        view = ReportView.empty(self.spec, self.clients)
        for name, rows in view.arrays().items():
            rows[client] = self.arrays()[name][client]
        return view

    @property
    def clients(self) -> int:
        return len(self.heard)

    @property
    def loss(self) -> Floats:
        """[clients, clients]: the loss that j reported to i."""
        return self._columns("loss", self.spec.loss, slice(0, 1))[:, :, 0]

    @property
    def norm(self) -> Floats:
        """[clients, clients]: the norm of its update that j reported to i."""
        column = int(self.spec.loss)
        return self._columns("norm", self.spec.norm, slice(column, column + 1))[:, :, 0]

    @property
    def sketch(self) -> Floats:
        """[clients, clients, numbers]: the sketch of its update that j reported to i."""
        first = int(self.spec.loss) + int(self.spec.norm)
        columns = slice(first, first + self.spec.sketch)
        return self._columns("sketch", self.spec.sketch > 0, columns)

    @property
    def model(self) -> Floats:
        """[clients, clients, numbers]: the sketch of its shared parameters that j reported to i."""
        first = self.spec.width - self.spec.model
        return self._columns("model", self.spec.model > 0, slice(first, None))

    def _columns(self, name: str, is_reported: bool, columns: slice) -> Floats:
        if not is_reported:
            option = f"{name}=32" if name in ("sketch", "model") else f"{name}=True"
            raise QuiverError(
                f"the view has no {name}: the topology did not ask for it; "
                f"reports=ReportSpec({option})."
            )
        return self.values[:, :, columns].astype(np.float64)

    def arrays(self) -> dict[str, npt.NDArray[np.float32] | npt.NDArray[np.int32]]:
        """The arrays by the names that checkpoints and peers store them under, a row a client."""
        return {"told": self.values, "heard": self.heard, "sent": self.sent}

    @classmethod
    def from_arrays(cls, spec: ReportSpec, arrays: dict[str, npt.NDArray[Any]]) -> ReportView:
        """The inverse of `arrays`."""
        return cls(spec, arrays["told"], arrays["heard"], arrays["sent"])
