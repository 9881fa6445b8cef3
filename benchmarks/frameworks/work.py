"""The work every framework does, with torch alone: FedAvg of A and B, all clients in every round.

Run inside a framework's own environment, where neither Quiver nor its dependencies are installed;
so the models stand here once more, layer by layer those of `quiverfl.models`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

CLASSES, BATCH = 10, 128
OPTIMIZER = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}


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
    shape: tuple[int, ...]
    clients: int
    samples: int
    epochs: int

    def data(self, client: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(client)
        x = torch.randn(self.samples, *self.shape, generator=generator)
        return x, torch.randint(CLASSES, (self.samples,), generator=generator)


WORKS = {
    "A": Work(mlp, (64,), clients=100, samples=500, epochs=6),
    "B": Work(cnn, (3, 32, 32), clients=20, samples=500, epochs=2),
}


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


def arguments() -> argparse.Namespace:
    """What every framework's script is told: the work, the rounds to time, the threads to use."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=list(WORKS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--clients", type=int, default=None)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def report(version: str, seconds: list[float]) -> None:
    """The last line of a script's output. The first round, which loads and warms, is left out."""
    print(json.dumps({"version": version, "seconds": seconds[1:]}), flush=True)
