"""The work of every framework that uses torch: FedAvg of A and B, all clients in every round.

A framework's own environment has neither Quiver nor its dependencies. So the models stand here once
more, layer by layer those of `quiverfl.models`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from contest import BATCH, CLASSES, OPTIMIZER, SIZES, Size
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, CLASSES)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, CLASSES)),
    )


@dataclass(frozen=True)
class Work:
    model: Callable[[], nn.Module]
    size: Size

    def data(self, client: int) -> tuple[Tensor, Tensor]:
        generator, samples = torch.Generator().manual_seed(client), self.size.samples
        x = torch.randn(samples, *self.size.shape, generator=generator)
        return x, torch.randint(CLASSES, (samples,), generator=generator)


WORKS = {"A": Work(mlp, SIZES["A"]), "B": Work(cnn, SIZES["B"])}


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    """A client's round as the frameworks' own examples write it: loader, optimizer, loop."""
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=BATCH, shuffle=True
    )
    optimizer = torch.optim.SGD(model.parameters(), **OPTIMIZER)
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
