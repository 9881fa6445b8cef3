"""Which normalisation: GroupNorm, BatchNorm that stays at a client, BatchNorm that is averaged.

    python -m benchmarks.normalisation [--rounds 20] [--seeds 3] [--out FILE]
    python -m benchmarks.normalisation --stacked

20 clients × 100 images of CIFAR-10, a network of three convolutions, under label skew (Dirichlet
0.3) and under feature shift (labels alike, and every client's own colours: gain and offset per
channel). It prints rows for the table of docs/reference/models.md, one JSON line per run.

`--stacked` asks another question: what a step of BatchNorm for several clients at once (vmap, each
client with statistics of its own) would gain, and whether a client's numbers would then still be
its own. One JSON line per model and type.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
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
    every = qv.Task(Convolutions)
    return [*found, ("FedBN", "BatchNorm, personal", every, qv.FedBN(epochs=5), star)]


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


def dense(inputs: int, width: int) -> nn.Module:
    def layer(inputs: int) -> list[nn.Module]:
        return [nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU()]

    return nn.Sequential(*layer(inputs), *layer(width), nn.Linear(width, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64, 3)),
    )


STACKED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense, 64 wide": (lambda: dense(32, 64), (32,)),
    "dense, 13 wide": (lambda: dense(9, 13), (9,)),
    "convolutions": (convolutional, (1, 8, 8)),
}


def measure_stacked(
    name: str, dtype: torch.dtype, clients: int = 25, samples: int = 20, turns: int = 40
) -> dict[str, Any]:
    """A step of clients together against each on a module of its own.

    `loop`: the largest difference from those modules. `company`: from the same computation with 20
    of the 25 clients. `times`: processor time of the loop over that of the stacked step.
    """
    make, shape = STACKED[name]
    torch.manual_seed(0)
    modules = [make().to(dtype).train() for _ in range(clients)]
    x, y = torch.randn(clients, samples, *shape, dtype=dtype), torch.randint(3, (clients, samples))
    template, loss = copy.deepcopy(modules[0]), nn.functional.cross_entropy

    def stack(chosen: slice) -> list[dict[str, Tensor]]:
        kinds: tuple[Any, ...] = (nn.Module.named_parameters, nn.Module.named_buffers)
        named = [[dict(leaves(module)) for module in modules[chosen]] for leaves in kinds]
        return [{n: torch.stack([m[n].detach() for m in some]) for n in some[0]} for some in named]

    def together(
        parameters: dict[str, Tensor], buffers: dict[str, Tensor], rows: slice
    ) -> list[Tensor]:
        leaves = {n: leaf.detach().requires_grad_() for n, leaf in parameters.items()}

        def call(own: dict[str, Tensor], statistics: dict[str, Tensor], inputs: Tensor) -> Tensor:
            outputs: Tensor = torch.func.functional_call(template, (own, statistics), (inputs,))
            return outputs

        outputs = torch.vmap(call)(leaves, buffers, x[rows])
        losses = loss(outputs.flatten(0, 1), y[rows].flatten(), reduction="none")
        total = losses.view(-1, samples).mean(dim=1).sum()
        return [
            *torch.autograd.grad(total, [*leaves.values()]),
            *map(torch.clone, buffers.values()),
        ]

    def loop() -> list[Tensor]:
        found = []
        for module, inputs, labels in zip(modules, x, y, strict=True):
            own = torch.autograd.grad(loss(module(inputs), labels), [*module.parameters()])
            found.append([*own, *(buffer.clone() for buffer in module.buffers())])
        return [torch.stack(leaves) for leaves in zip(*found, strict=True)]

    def apart(some: list[Tensor], others: list[Tensor]) -> float:
        pairs = zip(some, others, strict=True)
        return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)

    every, few = slice(0, clients), slice(5, clients)
    whole, part = stack(every), stack(few)
    stacked, fewer, alone = together(*whole, every), together(*part, few), loop()
    seconds = [0.0, 0.0]
    for _ in range(turns):
        for place, work in enumerate((loop, lambda: together(*whole, every))):
            begin = time.process_time()
            work()
            seconds[place] += time.process_time() - begin
    return {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "loop": apart(stacked, alone),
        "company": apart([leaf[few] for leaf in stacked], fewer),
        "times": round(seconds[0] / seconds[1], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="benchmarks.normalisation")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--stacked", action="store_true")
    given = parser.parse_args()
    if given.stacked:
        torch.set_num_threads(1)
        for name in STACKED:
            for dtype in (torch.float64, torch.float32):
                sys.stdout.write(json.dumps(measure_stacked(name, dtype)) + "\n")
        return
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
