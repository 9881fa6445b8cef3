"""The reference work: models, clients, samples and epochs, on made-up data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import nn

from quiverfl import DFedPGP, FederatedData, FedRep, Method, Task, Topology, Training
from quiverfl.data.examples import ClientExamples
from quiverfl.engine.settings import Precision
from quiverfl.models import make_model
from quiverfl.topologies import random_push, star

CLASSES = 10
BATCH = 128
TRAINING = Training(lr=0.01, momentum=0.9, weight_decay=5e-4, batch_size=BATCH)


@dataclass(frozen=True)
class Work:
    """One model trained by some clients: first the head on a frozen body, then the body."""

    name: str
    title: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    clients: int
    samples: int
    test: int
    personal_epochs: int
    shared_epochs: int
    neighbors: int = 10
    server: bool = False
    compiled: bool = False
    precision: Precision = "float32"

    @property
    def visits(self) -> int:
        """Samples that pass through the model in a round, all clients and epochs together."""
        return self.clients * self.samples * (self.personal_epochs + self.shared_epochs)

    def task(self) -> Task:
        return Task(self.model)

    def method(self) -> Method:
        kind = FedRep if self.server else DFedPGP
        return kind(self.personal_epochs, self.shared_epochs)

    def topology(self) -> Topology:
        if self.server:
            return star(self.clients, sampled=self.clients)
        return random_push(self.clients, min(self.neighbors, self.clients - 1))

    def data(self) -> FederatedData:
        generator = torch.Generator().manual_seed(0)

        def split(samples: int) -> ClientExamples:
            count = self.clients * samples
            x = torch.randn(count, *self.shape, generator=generator)
            y = torch.randint(CLASSES, (count,), generator=generator)
            return ClientExamples(x, y, np.arange(self.clients + 1) * samples)

        return FederatedData(split(self.samples), split(self.test), CLASSES)


DENSE, IMAGE = (64,), (3, 32, 32)

A = Work(
    "A",
    "MLP 64-128-64-10, 100 clients × 500 samples, DFedPGP 1 + 5 epochs, 10 neighbours",
    partial(make_model, "mlp", DENSE, CLASSES, hidden=(128, 64)),
    DENSE,
    clients=100,
    samples=500,
    test=100,
    personal_epochs=1,
    shared_epochs=5,
)
B = Work(
    "B",
    "FedAvg's CNN (879k parameters), 20 clients × 500 samples of 3×32×32, DFedPGP 1 + 1 epochs",
    partial(make_model, "fedavg_cnn", IMAGE, CLASSES),
    IMAGE,
    clients=20,
    samples=500,
    test=100,
    personal_epochs=1,
    shared_epochs=1,
)
C = Work(
    "C",
    "ResNet-8-GN, 8 clients × 250 samples of 3×32×32, DFedPGP 1 + 1 epochs",
    partial(make_model, "resnet8_gn", IMAGE, CLASSES),
    IMAGE,
    clients=8,
    samples=250,
    test=50,
    personal_epochs=1,
    shared_epochs=1,
)
F = replace(
    B,
    name="F",
    title="FedRep's 10 + 5 epochs on the CNN of B, 4 clients × 500 samples over a star",
    # A convolutional round takes as long as it has clients; four say the same as twenty.
    clients=4,
    personal_epochs=10,
    shared_epochs=5,
    server=True,
)
WORKS = {work.name: work for work in (A, B, C, F)}

COMPILED = replace(
    C,
    model=partial(make_model, "resnet8_gn", IMAGE, CLASSES, kernels="compiled"),
    compiled=True,
)
VARIANTS = {"C": {", compiled": COMPILED, ", compiled, bf16": replace(COMPILED, precision="bf16")}}
"""The same work by other settings of the product, under what is added to a figure's name."""


def smaller(work: Work) -> Work:
    """A quarter of the clients, for a quick look: ratios hardly depend on their number."""
    return replace(work, clients=max(2, work.clients // 4))
