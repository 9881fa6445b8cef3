"""What every FedRep run is given: made-up images like CIFAR-10's, a network of two parts, numbers.

Each client has images of two of ten classes: a template and noise. A head of its own is what tells
its two apart; the body is everybody's.
"""

from __future__ import annotations

import os

import torch
from contest import peak_megabytes, processor_seconds, report
from torch import Tensor, nn

CLIENTS, TRAIN, TEST, CLASSES, ROUNDS = 10, 500, 100, 10, 3
HEAD_EPOCHS, BODY_EPOCHS, BATCH = 1, 1, 128
SGD = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}

Split = tuple[Tensor, Tensor]


class Network(nn.Module):
    """FedAvg's CNN; the head is the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 32, 5), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(1600, 512), nn.ReLU()),
        )
        self.head = nn.Linear(512, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def make_clients() -> list[tuple[Split, Split]]:
    """Training and test examples of every client."""
    templates = torch.randn(CLASSES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found = []
    for client in range(CLIENTS):
        draws = torch.Generator().manual_seed(1 + client)
        y = (client + 3 * torch.randint(2, (TRAIN + TEST,), generator=draws)) % CLASSES
        x = torch.randn(TRAIN + TEST, 3, 32, 32, generator=draws) + templates[y]
        found.append(((x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:])))
    return found


def finish(version: str, accuracy: float) -> None:
    report(
        version,
        accuracy=accuracy,
        seconds=processor_seconds(),
        megabytes=peak_megabytes(),
    )


torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
torch.manual_seed(0)
