"""Quiver: decentralized personalized federated learning over directed graphs."""

from quiverfl.data.batches import batch_order
from quiverfl.data.federated import FederatedData
from quiverfl.engine.simulate import ClientState, Run, simulate
from quiverfl.errors import Diverged, QuiverError
from quiverfl.methods import METHODS, DFedPGP, FedAvg, Local, Method
from quiverfl.task import Point, Task
from quiverfl.topologies import (
    TOPOLOGIES,
    Graph,
    Topology,
    custom,
    directed_ring,
    erdos_renyi,
    exponential,
    from_matrix,
    from_networkx,
    full,
    grid,
    isolated,
    one_peer_exponential,
    participating,
    random_pull,
    random_push,
    random_regular,
    ring,
    star,
    torus,
)
from quiverfl.training import Training

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "TOPOLOGIES",
    "ClientState",
    "DFedPGP",
    "Diverged",
    "FedAvg",
    "FederatedData",
    "Graph",
    "Local",
    "Method",
    "Point",
    "QuiverError",
    "Run",
    "Task",
    "Topology",
    "Training",
    "batch_order",
    "custom",
    "directed_ring",
    "erdos_renyi",
    "exponential",
    "from_matrix",
    "from_networkx",
    "full",
    "grid",
    "isolated",
    "one_peer_exponential",
    "participating",
    "random_pull",
    "random_push",
    "random_regular",
    "ring",
    "simulate",
    "star",
    "torus",
]
