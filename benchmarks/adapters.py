"""Work H: adapters on one frozen body; the memory of 1,000 and 10,000 clients.

What must be there is one body, and every client's adapters, head and examples. Fine-tuning the
whole model would keep a body per client.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.child import ChildFailed, measure, peak
from benchmarks.figures import Figure
from quiverfl import (
    DFedPGP,
    FederatedData,
    Task,
    Training,
    keep_freed_memory,
    lora,
    random_push,
    simulate,
)
from quiverfl.trees import tree_leaves

CLIENTS = (1_000, 10_000)
WIDTH, LAYERS, WORDS, PLACES, CLASSES, RANK = 128, 2, 1_000, 16, 4, 2
SAMPLES = 2
MEMORY_TARGET = 1.3


class Classifier(nn.Module):
    """A small transformer that says which class a sentence is of."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.words(ids)).mean(dim=1))
        return logits


def figures(threads: int, quick: bool) -> list[Figure]:
    found = []
    for clients in CLIENTS[:1] if quick else CLIENTS:
        name = f"peak memory / (body + adapters + data), {clients:,} clients"
        try:
            child = measure("benchmarks.adapters", clients, threads=threads)
        except ChildFailed as error:
            found.append(Figure("H", name, None, note=str(error)))
            continue
        held = clients == CLIENTS[-1]
        value, target = child["grown"] / child["needed"], MEMORY_TARGET if held else None
        found.append(Figure("H", name, value, "≤" if held else None, target, details=child))
        if held:
            whole = child["whole"] / child["needed"]
            found.append(Figure("H", f"a body per client / needed, {clients:,} clients", whole))
    return found


def main() -> None:
    """The measuring process: what the peak grows by while a federation is made and trained."""
    parser = argparse.ArgumentParser()
    parser.add_argument("clients", type=int)
    clients = parser.parse_args().clients
    keep_freed_memory()
    _play(150)  # what is loaded and computed at once, whatever the number of clients
    before = peak()
    needed = _play(clients)
    print(json.dumps({"grown": peak() - before, **needed}))


def _play(clients: int) -> dict[str, int]:
    """One round with evaluation; the bytes that cannot be done without, and those of bodies."""
    random = np.random.default_rng(0)

    def some() -> tuple[np.ndarray, np.ndarray]:
        ids = random.integers(0, WORDS, (SAMPLES, PLACES), dtype=np.int32)
        return ids, random.integers(0, CLASSES, SAMPLES)

    data = FederatedData.from_arrays(*([some() for _ in range(clients)] for _ in range(2)))
    task = Task(lambda: lora(Classifier(), rank=RANK, targets=("attention",)))
    simulate(
        task,
        data,
        method=DFedPGP(personal_epochs=1, shared_epochs=1),
        topology=random_push(clients, min(10, clients - 1)),
        training=Training(lr=0.01, batch_size=SAMPLES),
        rounds=1,
        keep_local=False,
    )
    adapters = task.shared_layout.size + task.personal_layout.size
    body = sum(p.numel() for p in task.skeleton.parameters() if not p.requires_grad)
    examples = sum(
        _bytes(leaf) for s in (data.train, data.test) for _, leaf in tree_leaves((s.x, s.y))
    )
    return {
        "needed": 4 * body + clients * (4 * adapters + 8) + examples,
        "whole": clients * 4 * (body + adapters) + examples,
        "adapters": adapters,
        "body": body,
    }


def _bytes(leaf: torch.Tensor) -> int:
    return leaf.numel() * leaf.element_size()


if __name__ == "__main__":
    main()
