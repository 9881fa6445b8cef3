"""The methods, by name. Adding one = one file, one entry here, one row in the contract tests."""

from collections.abc import Callable

from quiverfl.errors import QuiverError, nearest
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
from quiverfl.references import is_reference, load_callable

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


def find_method(name: str) -> Callable[..., Method]:
    """A method by its name in METHODS, or one's own class by `module:Class`."""
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
    "find_method",
    "method_title",
]
