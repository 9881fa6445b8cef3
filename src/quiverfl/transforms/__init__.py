"""Changes that a run makes to messages before the exchange, by section and name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from quiverfl.errors import QuiverError
from quiverfl.options import read_options
from quiverfl.support.references import Registry
from quiverfl.transforms.attacks import (
    Adaptive,
    AddNoise,
    Adversary,
    ForgedMass,
    LabelFlip,
    ScaledUpdate,
    SignFlip,
)
from quiverfl.transforms.compression import Compression, Quantize, RandomK, TopK
from quiverfl.transforms.privacy import DPSGD, UpdatePrivacy
from quiverfl.transforms.robustness import Balance, NormBound, Robustness, SelfCenteredClip

_KINDS: dict[str, tuple[type, str]] = {
    "compression": (Compression, "qv.Quantize(bits=8)"),
    "privacy": (UpdatePrivacy, "qv.UpdatePrivacy()"),
    "robustness": (Robustness, "qv.Balance()"),
    "adversary": (Adversary, "qv.SignFlip()"),
}
"""The type that an object of each section has the functions of, and an example."""


@dataclass(frozen=True)
class Transforms:
    """The transforms of a run; None for those that it does not use."""

    compression: Compression | None = None
    privacy: UpdatePrivacy | DPSGD | None = None
    robustness: Robustness | None = None
    adversary: Adversary | None = None

    def __post_init__(self) -> None:
        for section, (kind, example) in _KINDS.items():
            given = getattr(self, section)
            if given is None or (isinstance(given, DPSGD) and section == "privacy"):
                continue
            names = {name for name in (*kind.__annotations__, *dir(kind)) if name[0] != "_"}
            if isinstance(given, type) or not all(hasattr(given, name) for name in names):
                what = repr(given) if isinstance(given, type | str) else f"a {type(given).__name__}"
                raise QuiverError(f"{section} is {what}: give an object, such as {example}.")

    @property
    def copies(self) -> int:
        """Copies of every message in memory beside the one that is mixed, at most."""
        compressed = 0 if self.compression is None else 2  # what receivers decode, and its replica
        rewritten = isinstance(self.privacy, UpdatePrivacy) or self.adversary is not None
        return compressed + (2 if rewritten else 0)  # the last message, and the noise

    def record(self) -> dict[str, dict[str, Any]]:
        """The name and options of each transform, by section."""
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            section: {"name": transform.name, **read_options(transform)}
            for section, transform in chosen.items()
            if transform is not None
        }


PLAIN = Transforms()
"""Messages are sent as they are."""


_TRANSFORMS: dict[str, dict[str, Callable[..., Any]]] = {
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
TRANSFORMS = {
    section: Registry(section, transforms, key=f"{section}.name")
    for section, transforms in _TRANSFORMS.items()
}


def make_transforms(sections: Mapping[str, Mapping[str, Any]]) -> Transforms:
    """The transforms that the sections of a configuration name."""
    transforms = {
        section: TRANSFORMS[section].find(options["name"])(
            **{key: value for key, value in options.items() if key != "name"}
        )
        for section, options in sections.items()
        if options.get("name") is not None
    }
    return Transforms(**transforms)
