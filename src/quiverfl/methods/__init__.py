"""The methods, by name. Adding one = one file, one entry here, one row in the contract tests."""

from collections.abc import Callable

from quiverfl.errors import QuiverError, nearest
from quiverfl.methods.apfl import APFL
from quiverfl.methods.contract import (
    Interleaved,
    Lookahead,
    Loss,
    Message,
    Method,
    Moment,
    Once,
    Phase,
    Start,
    Train,
    Trained,
)
from quiverfl.methods.dfedavgm import DFedAvgM
from quiverfl.methods.dfedavgmp import DFedAvgMP
from quiverfl.methods.dfedpgp import DFedPGP
from quiverfl.methods.dfedpgpsam import DFedPGPSAM
from quiverfl.methods.dfedsam import DFedSAM
from quiverfl.methods.dispfl import DisPFL
from quiverfl.methods.ditto import Ditto
from quiverfl.methods.fedavg import FedAvg
from quiverfl.methods.fedbabu import FedBABU
from quiverfl.methods.fedper import FedPer
from quiverfl.methods.fedproto import FedProto
from quiverfl.methods.fedprox import FedProx
from quiverfl.methods.fedrep import FedRep
from quiverfl.methods.local import Local
from quiverfl.methods.moon import MOON
from quiverfl.methods.osgp import OSGP
from quiverfl.methods.perfedavg import PerFedAvg
from quiverfl.methods.pfedme import PFedMe
from quiverfl.methods.pushdiging import PushDIGing
from quiverfl.methods.scaffold import SCAFFOLD
from quiverfl.references import is_reference, load_callable

METHODS: dict[str, Callable[..., Method]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": SCAFFOLD,
    "moon": MOON,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbabu": FedBABU,
    "fedproto": FedProto,
    "ditto": Ditto,
    "apfl": APFL,
    "pfedme": PFedMe,
    "perfedavg": PerFedAvg,
    "dfedavgm": DFedAvgM,
    "dfedsam": DFedSAM,
    "dfedavgmp": DFedAvgMP,
    "osgp": OSGP,
    "pushdiging": PushDIGing,
    "dispfl": DisPFL,
    "dfedpgp": DFedPGP,
    "dfedpgpsam": DFedPGPSAM,
}


def find_method(name: str) -> Callable[..., Method]:
    """A method by its name in METHODS, or a class of yours by `module:Class`."""
    if is_reference(name):
        return load_callable(name)
    if name not in METHODS:
        raise QuiverError(
            f"method.name = {name!r}: unknown method; {nearest(name, METHODS)} "
            "Your own: module:Class."
        )
    return METHODS[name]


def method_title(name: str) -> str:
    """What a method is called where people read: its own title, or else the name of its class."""
    title = getattr(find_method(name), "title", None)
    return title if isinstance(title, str) else name.rpartition(":")[2]


__all__ = [
    "APFL",
    "METHODS",
    "MOON",
    "OSGP",
    "SCAFFOLD",
    "DFedAvgM",
    "DFedAvgMP",
    "DFedPGP",
    "DFedPGPSAM",
    "DFedSAM",
    "DisPFL",
    "Ditto",
    "FedAvg",
    "FedBABU",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "Interleaved",
    "Local",
    "Lookahead",
    "Loss",
    "Message",
    "Method",
    "Moment",
    "Once",
    "PFedMe",
    "PerFedAvg",
    "Phase",
    "PushDIGing",
    "Start",
    "Train",
    "Trained",
    "find_method",
    "method_title",
]
