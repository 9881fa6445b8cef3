"""Memory by arithmetic, against what autograd really keeps and what states really weigh."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import quiverfl as qv
from quiverfl.engine.local.examples import Batch
from quiverfl.engine.local.programs import Program, Vectorized
from quiverfl.engine.memory import (
    Footprint,
    count_activations,
    predict_memory,
    room_for,
    saved_bytes,
)
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.shard import Shard
from quiverfl.models import make_model
from quiverfl.task import Params
from quiverfl.topologies.reports import ReportView
from small import METHODS, TRAINING, tiny_data, tiny_task


def image_problem(model: str, shape: tuple[int, ...]) -> tuple[qv.Task, qv.FederatedData]:
    random = np.random.default_rng(0)

    def pair(size: int) -> tuple[Any, Any]:
        return random.normal(size=(size, *shape)).astype(np.float32), random.integers(0, 3, size)

    data = qv.FederatedData.from_arrays([pair(8)] * 3, [pair(2)] * 3, classes=3)
    return qv.Task(model=lambda: make_model(model, shape, 3), personal=("head",)), data


def test_of_the_tiny_model_by_hand() -> None:
    """Kept are x [n, 6] and tanh's output [n, 5], once each; the head's weight is a parameter."""
    found = count_activations(tiny_task(), tiny_data(), torch.float64, together=False)
    assert (found.fixed, found.per_sample) == (0, (6 + 5) * 8)


@pytest.mark.parametrize("model", ["mlp", "lenet5", "cnn_small", "fedavg_cnn", "resnet8_gn"])
def test_two_and_four_samples_tell_of_a_whole_batch(model: str) -> None:
    task, data = image_problem(model, (3, 28, 28))
    x = data.train.x[:1].expand(24, 3, 28, 28).clone()
    for together in (False, True):
        predicted = count_activations(task, data, torch.float32, together).at_batch(24)
        assert predicted == saved_bytes(task, x, torch.float32, together)


@pytest.mark.parametrize("model", ["mlp", "cnn_small", "resnet8_gn"])
def test_clients_computed_together_keep_as_much_each(model: str) -> None:
    """What vmap keeps for five clients is five times what one keeps, to a tenth."""
    task, data = image_problem(model, (3, 28, 28))
    program = Program.of(task, torch.float32, torch.device("cpu"))
    point = Params(*(part.expand(5, -1).clone() for part in task.initial_params(0)))
    own = {part.untyped_storage().data_ptr() for part in point}
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = data.train.x[:1].expand(5, 8, 3, 28, 28).clone()
    y = torch.zeros(5, 8, dtype=torch.int64)
    gradient = Vectorized().bind(program, point, "whole")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        gradient(Batch(5, x, y))
    kept = sum(found.values())
    predicted = 5 * count_activations(task, data, torch.float32).at_batch(8)
    assert 0.9 * predicted <= kept <= 1.1 * predicted


@pytest.mark.parametrize("method", [method for method, _ in METHODS], ids=str)
def test_states_weigh_what_is_predicted(method: Any) -> None:
    settings = RunSettings(rounds=0, dtype=torch.float64)
    predicted = predict_memory(tiny_task(), tiny_data(), method, TRAINING, settings)
    shard = Shard(tiny_task(), tiny_data(), method, TRAINING, settings)
    weigh = sum(leaf.nbytes for leaf in shard.state)
    sent = sum(leaf.nbytes for leaf in shard.outbox().values())
    assert predicted.states == weigh + method.delay * sent


@pytest.mark.slow
def test_resnet18_on_a_card_of_24_gb_is_as_it_was_calculated() -> None:
    """100 clients at batch 128: a sample keeps 5 MB one by one, and twice that by vmap."""
    random = np.random.default_rng(0)
    x = random.normal(size=(128, 3, 32, 32)).astype(np.float32)
    data = qv.FederatedData.from_arrays(
        [(x, np.arange(128) % 10)] * 100, [(x[:1], np.zeros(1))] * 100, classes=10
    )
    task = qv.Task(model=lambda: make_model("resnet18_gn", (3, 32, 32), 10), personal=("head",))
    training = qv.Training(lr=0.1, momentum=0.9, batch_size=128)
    settings = RunSettings(rounds=1, executor="vectorized", keep_local=False)
    found = predict_memory(task, data, qv.DFedPGP(), training, settings)
    assert 4.4e9 < found.states < 4.6e9
    one = count_activations(task, data, torch.float32, together=False).per_sample
    together = count_activations(task, data, torch.float32).per_sample
    assert 4e6 < one < 6e6
    assert 9e6 < together < 10e6
    room = room_for(found, 24 * 10**9)
    assert 8 <= room <= 25
    used = found.states + found.data + room * found.per_client
    assert used <= 0.8 * 24e9
    assert used + found.per_client > 0.8 * 24e9 or room == 25


def test_room_is_at_least_for_one_and_at_most_for_the_widest() -> None:
    one = Footprint(states=100, kept=0, data=0, per_client=50, chunk=25)
    assert room_for(one, 10) == 1
    assert room_for(one, 500) == 6  # 0.8 · 500 = 400, less 100 of states, by 50
    assert room_for(one, 10**9) == 25


@pytest.mark.parametrize("sketch", [0, 4, 32])
def test_what_clients_know_of_each_other_is_counted(sketch: int) -> None:
    """Against what numpy allocates at most while views follow each other and graphs are chosen."""
    clients = 200
    topology = qv.similar_push(clients, 3, sketch=sketch) if sketch else qv.loss_push(clients, 3)
    looks = topology.reports
    assert looks is not None
    telling = np.random.default_rng(0).normal(size=(clients, looks.width)).astype(np.float32)
    tracemalloc.start()
    view = ReportView.empty(looks, clients)
    graph = topology(0, view)
    for t in range(2):
        view = view.with_messages(t, graph, telling)
        graph = topology(t + 1, view)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.85 * looks.memory(clients) <= peak <= 1.05 * looks.memory(clients)
    settings = RunSettings(rounds=1)
    parts = (tiny_task(), tiny_data(), qv.DFedPGP(), TRAINING, settings)
    more = (
        predict_memory(*parts, clients=clients, report_spec=looks).total
        - predict_memory(*parts, clients=clients).total
    )
    assert more == looks.memory(clients)
