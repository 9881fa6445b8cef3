"""BatchNorm's running statistics: those of a plain PyTorch loop, a client's own, or averaged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import quiverfl as qv
from quiverfl.data.batches import batch_order
from quiverfl.engine.evaluation import client_model
from quiverfl.errors import Diverged, QuiverWarning
from quiverfl.methods.contract import Interleaved
from quiverfl.runs.export import export_client
from quiverfl.runs.folder import RunFolder
from small import CLIENTS, METHODS, PUSH, REGULAR, TRAINING, TinyNormed, normed_task, tiny_data

SIZES, ROUNDS, SEED = (5, 9, 7, 6), 3, 1
PLAIN = qv.Training(lr=0.1, momentum=0.9, weight_decay=0.01, batch_size=3)


class Images(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), norm(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def pairs(more: int, seed: int) -> list[Any]:
    r = np.random.default_rng(seed)
    return [(r.normal(size=(n + more, 1, 6, 6)), r.integers(0, 3, n + more)) for n in SIZES]


def images() -> qv.FederatedData:
    return qv.FederatedData.from_arrays(pairs(0, 0), pairs(2, 1))


def run(task: qv.Task, method: Any, topology: Any, **options: Any) -> qv.Run:
    settings = {"rounds": ROUNDS, "seed": SEED, "threads": 1, "dtype": torch.float64, **options}
    return qv.simulate(task, images(), method=method, topology=topology, training=PLAIN, **settings)


# A plain PyTorch loop: a module and an optimizer per client, `state_dict`s that are averaged.


class Loop:
    """Clients with nn.Modules of their own. It knows nothing of Quiver but the order of batches."""

    def __init__(self, task: qv.Task) -> None:
        self.train = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in pairs(0, 0)]
        self.test = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in pairs(2, 1)]
        first = task.make_module(task.initial_params(SEED)).double()
        self.clients = [copy.deepcopy(first) for _ in SIZES]

    def batches(self, i: int, t: int, phase: int, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.train[i]
        for epoch in range(epochs):
            order = batch_order(SEED, i, t, phase, epoch, len(y))
            for begin in range(0, len(y), 3):
                rows = order[begin : begin + 3]
                yield x[rows], y[rows]

    def descend(
        self, model: nn.Module, names: list[str], data: Any, lr: float, anchor: Any = None
    ) -> None:
        """SGD on these parameters, in train mode; the others are frozen."""
        model.train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=lr, momentum=0.9, weight_decay=0.01)
        for x, y in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if anchor is not None:
                strength, there = anchor
                for name, parameter in model.named_parameters():
                    parameter.grad += strength * (parameter.detach() - there[name])
            optimizer.step()

    def losses(self, models: list[nn.Module]) -> list[float]:
        found = []
        for model, (x, y) in zip(models, self.test, strict=True):
            with torch.no_grad():
                found.append(nn.functional.cross_entropy(model.eval()(x), y).item())
        return found


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.double().clone() for name, b in model.named_buffers()}


def load(model: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in values:
                tensor.copy_(values[name])


def mean(models: list[dict[str, Tensor]], weights: Any) -> dict[str, Tensor]:
    return {
        name: sum(float(w) * one[name] for w, one in zip(weights, models, strict=True))
        for name in models[0]
    }


def count_free(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the number of batches, which a module counts in whole numbers."""
    return {name: leaf for name, leaf in values.items() if "num_batches" not in name}


def plain_fedavg(task: qv.Task, topology: Any, mixed: bool) -> tuple[Loop, list[Any]]:
    loop, curves = Loop(task), []
    kept = [copy.deepcopy(model) for model in loop.clients]
    for t in range(ROUNDS):
        active = np.flatnonzero(topology(t).active)
        for i in active:
            model = loop.clients[i]
            loop.descend(model, [*weights_of(model)], loop.batches(i, t, 0, 2), 0.1)
            kept[i] = copy.deepcopy(model)
        curves.append(loop.losses(kept))
        share = np.array([SIZES[i] for i in active]) / sum(SIZES[i] for i in active)
        average = mean([weights_of(loop.clients[i]) for i in active], share)
        running = mean([statistics_of(loop.clients[i]) for i in active], share)
        for model in loop.clients:
            load(model, average)
            if mixed:
                load(model, count_free(running))
        curves.append(loop.losses(loop.clients))
    return loop, curves


def plain_dfedpgp(task: qv.Task, topology: Any, mixed: bool) -> tuple[Loop, list[Any]]:
    loop, curves, mu = Loop(task), [], np.ones(len(SIZES))
    head = ["head.weight", "head.bias"]
    body = [name for name in weights_of(loop.clients[0]) if name not in head]
    for t in range(ROUNDS):
        for i, model in enumerate(loop.clients):
            loop.descend(model, head, loop.batches(i, t, 0, 1), 0.1)
            loop.descend(model, body, loop.batches(i, t, 1, 2), 0.1 / mu[i])
        curves.append(loop.losses(loop.clients))
        P, z = topology(t).weights, [weights_of(model) for model in loop.clients]
        running, new = [statistics_of(model) for model in loop.clients], topology(t).weights @ mu
        for i, model in enumerate(loop.clients):
            average = mean(z, P[i] * mu / new[i])
            load(model, {name: average[name] for name in body})
            if mixed:
                load(model, count_free(mean(running, P[i] * mu / new[i])))
        mu = new
        curves.append(loop.losses(loop.clients))
    return loop, curves


STAR = qv.star(clients=4, sampled=2, seed=3)
PUSHED = qv.random_push(clients=4, neighbors=1, seed=0)
PLAINLY = {
    "FedAvg": (qv.FedAvg(epochs=2), STAR, plain_fedavg, ()),
    "DFedPGP": (qv.DFedPGP(shared_epochs=2), PUSHED, plain_dfedpgp, ("head",)),
}


def losses_of(found: qv.Run) -> np.ndarray:
    order = found.history.sort_values(["round", "stage", "client"], kind="stable")
    return order["loss"].to_numpy().reshape(2 * ROUNDS, len(SIZES))


@pytest.mark.parametrize("buffers", ["personal", "mixed"])
@pytest.mark.parametrize("name", ["FedAvg", "DFedPGP"])
def test_a_run_equals_a_plain_loop_with_batch_norm(name: str, buffers: Any) -> None:
    """Parameters, statistics, and the loss of every client at both stages of every round."""
    method, topology, loop, personal = PLAINLY[name]
    task = qv.Task(Images, personal=personal, buffers=buffers)
    found, (wanted, curves) = (
        run(task, method, topology),
        loop(task, topology, buffers == "mixed"),
    )
    np.testing.assert_allclose(losses_of(found), np.array(curves), rtol=0, atol=1e-12)
    for i, model in enumerate(wanted.clients):
        theirs = {**weights_of(model), **count_free(statistics_of(model))}
        ours = found.parameters(i)
        for key, leaf in theirs.items():
            torch.testing.assert_close(ours[key], leaf, rtol=0, atol=1e-12, msg=key)
        if buffers == "personal":
            count = statistics_of(model)["body.1.num_batches_tracked"]
            assert ours["body.1.num_batches_tracked"] == count > 0


def test_fed_bn_keeps_batch_norm_and_averages_the_rest() -> None:
    """Li et al., "FedBN", ICLR 2021, Algorithm 1: local epochs, then layers that are not BN."""
    task = qv.Task(Images, personal=("batch_norm",))
    assert task.personal == ("body.1",)
    found = run(task, qv.FedPer(epochs=2, weighting="uniform"), STAR)
    loop = Loop(task)
    for t in range(ROUNDS):
        active = np.flatnonzero(STAR(t).active)
        for i in active:
            model = loop.clients[i]
            loop.descend(model, [*weights_of(model)], loop.batches(i, t, 0, 2), 0.1)
        average = mean([weights_of(loop.clients[i]) for i in active], [1 / 2, 1 / 2])
        for model in loop.clients:
            load(model, {n: leaf for n, leaf in average.items() if not n.startswith("body.1.")})
    for i, model in enumerate(loop.clients):
        ours = found.parameters(i)
        for key, leaf in {**weights_of(model), **statistics_of(model)}.items():
            torch.testing.assert_close(ours[key], leaf, rtol=0, atol=1e-12, msg=key)
    assert {"body.1.weight", "body.1.bias"} == set(task.personal_layout.names)


def test_two_models_of_a_method_have_statistics_of_their_own() -> None:
    """Ditto's personal model and its global one, each as its own module has them."""
    found = run(qv.Task(Images, personal=()), qv.Ditto(epochs=2, personal_epochs=1), STAR)
    loop = Loop(qv.Task(Images, personal=()))
    own = [copy.deepcopy(model) for model in loop.clients]
    for t in range(ROUNDS):
        active = np.flatnonzero(STAR(t).active)
        for i in active:
            names, anchor = [*weights_of(own[i])], (0.75, weights_of(loop.clients[i]))
            loop.descend(own[i], names, loop.batches(i, t, 0, 1), 0.1, anchor)
            loop.descend(loop.clients[i], names, loop.batches(i, t, 1, 2), 0.1)
        share = np.array([SIZES[i] for i in active]) / sum(SIZES[i] for i in active)
        average = mean([weights_of(loop.clients[i]) for i in active], share)
        for model in loop.clients:
            load(model, average)
    running: Any = found._shard.statistics
    layout = found._task.statistics_layout
    for i, models in enumerate(zip(own, loop.clients, strict=True)):
        for place, model in enumerate(models):
            ours = layout.split(running[i, place])
            for key, leaf in statistics_of(model).items():
                torch.testing.assert_close(ours[key], leaf, rtol=0, atol=1e-12, msg=key)


# Laws of every method: with BatchNorm in its model, statistics personal.

KINDS = [*{method.name: (method, graphs[0]) for method, graphs in METHODS}.values()]


def small_run(method: Any, graphs: Any, **options: Any) -> qv.Run:
    settings = {"rounds": 3, "seed": 0, "threads": 1, "dtype": torch.float64, **options}
    task = normed_task(**settings.pop("task", {}))
    return qv.simulate(
        task,
        tiny_data(),
        method=method,
        topology=graphs(CLIENTS),
        training=TRAINING,
        executor="sequential",
        **settings,
    )


def running(found: qv.Run) -> Tensor:
    values = found._shard.statistics
    assert values is not None
    return values.clone()


@pytest.mark.parametrize(("method", "graphs"), KINDS, ids=[m.title for m, _ in KINDS])
def test_laws_of_every_method(method: Any, graphs: Any) -> None:
    """Statistics are finite, move with training only, survive a checkpoint, and are not sent."""
    taken: list[Any] = []
    whole = small_run(method, graphs, checkpoint=taken.append, checkpoint_every=1)
    end = running(whole)
    assert torch.isfinite(end).all()
    trained = np.array([graphs(CLIENTS)(t).active for t in range(3)]).any(axis=0)
    start = whole._task.initial_statistics().double()
    moved = (end != start).flatten(1).any(dim=1).numpy()
    assert (moved == trained).all()
    again = small_run(method, graphs, resume=taken[1])
    assert torch.equal(running(again), end)
    for one, other in zip(again._shard.state, whole._shard.state, strict=True):
        assert torch.equal(one, other)
    for stage in ("local", "mixed"):
        whole._shard.evaluate(2, stage)
        client_model(whole._shard, 1, stage)[0]
    assert torch.equal(running(whole), end)
    assert "running_statistics" not in whole._shard.outbox()
    models = 1 + max(
        (
            train.model
            for phase in method.phases(whole._task)
            for train in (phase.phases if isinstance(phase, Interleaved) else (phase,))
            if hasattr(train, "model")
        ),
        default=0,
    )
    assert end.shape == (CLIENTS, models, len(start))


def test_mass_weighs_what_is_mixed() -> None:
    """Σ μ · statistics is conserved where columns sum to 1; where all agree nothing moves."""
    shard = small_run(qv.DFedPGP(shared_epochs=1), PUSH, task={"buffers": "mixed"})._shard
    assert shard.statistics is not None
    values, graph = shard.statistics, PUSH(CLIENTS)(3)
    weights = torch.from_numpy(graph.weights)
    before = torch.einsum("c,cs->s", shard.state.mu, values[:, 0])
    assert shard.state.mu.min() < 0.9
    sent = shard.outbox()
    shard.merge({name: torch.einsum("ij,j...->i...", weights, leaf) for name, leaf in sent.items()})
    after = torch.einsum("c,cs->s", shard.state.mu, shard.statistics[:, 0])
    torch.testing.assert_close(after, before, rtol=0, atol=1e-12)
    shard.statistics[:] = shard.statistics[:1].clone()
    agreed = shard.statistics.clone()
    sent = shard.outbox()
    shard.merge({name: torch.einsum("ij,j...->i...", weights, leaf) for name, leaf in sent.items()})
    torch.testing.assert_close(shard.statistics, agreed, rtol=0, atol=1e-12)


def test_a_kept_local_model_keeps_its_statistics_where_they_are_mixed() -> None:
    """A client that rests is evaluated, at stage local, as it was when it last trained."""
    found = small_run(
        qv.FedAvg(epochs=1),
        lambda m: qv.star(clients=m, sampled=2, seed=0),
        task={"personal": (), "buffers": "mixed"},
        keep_local=True,
    )
    active = found.simulation.topology(2).active
    rows = found.history.query("stage == 'local'").pivot(
        index="client", columns="round", values="loss"
    )
    assert (rows[1][~active] == rows[2][~active]).all()
    for client in np.flatnonzero(~active):
        model = found.personal(int(client), "local")
        x, y = found._data.test.of_client(int(client))
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(x), y).item()
        assert loss == pytest.approx(rows[2][client], abs=1e-12)


def test_a_model_without_statistics_has_nothing_of_it() -> None:
    found = run(qv.Task(lambda: qv.group_norm(Images())), qv.DFedPGP(), PUSHED, rounds=1)
    assert found._shard.statistics is None
    assert not [name for name in found.checkpoint().tensors if "statistics" in name]


def test_saved_restored_and_exported(tmp_path: Any) -> None:
    found = run(qv.Task(Images), qv.DFedPGP(), PUSHED, rounds=2)
    folder = found.save(tmp_path / "run", name="images")
    taken = qv.load_run(folder).checkpoint()
    assert torch.equal(taken.tensors["statistics"], running(found))
    again = run(qv.Task(Images), qv.DFedPGP(), PUSHED, rounds=2, resume=taken)
    model = again.personal(2)
    wanted = found.parameters(2)["body.1.running_var"]
    assert torch.equal(model.get_submodule("body.1").running_var, wanted)  # type: ignore[arg-type]
    taken.tensors["statistics"] = taken.tensors["statistics"][:, :, :-1]
    with pytest.raises(qv.QuiverError, match="field 'statistics' does not fit this run"):
        run(qv.Task(Images), qv.DFedPGP(), PUSHED, rounds=2, resume=taken)


# What cannot be: one sentence each.


class Broken(Images):
    def __init__(self) -> None:
        super().__init__()
        self.body[1].running_var[2] = float("nan")  # type: ignore[index]


class Counting(nn.Module):
    """A running mean of its own, written as a module's author would."""

    def __init__(self, inputs: int = 6, in_place: bool = True) -> None:
        super().__init__()
        self.track_running_stats = True
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(inputs))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            new = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
            if self.in_place:
                self.mean.copy_(new)
            else:
                self.mean = new
        return x - self.mean


def counting(in_place: bool = True) -> nn.Module:
    model: Any = TinyNormed()
    model.body = nn.Sequential(Counting(6, in_place), nn.Linear(6, 6), nn.Tanh())
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: Images(nn.SyncBatchNorm), r"'body.1' is a SyncBatchNorm, which needs all proc"),
        (lambda: Images(lambda _: nn.LazyBatchNorm2d()), r"shape is not known before its first"),
        (
            lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3)),
            r"'0' is a LazyLinear, whose shape is not known",
        ),
        (
            lambda: Images(lambda n: nn.BatchNorm2d(n, track_running_stats=False)),
            r"without running statistics: in use .* track_running_stats=True",
        ),
        (Broken, r"running statistics 'body.1.running_var' .* NaN or infinite"),
    ],
)
def test_layers_that_are_refused(model: Any, words: str) -> None:
    with pytest.raises(qv.QuiverError, match=words):
        qv.Task(model, personal=())


def test_names_that_are_refused() -> None:
    with pytest.raises(qv.QuiverError, match="BatchNorm layers, and the model has none"):
        qv.Task(lambda: qv.group_norm(Images()), personal="batch_norm")
    with pytest.raises(qv.QuiverError, match=r"Task.buffers = 'shared'"):
        qv.Task(Images, buffers="shared")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"executor": "vectorized"}, r"executor = 'vectorized': .*batches of several clients are"),
        ({"compile": True}, r"compile = true: the model cannot .*batches of several clients are"),
        ({"privacy": qv.DPSGD()}, r"dp_sgd. with a model that keeps running statistics"),
        (
            {"task": {"buffers": "mixed"}, "compression": qv.Quantize(bits=4)},
            r"\[compression\] with task.buffers = .mixed.: a variance",
        ),
        (
            {"task": {"buffers": "mixed"}, "method": qv.FedProto(epochs=1), "graphs": REGULAR},
            r"FedProto sends no parameters of the model",
        ),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], words: str) -> None:
    task = normed_task(**options.pop("task", {}))
    with pytest.raises(qv.QuiverError, match=words):
        qv.simulate(
            task,
            tiny_data(),
            method=options.pop("method", qv.DFedPGP()),
            topology=options.pop("graphs", PUSH)(CLIENTS),
            training=TRAINING,
            rounds=1,
            **options,
        )


class Vectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def try_batches(method: Any, batch_size: int | None, sizes: tuple[int, ...]) -> None:
    qv.simulate(
        qv.Task(Vectors),
        tiny_data(sizes),
        method=method,
        topology=qv.full(clients=len(sizes)),
        training=qv.Training(lr=0.1, batch_size=batch_size),
        rounds=1,
        executor="sequential",
    )


def test_a_batch_of_one_sample_is_refused_by_its_client() -> None:
    words = r"client 1 has 9 training samples, so with training.batch_size = 4 .* one sample alone"
    with pytest.raises(qv.QuiverError, match=words):
        try_batches(qv.DFedAvgM(epochs=1), 4, (8, 9))
    try_batches(qv.DFedAvgM(epochs=1), 4, (8, 10))
    with pytest.raises(qv.QuiverError, match="client 1 has 1 training samples"):
        try_batches(qv.DFedAvgM(epochs=1), None, (8, 1))
    with pytest.raises(qv.QuiverError, match="client 0 has 6 training samples"):
        try_batches(qv.PerFedAvg(epochs=1), 4, (6, 8))  # its batches are halved


def test_auto_says_that_it_computes_one_client_after_the_other() -> None:
    with pytest.warns(QuiverWarning, match="batches of several clients are padded.*sequential"):
        found = qv.simulate(
            qv.Task(Vectors),
            tiny_data((8, 8)),
            method=qv.DFedAvgM(epochs=1),
            topology=qv.full(clients=2),
            training=TRAINING,
            rounds=1,
        )
    assert found.summary["carried_out"]["executor"] == "sequential"


def test_mixed_buffers_without_statistics_are_pointed_out() -> None:
    task = qv.Task(lambda: qv.group_norm(Images()), buffers="mixed")
    with pytest.warns(QuiverWarning, match="keeps no running statistics"):
        run(task, qv.DFedPGP(), PUSHED, rounds=1)


def test_a_module_of_ones_own_keeps_running_statistics() -> None:
    def play(in_place: bool) -> qv.Run:
        return qv.simulate(
            qv.Task(lambda: counting(in_place)),
            tiny_data(),
            method=qv.DFedAvgM(epochs=1),
            topology=REGULAR(CLIENTS),
            training=TRAINING,
            rounds=1,
            executor="sequential",
            dtype=torch.float64,
            threads=1,
        )

    found = play(in_place=True)
    x, _ = found._data.train.of_client(0)
    order = batch_order(0, 0, 0, 0, 0, len(x))
    wanted = torch.zeros(6, dtype=torch.float64)
    for begin in range(0, len(x), 4):
        wanted = 0.9 * wanted + 0.1 * x[order[begin : begin + 4]].double().mean(dim=0)
    torch.testing.assert_close(found.parameters(0)["body.0.mean"], wanted, rtol=0, atol=1e-12)
    with pytest.raises(qv.QuiverError, match=r"puts another tensor in place .* self.mean.copy_"):
        play(in_place=False)


@pytest.mark.parametrize("buffers", ["personal", "mixed"])
def test_a_client_that_comes_later_begins_with_what_is_sent(buffers: Any) -> None:
    """Fresh statistics, or the server's average; fitting them is training on its own data."""
    task = qv.Task(Images, personal=(), buffers=buffers)
    found = qv.simulate(
        task,
        images().hold_out([3], epochs=1),
        method=qv.FedAvg(epochs=1),
        topology=qv.star(clients=3, sampled=2, seed=0),
        training=qv.Training(lr=0.1, batch_size=None),
        rounds=2,
        dtype=torch.float64,
        threads=1,
    )
    statistics = found._shard.statistics if buffers == "mixed" else None
    point = client_model(found._shard, 0, "mixed")[0]
    started = task.initial_statistics().double() if statistics is None else statistics[0, 0]
    model = task.make_module(point, started)
    (x, y), (test_x, test_y) = (
        [torch.from_numpy(part) for part in pairs(*how)[3]] for how in ((0, 0), (2, 1))
    )

    def loss() -> float:
        with torch.no_grad():
            return nn.functional.cross_entropy(model.eval()(test_x), test_y).item()

    last = found.history.query("round == 1").set_index("stage")["loss"]
    assert last["unseen"] == pytest.approx(loss(), abs=1e-12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.functional.cross_entropy(model.train()(x), y).backward()
    optimizer.step()
    assert last["fitted"] == pytest.approx(loss(), abs=1e-12)


NORMED_MODEL = """
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(shape[0], 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Linear(144, classes)

    def forward(self, x):
        return self.head(self.body(x))
"""


def test_fed_bn_by_configuration_in_a_folder_and_exported(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`personal = "batch_norm"` with fedper; the file that is exported has the statistics."""
    (tmp_path / "normed_model.py").write_text(NORMED_MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {
        "data": {"name": "digits", "clients": 3, "samples_per_client": 20, "partition": "iid"},
        "model": {"name": "normed_model:Net", "personal": "batch_norm"},
        "method": {"name": "fedper", "epochs": 1, "weighting": "uniform"},
        "topology": {"sampled": 2},
        "run": {"rounds": 2, "threads": 1, "keep_local": True},
    }
    experiment = qv.Experiment.of(settings)
    assert experiment.task.personal == ("body.1",)
    mixed = qv.Experiment.of({**settings, "task": {"buffers": "mixed"}})
    assert mixed.task.buffers == "mixed"
    experiment.run("normed")
    lines = [*export_client(RunFolder(Path("normed")), 1, "mixed", Path("one.safetensors"))]
    assert lines
    run = qv.load_run("normed").run
    model = experiment.task.model()
    model.load_state_dict(load_file("one.safetensors"))
    x, _ = run._data.test.of_client(1)
    prepared = run.personal(1)
    bare: Any = getattr(prepared, "model", prepared)
    with torch.no_grad():
        assert torch.equal(model.eval()(x.float()), bare(x.float()))
    assert int(model.get_submodule("body.1").num_batches_tracked) > 0  # type: ignore[arg-type]


class Growing(Counting):
    """Statistics that overflow, in a model whose parameters stay finite."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(1e30).add_(1e30)
            return x
        return x - self.mean.clamp(max=1.0)


def test_statistics_that_overflow_end_the_run() -> None:
    def growing() -> nn.Module:
        model: Any = counting()
        model.body[0] = Growing()
        return model

    with pytest.raises(Diverged, match=r"round 1, client 2: a running statistic is not finite"):
        qv.simulate(
            qv.Task(growing),
            tiny_data(),
            method=qv.DFedAvgM(epochs=1),
            topology=REGULAR(CLIENTS),
            training=TRAINING,
            rounds=1,
            executor="sequential",
            threads=1,
        )
