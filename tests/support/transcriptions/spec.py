"""What is said once for every method: the model, the batches, the loss, the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quiverfl.data.batches import batch_order
from quiverfl.training import Training

Weights = dict[str, Tensor]
State = dict[str, Any]
"""The name of a part (u, v, theta_u, mask_u, …) → its named tensors, or a number."""

Names = tuple[str, ...]
BODY: Names = ("body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias")
HEAD: Names = ("head.weight", "head.bias")


@dataclass(frozen=True)
class Setting:
    """Everything a run is given."""

    train: Sequence[tuple[Tensor, Tensor]]
    weights: Callable[[int], np.ndarray]  # round → P[receiver, sender]
    active: Callable[[int], np.ndarray]  # round → who trains
    training: Training
    rounds: int
    seed: int
    epochs_per_client: Sequence[int] | None = None
    shared: Names = BODY
    personal: Names = HEAD
    clipped: list[bool] = field(default_factory=list)  # for every step: did the bound bite?

    @property
    def parts(self) -> tuple[Names, Names, Names]:
        """Names in u, in v, and in the whole model w."""
        return self.shared, self.personal, self.shared + self.personal

    @property
    def clients(self) -> range:
        return range(len(self.train))

    def samples(self, client: int) -> int:
        return len(self.train[client][1])

    def epochs(self, client: int, epochs: int) -> int:
        """Epochs of the phase that trains what is sent."""
        return epochs if self.epochs_per_client is None else self.epochs_per_client[client]

    def rate(self, t: int) -> float:
        return self.training.lr * self.training.lr_decay**t

    def personal_rate(self, t: int) -> float:
        given = self.training.personal_lr
        return (self.training.lr if given is None else given) * self.training.lr_decay**t


@dataclass
class Outcome:
    """What a transcription ends with, and the models it would evaluate on the way."""

    state: list[State] = field(default_factory=list)
    push_sum: bool = False  # whether the mass μ is part of the method, or just 1
    local: list[list[Weights]] = field(default_factory=list)  # [round][client]
    mixed: list[list[Weights]] = field(default_factory=list)


def copied(weights: Weights) -> Weights:
    return {name: tensor.clone() for name, tensor in weights.items()}


def forward(weights: Weights, x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ weights["body.0.weight"].T + weights["body.0.bias"])
    hidden = torch.tanh(hidden @ weights["body.2.weight"].T + weights["body.2.bias"])
    return hidden @ weights["head.weight"].T + weights["head.bias"]


def features(weights: Weights, x: Tensor) -> Tensor:
    """What the head is given."""
    hidden = torch.tanh(x @ weights["body.0.weight"].T + weights["body.0.bias"])
    return torch.tanh(hidden @ weights["body.2.weight"].T + weights["body.2.bias"])


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """The mean over the samples that are there."""
    return nn.functional.cross_entropy(outputs, y)


def batches(
    setting: Setting, client: int, t: int, phase: int, epoch: int, mutant: str | None = None
) -> Iterator[np.ndarray]:
    """The batches of one epoch; the last one may be smaller."""
    size = setting.samples(client)
    batch = setting.training.batch_size
    if batch is None:
        yield np.arange(size)
        return
    visited = 0 if mutant == "every epoch in the same order" else epoch
    order = batch_order(setting.seed, client, t, phase, visited, size)
    for first in range(0, size, batch):
        rows = order[first : first + batch]
        if mutant == "partial batch dropped" and len(rows) < batch:
            continue
        yield rows


def gradient(
    setting: Setting,
    client: int,
    rows: np.ndarray,
    weights: Weights,
    names: Sequence[str],
    mutant: str | None = None,
) -> Weights:
    """Of the mean cross-entropy over the batch, with respect to the named tensors."""
    x, y = setting.train[client][0][rows], setting.train[client][1][rows]
    trained = {name: weights[name].detach().requires_grad_(True) for name in names}
    loss = cross_entropy(forward({**weights, **trained}, x), y)
    if mutant == "mean over the padded batch":
        loss = loss * len(y) / (setting.training.batch_size or len(y))
    found = torch.autograd.grad(loss, [trained[name] for name in names])
    return dict(zip(names, found, strict=True))


def gradient_of(
    objective: Callable[[Weights], Tensor], weights: Weights, names: Sequence[str]
) -> Weights:
    """Of a loss that a method has of its own, with respect to the named tensors."""
    trained = {name: weights[name].detach().requires_grad_(True) for name in names}
    loss = objective({**weights, **trained})
    found = torch.autograd.grad(loss, [trained[name] for name in names])
    return dict(zip(names, found, strict=True))


def norm(tensors: Weights) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors.values()]).norm())


def clip(setting: Setting, g: Weights, mutant: str | None = None) -> Weights:
    """g · min(1, bound/‖g‖)."""
    bound = setting.training.clip_norm
    if bound is None or mutant == "no clipping":
        return g
    if mutant == "clipped tensor by tensor":
        return {n: g[n] * min(1.0, bound / max(norm({n: g[n]}), 1e-300)) for n in g}
    length = norm(g)
    setting.clipped.append(length > bound)
    if mutant == "an epsilon in the clipping":
        length = length + 1e-6
    return {name: g[name] * min(1.0, bound / length) for name in g} if length > 0 else g


def step(
    setting: Setting,
    moved: Weights,
    at: Weights,
    g: Weights,
    buffer: Weights,
    rate: dict[str, float],
    mutant: str | None = None,
) -> None:
    """One step of SGD, in place: `moved` moves, decay acts `at`; they differ in push-sum only.

    `buffer` is empty at the start of a phase, which means zero.
    """
    momentum, decay = setting.training.momentum, setting.training.weight_decay
    if mutant == "decay before clipping":
        g = clip(setting, {name: g[name] + decay * at[name] for name in g})
        decay = 0.0
    else:
        g = clip(setting, g, mutant)
    for name in g:
        spared = mutant == "no decay on biases" and name.endswith("bias")
        decayed = g[name] if spared else g[name] + decay * at[name]
        if mutant == "dampening":
            decayed = (1 - momentum) * decayed
        buffer[name] = momentum * buffer.get(name, torch.zeros_like(decayed)) + decayed
        direction = decayed + momentum * buffer[name] if mutant == "nesterov" else buffer[name]
        moved[name] = moved[name] - rate[name] * direction


def same_rate(names: Sequence[str], rate: float) -> dict[str, float]:
    return dict.fromkeys(names, rate)


def mixed(p: np.ndarray, messages: Sequence[Weights]) -> list[Weights]:
    """Σ_j P[i, j] · message_j for every receiver i."""
    sums: list[Weights] = []
    for i in range(len(messages)):
        total = {name: torch.zeros_like(tensor) for name, tensor in messages[i].items()}
        for j in range(len(messages)):
            for name in total:
                total[name] = total[name] + float(p[i, j]) * messages[j][name]
        sums.append(total)
    return sums


def averaged(p: np.ndarray, messages: Sequence[Weights], counts: Sequence[float]) -> list[Weights]:
    """Σ_j P[i, j] n_j m_j / Σ_j P[i, j] n_j; who hears of nobody keeps its own."""
    means: list[Weights] = []
    for i in range(len(messages)):
        total = sum(float(p[i, j]) * counts[j] for j in range(len(messages)))
        if total == 0.0:
            means.append(copied(messages[i]))
            continue
        mean = {name: torch.zeros_like(tensor) for name, tensor in messages[i].items()}
        for j in range(len(messages)):
            for name in mean:
                mean[name] = mean[name] + float(p[i, j]) * counts[j] * messages[j][name]
        means.append({name: mean[name] / total for name in mean})
    return means


def sample_counts(setting: Setting, weighting: str = "samples") -> list[float]:
    """What a mean is weighted by."""
    if weighting == "uniform":
        return [1.0 for _ in setting.clients]
    return [float(setting.samples(j)) for j in setting.clients]
