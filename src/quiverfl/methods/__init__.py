"""The methods, by name. Adding one = one file, one entry here, one row in the contract tests."""

from collections.abc import Callable

from quiverfl.methods.apfl import APFL
from quiverfl.methods.contract import (
    Interleaved,
    Lookahead,
    Loss,
    Message,
    Method,
    Phase,
    SingleStep,
    Start,
    StepInfo,
    Train,
    Trained,
)
from quiverfl.methods.deprl import DePRL
from quiverfl.methods.dfedavgm import DFedAvgM
from quiverfl.methods.dfedavgmp import DFedAvgMP
from quiverfl.methods.dfedpgp import DFedPGP
from quiverfl.methods.dfedpgpsam import DFedPGPSAM
from quiverfl.methods.dfedsalt import DFedSalt
from quiverfl.methods.dfedsam import DFedSAM
from quiverfl.methods.dfedsgpsm import DFedSGPSM
from quiverfl.methods.dispfl import DisPFL
from quiverfl.methods.ditto import Ditto
from quiverfl.methods.fedala import FedALA
from quiverfl.methods.fedas import FedAS
from quiverfl.methods.fedavg import FedAvg
from quiverfl.methods.fedbabu import FedBABU
from quiverfl.methods.fedbn import FedBN
from quiverfl.methods.feddbe import FedDBE
from quiverfl.methods.fedper import FedPer
from quiverfl.methods.fedproto import FedProto
from quiverfl.methods.fedprox import FedProx
from quiverfl.methods.fedrep import FedRep
from quiverfl.methods.fedrod import FedRoD
from quiverfl.methods.kgt import KGT
from quiverfl.methods.local import Local
from quiverfl.methods.moon import MOON
from quiverfl.methods.osgp import OSGP
from quiverfl.methods.perfedavg import PerFedAvg
from quiverfl.methods.pfedme import PFedMe
from quiverfl.methods.pushdiging import PushDIGing
from quiverfl.methods.scaffold import SCAFFOLD
from quiverfl.methods.scaffoldp import ScaffoldP
from quiverfl.options import refuse_old_names
from quiverfl.support.references import Registry

_METHODS: dict[str, Callable[..., Method]] = {
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
    "dfedsalt": DFedSalt,
    "dfedsgpsm": DFedSGPSM,
    "deprl": DePRL,
    "kgt": KGT,
    "fedala": FedALA,
    "feddbe": FedDBE,
    "fedrod": FedRoD,
    "fedas": FedAS,
    "scaffoldp": ScaffoldP,
    "fedbn": FedBN,
}
_ALIASES = {"dfedalt": "dfedavgmp", "fedalt": "fedrep", "fedsim": "fedper"}
METHODS = Registry("method", _METHODS, own="module:Class", key="method.name", aliases=_ALIASES)


def method_title(name: str) -> str:
    """A method's title for readers: its own, or else the name of its class."""
    title = getattr(METHODS.find(name), "title", None)
    return title if isinstance(title, str) else name.rpartition(":")[2]


refuse_old_names(point="params", common="common_params")(Start)
refuse_old_names(rate="lr", reach="effective_lr_sum", share="active_fraction")(Trained)
refuse_old_names(to="gradient_at", halves="split_batch")(Lookahead)
refuse_old_names(of="function", features="needs_features")(Loss)
refuse_old_names(
    point="params",
    absorb="update",
    at="gradient_at",
    scale="lr_scale",
    personal_rate="use_personal_lr",
    sent="trains_message",
)(Train)
refuse_old_names(sent="trains_message")(Interleaved)
refuse_old_names(rate="lr", share="active_fraction")(StepInfo)
refuse_old_names(
    at="params", gradient="needs_gradient", noise="needs_noise", one_by_one="sequential"
)(SingleStep)

__all__ = [
    "APFL",
    "KGT",
    "METHODS",
    "MOON",
    "OSGP",
    "SCAFFOLD",
    "DFedAvgM",
    "DFedAvgMP",
    "DFedPGP",
    "DFedPGPSAM",
    "DFedSAM",
    "DFedSGPSM",
    "DFedSalt",
    "DePRL",
    "DisPFL",
    "Ditto",
    "FedALA",
    "FedAS",
    "FedAvg",
    "FedBABU",
    "FedBN",
    "FedDBE",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedRoD",
    "Interleaved",
    "Local",
    "Lookahead",
    "Loss",
    "Message",
    "Method",
    "PFedMe",
    "PerFedAvg",
    "Phase",
    "PushDIGing",
    "ScaffoldP",
    "SingleStep",
    "Start",
    "StepInfo",
    "Train",
    "Trained",
    "method_title",
]
