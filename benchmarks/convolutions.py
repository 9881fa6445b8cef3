"""The compiled convolutions against PyTorch's: `python -m benchmarks.convolutions`.

Forward, loss and backward of one model on one batch, one thread, in processor time and in turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn
from torch.nn import functional

from benchmarks.clock import interleaved
from benchmarks.figures import ratio
from quiverfl import keep_freed_memory
from quiverfl.models.networks import Kernels, cnn_small, fedavg_cnn, lenet5

CLASSES, GRADIENTS = 10, 8


@dataclass(frozen=True)
class Work:
    title: str
    model: Callable[..., nn.Module]
    image: tuple[int, int, int]
    batch: int


WORKS = (
    Work("LeNet-5", lenet5, (3, 32, 32), 128),
    Work("LeNet-5, the last batch of 500 images", lenet5, (3, 32, 32), 116),
    Work("cnn_small", cnn_small, (3, 32, 32), 128),
    Work("cnn_small", cnn_small, (3, 32, 32), 16),
    Work("FedAvg's CNN", fedavg_cnn, (3, 32, 32), 128),
)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.convolutions", description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    keep_freed_memory()
    print("| | batch | PyTorch, samples/s | compiled, samples/s | times as fast |")
    print("|---|---:|---:|---:|---:|")
    for work in WORKS:
        theirs, ours = gradients(work, "torch"), gradients(work, "compiled")
        seconds = interleaved({"torch": theirs, "compiled": ours}, repeats, "cpu")
        rates = [
            f"{work.batch * GRADIENTS / median(times):,.0f}"
            for times in (seconds["torch"], seconds["compiled"])
        ]
        times = ratio(seconds["torch"], seconds["compiled"])
        print(f"| {work.title} | {work.batch} | {rates[0]} | {rates[1]} | {times:.2f} |")


def gradients(work: Work, kernels: Kernels) -> Callable[[], None]:
    """So many gradients, as the engine has them computed: channels last."""
    model = work.model(work.image, CLASSES, kernels=kernels)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(work.batch, *work.image, generator=draws)
    x = x.contiguous(memory_format=torch.channels_last)
    y, leaves = torch.arange(work.batch) % CLASSES, list(model.parameters())

    def several() -> None:
        for _ in range(GRADIENTS):
            torch.autograd.grad(functional.cross_entropy(model(x), y), leaves)

    return several


if __name__ == "__main__":
    main()
