"""The methods, by name. Adding one = one file, one entry here, one row in the contract tests."""

from collections.abc import Callable

from quiverfl.methods.contract import Message, Method, Once, Phase, Start, State, Train
from quiverfl.methods.dfedavgm import DFedAvgM
from quiverfl.methods.dfedavgmp import DFedAvgMP
from quiverfl.methods.dfedpgp import DFedPGP
from quiverfl.methods.dispfl import DisPFL
from quiverfl.methods.ditto import Ditto
from quiverfl.methods.fedavg import FedAvg
from quiverfl.methods.fedbabu import FedBABU
from quiverfl.methods.fedper import FedPer
from quiverfl.methods.fedrep import FedRep
from quiverfl.methods.local import Local
from quiverfl.methods.osgp import OSGP

METHODS: dict[str, Callable[..., Method]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbabu": FedBABU,
    "ditto": Ditto,
    "dfedavgm": DFedAvgM,
    "dfedavgmp": DFedAvgMP,
    "osgp": OSGP,
    "dispfl": DisPFL,
    "dfedpgp": DFedPGP,
}

__all__ = [
    "METHODS",
    "OSGP",
    "DFedAvgM",
    "DFedAvgMP",
    "DFedPGP",
    "DisPFL",
    "Ditto",
    "FedAvg",
    "FedBABU",
    "FedPer",
    "FedRep",
    "Local",
    "Message",
    "Method",
    "Once",
    "Phase",
    "Start",
    "State",
    "Train",
]
