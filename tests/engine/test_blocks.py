"""Chunks of like clients are computed as one where models are tiny, and no bit changes by it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import quiverfl as qv
from quiverfl.data.examples import ClientExamples
from quiverfl.engine.collective import LINE, cut_groups
from quiverfl.engine.memory import Blocks
from quiverfl.models import make_model

CLIENTS, INPUTS, CLASSES = 215, 13, 3
TRAINING = qv.Training(lr=0.1, momentum=0.9, weight_decay=1e-3, batch_size=4)


def _split(sizes: np.ndarray, seed: int) -> ClientExamples:
    generator = torch.Generator().manual_seed(seed)
    count = int(sizes.sum())
    x = torch.randn(count, INPUTS, generator=generator)
    y = torch.randint(CLASSES, (count,), generator=generator)
    return ClientExamples(x, y, np.concatenate([[0], np.cumsum(sizes)]))


def _data(ragged: bool) -> qv.FederatedData:
    sizes = np.full(CLIENTS, 7)
    if ragged:
        sizes[::9] = 5
    return qv.FederatedData(_split(sizes, 0), _split(np.full(CLIENTS, 3), 1), CLASSES)


def _run(method: qv.Method, training: qv.Training = TRAINING, **options: object) -> qv.Run:
    task = options.pop("task", None) or qv.Task(
        partial(make_model, "mlp", (INPUTS,), CLASSES, hidden=(5,))
    )
    topology = options.pop("topology", None) or qv.random_push(CLIENTS, 2)
    data = _data(bool(options.pop("ragged", False)))
    return qv.simulate(
        task, data, method=method, topology=topology, training=training, rounds=2, **options
    )


@pytest.mark.parametrize(
    ("method", "topology", "ragged"),
    [
        (qv.DFedPGP(1, 1), qv.random_push(CLIENTS, 2), False),
        (qv.DFedPGP(1, 1), qv.random_push(CLIENTS, 2), True),
        (qv.FedRep(1, 1), qv.star(CLIENTS, sampled=201), False),
    ],
    ids=["dfedpgp", "ragged", "star"],
)
def test_clients_of_joined_chunks_have_the_bits_of_a_chunk_alone(
    method: qv.Method, topology: qv.Topology, ragged: bool
) -> None:
    joined = _run(method, topology=topology, ragged=ragged)
    alone = _run(method, topology=topology, ragged=ragged, chunk=25)
    assert joined._shard.blocks.training > 1
    assert alone._shard.blocks == Blocks(1, 1)
    for one, other in zip(joined._shard.state, alone._shard.state, strict=True):
        assert torch.equal(one, other)
    assert joined.history.equals(alone.history)
    assert joined.rounds["steps"].equals(alone.rounds["steps"])


@pytest.mark.parametrize(
    ("method", "task", "training"),
    [
        # A sigmoid of what does not fill a vector is computed otherwise than of what does.
        (
            qv.DFedPGP(1, 1),
            qv.Task(
                lambda: nn.Sequential(nn.Linear(INPUTS, 5), nn.Sigmoid(), nn.Linear(5, CLASSES)),
                personal=("2",),
            ),
            TRAINING,
        ),
        (
            qv.DFedPGP(1, 1),
            qv.Task(
                lambda: nn.Sequential(nn.Linear(INPUTS, 5), nn.Dropout(), nn.Linear(5, CLASSES)),
                personal=("2",),
            ),
            TRAINING,
        ),
        (qv.DFedPGP(1, 1), None, qv.Training(lr=0.1, optimizer="adam", batch_size=4)),
    ],
    ids=["sigmoid", "dropout", "adam"],
)
def test_chunks_are_not_joined_where_a_neighbour_could_change_a_bit(
    method: qv.Method, task: qv.Task | None, training: qv.Training
) -> None:
    run = _run(method, training, task=task, evaluate_every=2)
    assert run._shard.blocks == Blocks(1, 1)


def test_larger_models_are_computed_in_chunks_as_before() -> None:
    task = qv.Task(partial(make_model, "mlp", (INPUTS,), CLASSES, hidden=(700, 100)))
    assert _run(qv.DFedPGP(1, 1), task=task, evaluate_every=2)._shard.blocks == Blocks(1, 1)


def test_a_joined_chunk_begins_where_a_row_lies_as_in_a_chunk_alone() -> None:
    order, kinds = np.arange(65)[::-1].copy(), np.zeros((65, 1))
    kinds[order[40:42]] = 1
    groups = list(cut_groups(order, kinds, width=20, blocks=5))
    first, second = order[:20], order[20:40]
    # 20 rows and 12 more, which are those of the same chunk 16 places before.
    assert groups[0].tolist() == [*first, *first[4:16], *second, *second[4:16]]
    assert groups[1].tolist() == order[40:60].tolist()  # of two kinds
    assert groups[2].tolist() == order[60:].tolist()
    for block, rows in enumerate((first, second)):
        begin = block * 32
        for place, client in enumerate(groups[0][begin : begin + 32]):
            assert np.flatnonzero(rows == client)[0] % LINE == place % LINE
    plain = [rows.tolist() for rows in cut_groups(order, kinds, width=20, blocks=1)]
    assert plain == [order[begin : begin + 20].tolist() for begin in range(0, 65, 20)]
