"""What is done to messages between `message` and the exchange, by section and name."""

from collections.abc import Callable, Mapping
from typing import Any

from quiverfl.errors import QuiverError, nearest
from quiverfl.transforms.adversary import (
    Adaptive,
    AddNoise,
    ForgedMass,
    LabelFlip,
    ScaledUpdate,
    SignFlip,
)
from quiverfl.transforms.chosen import Transforms
from quiverfl.transforms.compression import Quantize, RandomK, TopK
from quiverfl.transforms.privacy import DPSGD, UpdatePrivacy
from quiverfl.transforms.robustness import Balance, NormBound, SelfCenteredClip

TRANSFORMS: dict[str, dict[str, Callable[..., Any]]] = {
    "compression": {"quantize": Quantize, "top_k": TopK, "random_k": RandomK},
    "privacy": {"update": UpdatePrivacy, "dp_sgd": DPSGD},
    "robustness": {"clip": SelfCenteredClip, "balance": Balance, "norm": NormBound},
    "adversary": {
        "sign_flip": SignFlip,
        "noise": AddNoise,
        "scaled_update": ScaledUpdate,
        "label_flip": LabelFlip,
        "forged_mass": ForgedMass,
        "adaptive": Adaptive,
    },
}


def find_transform(section: str, name: str) -> Callable[..., Any]:
    """A transform by its section and name."""
    known = TRANSFORMS[section]
    if name not in known:
        raise QuiverError(f"{section}.name = {name!r}: unknown; {nearest(name, known)}")
    return known[name]


def make_transforms(sections: Mapping[str, Mapping[str, Any]]) -> Transforms:
    """From the sections of a configuration; one without a name asks for nothing."""
    made = {
        section: find_transform(section, options["name"])(
            **{key: value for key, value in options.items() if key != "name"}
        )
        for section, options in sections.items()
        if options.get("name") is not None
    }
    return Transforms(**made)
