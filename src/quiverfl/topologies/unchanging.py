"""The first graphs of a topology, before there is a run."""

from __future__ import annotations

import numpy as np

from quiverfl.seeds import hashed
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import Topology
from quiverfl.topologies.view import Looks, Told, View


def first_graphs(topology: Topology, rounds: int) -> list[Graph]:
    """Rounds 0 … rounds - 1.

    Of a topology that looks they are those of clients that always tell the same, numbers drawn
    once: its choices are most rigid then, and its links fewest.
    """
    if topology.looks is None:
        return [topology(round) for round in range(rounds)]
    view, graphs = View.nothing(topology.looks, topology.clients), []
    telling = _unchanging(topology.looks, topology.clients)
    for round in range(rounds):
        graphs.append(topology(round, view))
        view = view.after(round, graphs[-1], telling)
    return graphs


def _unchanging(looks: Looks, clients: int) -> Told:
    """Losses and norms in (0, 1), sketches around 0."""
    places = np.arange(looks.width)
    bits = hashed(looks.seed, "unchanging", np.arange(clients)[:, None], places)
    drawn = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.where(places < looks.width - looks.sketch, drawn, 2 * drawn - 1).astype(np.float32)
