"""Cards of a graph and a topology: their texts at a prompt and in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from quiverfl.support.cards import ReprCard, format_range, format_thousands

if TYPE_CHECKING:
    from quiverfl.topologies.graph import Graph


class GraphCard(ReprCard):
    def fields(self: Any) -> Mapping[str, str]:
        graph: Graph = self
        if graph.hub:
            links = "with a server"
        else:
            copies = graph.clients // graph.matrix.shape[0]
            across = int(graph.matrix.nnz) * copies - _count_own_weights(graph)
            links = f"{format_thousands(across)} messages"
        known = {"rows": graph.row_stochastic, "columns": graph.column_stochastic}
        sums = [name for name, holds in known.items() if holds]
        return {
            "clients": format_thousands(graph.clients),
            "training": format_thousands(int(graph.active.sum())),
            "links": links,
            "weights sum to 1 in": " and ".join(sums) or "neither rows nor columns",
        }


class TopologyCard(ReprCard):
    def title(self: Any) -> str:
        return f"Topology {self.name}"

    def fields(self: Any) -> Mapping[str, str]:
        options = {name: str(value) for name, value in self.options.items()}
        return {"clients": format_range(self.clients, self.clients), **options}


def _count_own_weights(graph: Graph) -> int:
    """Weights on the diagonal: nothing crosses the network for them."""
    if graph.one_row:
        return len(graph.senders)
    return int(np.count_nonzero(graph.matrix.diagonal()))
