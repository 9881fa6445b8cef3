"""Which normalisation: GroupNorm, BatchNorm that stays at a client, BatchNorm that is averaged.

    python -m benchmarks.normalisation [--rounds 20] [--seeds 3] [--out FILE]

20 clients × 100 images of CIFAR-10, a network of three convolutions, under label skew (Dirichlet
0.3) and under feature shift (labels alike, and every client's own colours: gain and offset per
channel). It prints rows for the table of docs/reference/models.md, one JSON line per run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import quiverfl as qv

CLIENTS, TRAIN, TEST = 20, 100, 50


class Convolutions(nn.Module):
    """Three strided convolutions with BatchNorm, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 16), (16, 32), (32, 32)):
            convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def grouped() -> nn.Module:
    return qv.group_norm(Convolutions(), groups=8)


NORMS: dict[str, dict[str, Any]] = {
    "GroupNorm": {"model": grouped},
    "BatchNorm, personal": {"model": Convolutions},
    "BatchNorm, mixed": {"model": Convolutions, "buffers": "mixed"},
}


def works(seed: int) -> list[tuple[str, str, qv.Task, Any, Any]]:
    """Method, normalisation, task, method object and topology of every run."""
    push = qv.random_push(clients=CLIENTS, neighbors=4, seed=seed)
    star = qv.star(clients=CLIENTS, sampled=10, seed=seed)
    found: list[tuple[str, str, qv.Task, Any, Any]] = []
    for name, options in NORMS.items():
        personal = qv.Task(**options, personal=("head",))
        whole = qv.Task(**options, personal=())
        found.append(("DFedPGP", name, personal, qv.DFedPGP(shared_epochs=5), push))
        found.append(("FedAvg", name, whole, qv.FedAvg(epochs=5), star))
    layers = qv.Task(Convolutions, personal="batch_norm")
    kept = qv.FedPer(epochs=5, weighting="uniform")
    return [*found, ("FedBN", "BatchNorm, personal", layers, kept, star)]


def federation(shift: str, seed: int) -> qv.FederatedData:
    options = {"samples_per_client": TRAIN, "test_per_client": TEST}
    if shift == "labels":
        return qv.partition("cifar10", "dirichlet", CLIENTS, seed, alpha=0.3, **options)
    data = qv.partition("cifar10", "iid", CLIENTS, seed, **options)
    random = np.random.default_rng(seed)
    gains, offsets = random.uniform(0.3, 1.7, (CLIENTS, 3)), random.normal(0, 1, (CLIENTS, 3))
    parts = []
    for split in (data.train, data.test):
        own = []
        for client in range(CLIENTS):
            x, y = split.of_client(client)
            x = data.prepare(x) if data.prepare is not None else x
            gain, offset = (
                torch.from_numpy(value[client]).float().view(3, 1, 1) for value in (gains, offsets)
            )
            own.append(((x.float() * gain + offset).numpy(), y.numpy()))
        parts.append(own)
    return qv.FederatedData.from_arrays(*parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="benchmarks.normalisation")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    for seed in range(given.seeds):
        for shift in ("labels", "features"):
            data = federation(shift, seed)
            for method, norm, task, made, topology in works(seed):
                begin = time.perf_counter()
                run = qv.simulate(
                    task,
                    data,
                    method=made,
                    topology=topology,
                    training=qv.Training(lr=0.05, momentum=0.9, weight_decay=5e-4, batch_size=20),
                    rounds=given.rounds,
                    seed=seed,
                    evaluate_every=given.rounds,
                    threads=1,
                )
                means = run.history.groupby("stage")["accuracy"].mean()
                row = {
                    "shift": shift,
                    "method": method,
                    "norm": norm,
                    "seed": seed,
                    **{stage: round(float(means[stage]), 4) for stage in ("local", "mixed")},
                    "seconds": round(time.perf_counter() - begin, 1),
                }
                line = json.dumps(row)
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
                if given.out is not None:
                    with given.out.open("a") as file:
                        file.write(line + "\n")


if __name__ == "__main__":
    main()
