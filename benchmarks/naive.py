"""The naive loop: how published code does it. One module, loader and optimizer per client.

Frozen parts are frozen with `requires_grad`, models are exchanged as deep copies of state dicts
and averaged key by key. The CNN pools after its ReLU, as it is usually written. It has a process of
its own: what the product does to a process, such as how it treats freed memory, is not the field's.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.child import Worker, serve
from benchmarks.clock import CLOCKS, Kind
from benchmarks.works import BATCH, CLASSES, TRAINING, WORKS, Work

Weights = dict[str, Tensor]


class UsualCNN(nn.Module):
    """FedAvg's CNN layer by layer as tutorials and published code write it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(1600, 512), nn.ReLU()),
        )
        self.head = nn.Linear(512, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


USUAL = {"B": UsualCNN, "F": UsualCNN}
"""Models that are usually written otherwise than in the product."""


class Naive:
    def __init__(self, work: Work) -> None:
        data = work.data()
        self._work = work
        model = USUAL.get(work.name, work.model)
        self._models = [model() for _ in range(work.clients)]
        self._sets = [
            TensorDataset(*data.train.of_client(client)) for client in range(work.clients)
        ]
        self._mass = [1.0] * work.clients
        self._topology = work.topology()

    def round(self) -> None:
        for model, examples in zip(self._models, self._sets, strict=True):
            loader = DataLoader(examples, batch_size=BATCH, shuffle=True)
            self._train(model, loader, "head", self._work.personal_epochs)
            self._train(model, loader, "body", self._work.shared_epochs)
        self._average()

    def _train(
        self, model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], part: str, epochs: int
    ) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(part))
        criterion = nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=TRAINING.lr,
            momentum=TRAINING.momentum,
            weight_decay=TRAINING.weight_decay,
        )
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()

    def _average(self) -> None:
        """Push-sum of the bodies; over a star its weights are 1 and this is a plain average."""
        matrix = self._topology(0).weights
        sent = [copy.deepcopy(model.state_dict()) for model in self._models]
        mass = self._mass
        self._mass = [float(row @ np.asarray(mass)) for row in matrix]
        for receiver, model in enumerate(self._models):
            new = copy.deepcopy(sent[receiver])
            for name in (name for name in new if name.startswith("body")):
                new[name] = (
                    sum(
                        matrix[receiver, sender] * mass[sender] * sent[sender][name]
                        for sender in np.flatnonzero(matrix[receiver])
                    )
                    / self._mass[receiver]
                )
            model.load_state_dict(new)


def worker(work: Work, kind: Kind, threads: int) -> Worker:
    return Worker("benchmarks.naive", work.name, work.clients, kind, threads=threads)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=list(WORKS))
    parser.add_argument("clients", type=int)
    parser.add_argument("kind", choices=list(CLOCKS))
    wanted = parser.parse_args()
    serve(Naive(replace(WORKS[wanted.work], clients=wanted.clients)).round, CLOCKS[wanted.kind])


if __name__ == "__main__":
    main()
