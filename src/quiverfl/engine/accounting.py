"""What a round cost and how far the clients are apart: bytes, μ, consensus distance."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.topologies.graph import Graph

Integers = npt.NDArray[np.int64]


def traffic(graph: Graph, payload: Integers) -> dict[str, Any]:
    """Bytes that cross the network; payload[i] is the size of client i's message.

    Over a star a sampled client sends its message and receives the average, which is as large as
    the messages are on average; the server handles both.
    """
    sent = graph.uploads * payload
    if graph.hub:
        average = int(payload[graph.active].mean()) if graph.active.any() else 0
        received = graph.downloads * average
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
    if graph.common_row is not None:  # everybody hears the same senders, but not itself
        senders = graph.common_row[0]
        own = np.where(np.isin(np.arange(graph.clients), senders), payload, 0)
        return int(payload[senders].sum()) - own
    links = graph.sparse.tocoo()
    across = (links.row != links.col) & (links.data != 0)
    received = np.bincount(
        links.row[across], weights=payload[links.col[across]], minlength=graph.clients
    )
    return received.astype(np.int64)


def spread_of_mass(state: Any) -> dict[str, float | None]:
    """The smallest and the largest μ; None for methods that have none."""
    mu: Tensor | None = getattr(state, "mu", None)
    if mu is None:
        return {"mu_min": None, "mu_max": None}
    return {"mu_min": float(mu.min()), "mu_max": float(mu.max())}


def consensus_distance(shared: Tensor, mu: Tensor | None) -> float:
    """(1/m) Σ_i ‖z_i - z̄‖², over columns in chunks so that z is never stored whole."""
    total = 0.0
    clients = len(shared)
    width = max(1, 4_000_000 // max(1, clients * shared.element_size()))
    for begin in range(0, shared.shape[1], width):
        z = shared[:, begin : begin + width]
        if mu is not None:
            z = z / mu.to(z.dtype).unsqueeze(1)
        total += float(torch.var(z, dim=0, correction=0).sum(dtype=torch.float64))
    return total
