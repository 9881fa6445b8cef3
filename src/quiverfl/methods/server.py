"""What the server methods share: sample-weighted averaging as (n · m, n), divided at the merge."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quiverfl.methods.contract import Message, Start
from quiverfl.methods.state import Personal, Scalar, Shared

Weighting = Literal["samples", "uniform"]


class ServerState(NamedTuple):
    u: Shared  # shared parameters
    v: Personal  # personal parameters (whole-model methods send them too)
    samples: Scalar  # n, the weight of this client in the average, in float64


def sample_weight(start: Start, weighting: Weighting) -> Tensor:
    weight = float(start.samples) if weighting == "samples" else 1.0
    return torch.tensor(weight, dtype=torch.float64, device=start.point.shared.device)


def weighted(samples: Tensor, **leaves: Tensor) -> Message:
    """Numerators n · m and the denominator n."""
    scaled = {name: leaf * samples.to(leaf.dtype) for name, leaf in leaves.items()}
    return {**scaled, "samples": samples.clone()}


def averaged(mixed: Message, name: str) -> Tensor:
    return mixed[name] / mixed["samples"].to(mixed[name].dtype)
