"""Parts that several methods share: training phases, a server's weighted average, SAM's ascent.

model_params, train_*              for states whose model is (u, v)
ServerState, weight_message, …     an average weighted by sample counts is sent as (n · m, n)
                                   and divided at the merge
sam_lookahead                      sharpness-aware minimisation (Foret et al., "Sharpness-Aware
                                   Minimization for Efficiently Improving Generalization",
                                   ICLR 2021), equation 2: ε = ρ ∇L(w) / ‖∇L(w)‖
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Lookahead, Message, Start, Train
from quiverfl.methods.state import Personal, Scalar, Shared
from quiverfl.task import Params
from quiverfl.training import Training


def model_params(state: Any) -> Params:
    """(u, v) as they stand in the state."""
    return Params(state.u, state.v)


def train_whole(epochs: int, **more: Any) -> Train:
    """u and v together."""
    return Train(
        part="whole",
        epochs=epochs,
        params=model_params,
        update=lambda state, trained: state._replace(u=trained.shared, v=trained.personal),
        **more,
    )


def train_personal(
    epochs: int | None, point: Callable[[Any], Params] = model_params, steps: int | None = None
) -> Train:
    """v with its own rate; the rest of the point stands still."""
    return Train(
        part="personal",
        epochs=epochs,
        steps=steps,
        params=point,
        update=lambda state, trained: state._replace(v=trained.personal),
        use_personal_lr=True,
        trains_message=False,
    )


def train_shared(epochs: int | None, **more: Any) -> Train:
    """u; v stands still."""
    return Train(
        part="shared",
        epochs=epochs,
        params=model_params,
        update=lambda state, trained: state._replace(u=trained.shared),
        **more,
    )


Weighting = Literal["samples", "uniform"]


class ServerState(NamedTuple):
    u: Shared  # shared parameters
    v: Personal  # personal parameters (whole-model methods send them too)
    samples: Scalar  # n, the weight of this client in the average, in float64


def sample_weight(start: Start, weighting: Weighting) -> Tensor:
    weight = float(start.samples) if weighting == "samples" else 1.0
    return torch.tensor(weight, dtype=torch.float64, device=start.params.shared.device)


def weight_message(samples: Tensor, **leaves: Tensor) -> Message:
    """Numerators n · m and the denominator n."""
    scaled = {name: leaf * samples.to(leaf.dtype) for name, leaf in leaves.items()}
    return {**scaled, "samples": samples.clone()}


def average_leaf(mixed: Message, name: str) -> Tensor:
    return mixed[name] / mixed["samples"].to(mixed[name].dtype)


def plain_steps(training: Training, lr: float) -> Training:
    """Plain SGD with its own constant rate."""
    return replace(
        training,
        lr=lr,
        lr_decay=1.0,
        momentum=0.0,
        weight_decay=0.0,
        clip_norm=None,
        optimizer="sgd",
        nesterov=False,
    )


def check_class_labels(method: str, targets: Any) -> None:
    """Refuse targets that are not one class per sample."""
    one = isinstance(targets, Tensor) and targets.ndim == 1
    if not one or targets.is_floating_point():
        raise QuiverError(f"{method} needs one class label per sample as its target.")


def sam_lookahead(rho: float) -> Lookahead:
    """To p + ρ g/‖g‖, the norm over what is trained; p where g is 0."""

    def to(gradient: Params, point: Params, state: object) -> Params:
        norm = torch.linalg.vector_norm(torch.cat(gradient))
        factor = torch.where(norm > 0, rho / norm, 0.0)
        return Params(
            _move(point.shared, gradient.shared, factor),
            _move(point.personal, gradient.personal, factor),
        )

    return Lookahead(to)


def _move(values: Tensor, gradient: Tensor, factor: Tensor) -> Tensor:
    """A part that is not trained has an empty gradient and stays."""
    return values + factor * gradient if len(gradient) else values
