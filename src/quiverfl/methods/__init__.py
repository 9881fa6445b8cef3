"""The methods, by name. Adding one = one file, one entry here, one row in the contract tests."""

from quiverfl.methods.contract import Message, Method, Once, Phase, Start, State, Train
from quiverfl.methods.dfedpgp import DFedPGP
from quiverfl.methods.fedavg import FedAvg
from quiverfl.methods.local import Local

METHODS = {
    "local": Local,
    "fedavg": FedAvg,
    "dfedpgp": DFedPGP,
}

__all__ = [
    "METHODS",
    "DFedPGP",
    "FedAvg",
    "Local",
    "Message",
    "Method",
    "Once",
    "Phase",
    "Start",
    "State",
    "Train",
]
