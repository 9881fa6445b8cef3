"""What a graph and a topology say of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from quiverfl.card import Shown, between, thousands

if TYPE_CHECKING:
    from quiverfl.topologies.graph import Graph


class ShownGraph(Shown):
    def facts(self: Any) -> Mapping[str, str]:
        graph: Graph = self
        if graph.hub:
            links = "with a server"
        else:
            copies = graph.clients // graph.matrix.shape[0]
            across = int(graph.matrix.nnz) * copies - _own(graph)
            links = f"{thousands(across)} messages"
        known = {"rows": graph.row_stochastic, "columns": graph.column_stochastic}
        sums = [name for name, holds in known.items() if holds]
        return {
            "clients": thousands(graph.clients),
            "training": thousands(int(graph.active.sum())),
            "links": links,
            "weights sum to 1 in": " and ".join(sums) or "neither rows nor columns",
        }


class ShownTopology(Shown):
    def title(self: Any) -> str:
        return f"Topology {self.name}"

    def facts(self: Any) -> Mapping[str, str]:
        options = {name: str(value) for name, value in self.options.items()}
        return {"clients": between(self.clients, self.clients), **options}


def _own(graph: Graph) -> int:
    """Weights on the diagonal: nothing crosses the network for them."""
    if graph.one_row:
        return len(graph.senders)
    return int(np.count_nonzero(graph.matrix.diagonal()))
