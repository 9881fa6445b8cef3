"""What a run does to messages on their way."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from quiverfl.methods.options import options_of
from quiverfl.transforms.adversary import Adversary
from quiverfl.transforms.compression import Compression
from quiverfl.transforms.privacy import DPSGD, UpdatePrivacy
from quiverfl.transforms.robustness import Robustness


@dataclass(frozen=True)
class Transforms:
    """None for what is left as it is."""

    compression: Compression | None = None
    privacy: UpdatePrivacy | DPSGD | None = None
    robustness: Robustness | None = None
    adversary: Adversary | None = None

    @property
    def copies(self) -> int:
        """Of every client's message that are in memory beside the one that is mixed, at most."""
        coded = 0 if self.compression is None else 2  # what is known of it, and its replica
        altered = isinstance(self.privacy, UpdatePrivacy) or self.adversary is not None
        return coded + (2 if altered else 0)  # what it was before, and the blur

    def record(self) -> dict[str, dict[str, Any]]:
        """By section, the name and options of each that is there."""
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            section: {"name": found.name, **options_of(found)}
            for section, found in chosen.items()
            if found is not None
        }


PLAIN = Transforms()
"""Messages as they are."""
