"""Quiver: decentralized personalized federated learning over directed graphs.

Everything public is a name of this package. It is imported when it is first used, so that a command
which needs no torch does not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quiverfl.data.batches import batch_order
    from quiverfl.data.federated import FederatedData
    from quiverfl.engine.simulate import ClientState, Run, simulate
    from quiverfl.errors import Diverged, QuiverError
    from quiverfl.memory import keep_freed_memory
    from quiverfl.methods import (
        METHODS,
        OSGP,
        DFedAvgM,
        DFedAvgMP,
        DFedPGP,
        DisPFL,
        Ditto,
        FedAvg,
        FedBABU,
        FedPer,
        FedRep,
        Local,
        Method,
    )
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
    "OSGP",
    "TOPOLOGIES",
    "ClientState",
    "DFedAvgM",
    "DFedAvgMP",
    "DFedPGP",
    "DisPFL",
    "Ditto",
    "Diverged",
    "FedAvg",
    "FedBABU",
    "FedPer",
    "FedRep",
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
    "keep_freed_memory",
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

_PLACES = {
    "METHODS": "quiverfl.methods",
    "OSGP": "quiverfl.methods",
    "TOPOLOGIES": "quiverfl.topologies",
    "ClientState": "quiverfl.engine.simulate",
    "DFedAvgM": "quiverfl.methods",
    "DFedAvgMP": "quiverfl.methods",
    "DFedPGP": "quiverfl.methods",
    "DisPFL": "quiverfl.methods",
    "Ditto": "quiverfl.methods",
    "Diverged": "quiverfl.errors",
    "FedAvg": "quiverfl.methods",
    "FedBABU": "quiverfl.methods",
    "FedPer": "quiverfl.methods",
    "FedRep": "quiverfl.methods",
    "FederatedData": "quiverfl.data.federated",
    "Graph": "quiverfl.topologies",
    "Local": "quiverfl.methods",
    "Method": "quiverfl.methods",
    "Point": "quiverfl.task",
    "QuiverError": "quiverfl.errors",
    "Run": "quiverfl.engine.simulate",
    "Task": "quiverfl.task",
    "Topology": "quiverfl.topologies",
    "Training": "quiverfl.training",
    "batch_order": "quiverfl.data.batches",
    "custom": "quiverfl.topologies",
    "directed_ring": "quiverfl.topologies",
    "erdos_renyi": "quiverfl.topologies",
    "exponential": "quiverfl.topologies",
    "from_matrix": "quiverfl.topologies",
    "from_networkx": "quiverfl.topologies",
    "full": "quiverfl.topologies",
    "grid": "quiverfl.topologies",
    "isolated": "quiverfl.topologies",
    "keep_freed_memory": "quiverfl.memory",
    "one_peer_exponential": "quiverfl.topologies",
    "participating": "quiverfl.topologies",
    "random_pull": "quiverfl.topologies",
    "random_push": "quiverfl.topologies",
    "random_regular": "quiverfl.topologies",
    "ring": "quiverfl.topologies",
    "simulate": "quiverfl.engine.simulate",
    "star": "quiverfl.topologies",
    "torus": "quiverfl.topologies",
}
"""Where each of them comes from; the same as the imports above, which type checkers read."""

if not TYPE_CHECKING:  # for a type checker, a name that is not above is a mistake

    def __getattr__(name: str) -> object:
        if name in _PLACES:
            value = getattr(import_module(_PLACES[name]), name)
            globals()[name] = value  # the next use finds it there
            return value
        if name in {place.split(".")[1] for place in _PLACES.values()}:
            return import_module(f"quiverfl.{name}")
        raise AttributeError(f"module 'quiverfl' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_PLACES})
