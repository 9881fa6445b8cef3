"""What a round cost and how far the clients are apart: seconds, bytes, μ, consensus distance."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.engine.gradients import gradient_norms
from quiverfl.engine.settings import RunSettings
from quiverfl.methods.state import fields_of
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import downloads, uploads
from quiverfl.transforms.privacy import spent

if TYPE_CHECKING:
    from quiverfl.engine.shard import Shard

Integers = npt.NDArray[np.int64]


class Clock:
    """Seconds of a round, by what they were spent on."""

    def __init__(self) -> None:
        self._laps: dict[str, float] = {}
        self._begin = self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def record(self) -> dict[str, float]:
        return {"seconds": self._last - self._begin, **self._laps}


def traffic(graph: Graph, payload: Integers) -> dict[str, Any]:
    """Bytes that cross the network; payload[i] is the size of client i's message.

    Over a star a sampled client sends its message and receives the average, which is as large as
    the messages are on average; the server handles both.
    """
    sent = uploads(graph) * payload
    if graph.hub:
        average = int(payload[graph.active].mean()) if graph.active.any() else 0
        received = downloads(graph) * average
        busiest = network = int(sent.sum() + received.sum())
    else:
        received = _received(graph, payload)
        busiest, network = int((sent + received).max()), int(sent.sum())
    return {
        "sent_bytes": sent.tolist(),
        "received_bytes": received.tolist(),
        "busiest_bytes": busiest,
        "network_bytes": network,
    }


def _received(graph: Graph, payload: Integers) -> Integers:
    if graph.one_row:  # everybody hears the same senders, but not itself
        own = np.where(np.isin(np.arange(graph.clients), graph.senders), payload, 0)
        return int(payload[graph.senders].sum()) - own
    links = graph.sparse.tocoo()
    across = (links.row != links.col) & (links.data != 0)
    received = np.bincount(
        links.row[across], weights=payload[links.col[across]], minlength=graph.clients
    )
    return received.astype(np.int64)


def state_record(shard: Shard, settings: RunSettings, round: int) -> dict[str, Any]:
    """Steps and the range of μ; in evaluated rounds also how far the clients are apart."""
    mass = None if shard.method.mass is None else getattr(shard.state, shard.method.mass)
    record: dict[str, Any] = {
        "steps": shard.steps.tolist(),
        "mu_min": None if mass is None else float(mass.min()),
        "mu_max": None if mass is None else float(mass.max()),
        "consensus": None,
        "gradient_shared": None,
        "gradient_personal": None,
    }
    if shard.context.private is not None:
        record["epsilon"] = spent(shard.visits, shard.context.private).tolist()
    if settings.evaluates(round):
        shared = next(iter(fields_of(shard.state, "shared").values()), None)
        record["consensus"] = None if shared is None else consensus_distance(shared, mass)
        if settings.gradients:
            record.update(gradient_norms(shard))
    return record


def consensus_width(clients: int, element_size: int) -> int:
    """Columns that are looked at together."""
    return max(1, 4_000_000 // max(1, clients * element_size))


def consensus_distance(shared: Tensor, mass: Tensor | None) -> float:
    """(1/m) Σ_i ‖z_i - z̄‖², over columns in chunks so that z is never stored whole."""
    total = 0.0
    width = consensus_width(len(shared), shared.element_size())
    for begin in range(0, shared.shape[1], width):
        total += float(squared_distance(shared[:, begin : begin + width], mass))
    return total


def squared_distance(shared: Tensor, mass: Tensor | None) -> Tensor:
    """(1/m) Σ_i ‖z_i - z̄‖² of some columns; twenty times as fast as `torch.var`."""
    z = shared if mass is None else shared / mass.to(shared.dtype).unsqueeze(1)
    apart = z - z.mean(dim=0)
    return apart.square_().sum(dim=0).sum(dtype=torch.float64) / len(z)
