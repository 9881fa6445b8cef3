"""The contract: what a method may ask for works."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import quiverfl as qv
from authored import Alone, Weights, anything, with_phases
from quiverfl.engine.shard import Shard
from quiverfl.errors import QuiverWarning
from quiverfl.methods.blocks import train_personal, train_whole
from small import CLIENTS, REGULAR, STAR, TRAINING, simulate, states, tiny_data, tiny_task

ROOT = Path(qv.__file__).parent

READ_FIRST = (
    "engine/rounds.py",
    "methods/contract.py",
    "methods/dfedpgp.py",
    "topologies/graph.py",
    "engine/local/step.py",
)

PLAIN = qv.Training(lr=0.1, personal_lr=0.05, batch_size=4)


def test_what_a_newcomer_reads_first_is_six_hundred_lines_at_most() -> None:
    """The path ends in the file in which a batch becomes a gradient, and a gradient a step."""
    assert sum(len((ROOT / name).read_text().splitlines()) for name in READ_FIRST) <= 600


def test_fields_have_roles_by_type_and_names_of_their_own() -> None:
    run = simulate(Alone(), REGULAR(CLIENTS))
    assert set(run.state(0)["body"]) == {"body.0.weight", "body.0.bias"}
    assert set(run.state(0)["classifier"]) == {"head.weight", "head.bias"}
    assert run.rounds["consensus"].notna().all()


class Noted(NamedTuple):
    u: qv.Shared
    v: qv.Personal
    steps: qv.Scalar
    rate: qv.Scalar
    share: qv.Scalar
    first: qv.Scalar
    second: qv.Scalar


@dataclass(frozen=True)
class Noting(qv.Method[Noted]):
    """Writes down what its phases see."""

    name = "noting"
    title = "Noting"
    topology = "star"

    def init(self, task: qv.Task, start: qv.Start) -> Noted:
        return Noted(*start.params, *(start.params.shared.new_zeros(()) for _ in range(5)))

    def phases(self, task: qv.Task) -> tuple[qv.methods.Phase[Noted], ...]:
        train: qv.Train[Noted] = qv.Train(
            part="whole",
            epochs=2,
            params=self.personal,
            update=lambda state, trained: state._replace(
                u=trained.shared,
                v=trained.personal,
                steps=trained.steps,
                rate=trained.lr,
                share=trained.active_fraction,
            ),
        )
        first: qv.SingleStep[Noted] = qv.SingleStep(
            lambda state, moment: state._replace(first=moment.noise.mean()), needs_noise=True
        )
        second: qv.SingleStep[Noted] = qv.SingleStep(
            lambda state, moment: state._replace(second=moment.noise.mean()), needs_noise=True
        )
        return first, train, second

    def message(self, state: Noted) -> qv.Message:
        return {"u": state.u}

    def merge(self, state: Noted, mixed: qv.Message) -> Noted:
        return state._replace(u=mixed["u"])

    def personal(self, state: Noted) -> qv.Params:
        return qv.Params(state.u, state.v)


@pytest.mark.parametrize("executor", ["vectorized", "sequential"])
def test_a_phase_sees_steps_rate_share_and_noise_of_its_own(executor: str) -> None:
    run = simulate(Noting(), STAR(CLIENTS), rounds=1, executor=executor)
    trained = [run.state(i) for i in range(CLIENTS) if float(run.state(i).steps)]
    assert len(trained) == 3  # of six are sampled
    sizes = (5, 7, 11, 9, 6, 8)
    batches = {2 * -(-size // 4) for size in sizes}
    for state in trained:
        assert int(state.steps) in batches
        assert float(state.rate) == pytest.approx(0.1)
        assert float(state.share) == 0.5
        assert 0.3 < float(state.first) < 0.7
        assert float(state.first) != float(state.second)


def test_a_once_step_with_a_gradient_is_a_step_and_uses_the_rate() -> None:
    def descend(state: Weights, moment: qv.StepInfo) -> Weights:
        assert moment.gradient is not None
        return Weights(
            state.body - moment.lr * moment.gradient.shared,
            state.classifier - moment.lr * moment.gradient.personal,
        )

    method = with_phases(qv.SingleStep(descend, needs_gradient=True))
    plain = {"training": qv.Training(lr=0.3, batch_size=4)}
    once = simulate(method, REGULAR(CLIENTS), **plain)
    train = simulate(with_phases(Alone().train(steps=1)), REGULAR(CLIENTS), **plain)
    assert once.summary["steps"] == train.summary["steps"] == 3 * CLIENTS
    for one, other in zip(states(once), states(train), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_statistics_are_sums_over_the_clients_own_samples() -> None:
    seen: list[Tensor] = []

    def count(view: qv.ModelOutputs, targets: Tensor, weights: Tensor, state: Any) -> qv.Message:
        return {"samples": weights.sum(), "labels": (targets * weights).sum()}

    class Counted(NamedTuple):
        u: qv.Shared
        v: qv.Personal
        samples: qv.Scalar
        labels: qv.Scalar

    class Counting(Alone):
        def init(self, task: qv.Task, start: qv.Start) -> Any:
            return Counted(*start.params, *(start.params.shared.new_zeros(()) for _ in range(2)))

        def phases(self, task: qv.Task) -> Any:
            step = lambda state, moment: state._replace(**moment.statistics)  # noqa: E731
            return (qv.SingleStep(step, statistics=count),)

        def message(self, state: Any) -> qv.Message:
            return {"u": state.u}

        def merge(self, state: Any, mixed: qv.Message) -> Any:
            return state._replace(u=mixed["u"])

        def personal(self, state: Any) -> qv.Params:
            return qv.Params(state.u, state.v)

    data = tiny_data()
    for executor in ("vectorized", "sequential"):
        run = simulate(Counting(), REGULAR(CLIENTS), rounds=1, executor=executor)
        for client in range(CLIENTS):
            _, y = data.train.of_client(client)
            assert int(run.state(client).samples) == len(y)
            assert int(run.state(client).labels) == int(y.sum())
    assert not seen


def test_steps_take_the_batches_that_epochs_would() -> None:
    sizes = (8, 8, 8, 8, 8, 8)
    data = tiny_data(sizes)
    runs = [
        qv.simulate(
            tiny_task(),
            data,
            method=with_phases(Alone().train(**length)),
            topology=REGULAR(CLIENTS),
            training=TRAINING,
            rounds=2,
            dtype=torch.float64,
        )
        for length in ({"epochs": 3}, {"steps": 6}, {"steps": 5})
    ]
    same, other = states(runs[0]), states(runs[1])
    assert all(torch.equal(a, b) for a, b in zip(same, other, strict=True))
    assert runs[2].summary["steps"] == 2 * 5 * CLIENTS
    assert not torch.equal(states(runs[2])[0], same[0])


OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "sgd": (
        {"momentum": 0.9, "weight_decay": 0.01},
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    ),
    "nesterov": (
        {"momentum": 0.9, "nesterov": True},
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    ),
    "adam": (
        {"optimizer": "adam", "weight_decay": 0.01, "betas": (0.8, 0.99)},
        lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.01, betas=(0.8, 0.99)),
    ),
    "adamw": (
        {"optimizer": "adamw", "weight_decay": 0.1},
        lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("executor", ["vectorized", "sequential"])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_local_optimizers_are_torchs(name: str, kept: bool, executor: str) -> None:
    """Also over two rounds, where the optimizer's state starts afresh or lives on."""
    settings, make = OPTIMIZERS[name]
    training = qv.Training(lr=0.05, batch_size=None, **settings)
    method = with_phases(Alone().train(epochs=3, keep_optimizer=kept))
    run = simulate(
        method, qv.isolated(clients=CLIENTS), rounds=2, training=training, executor=executor
    )
    data, start = tiny_data(), simulate(method, qv.isolated(clients=CLIENTS), rounds=0)
    for client in range(CLIENTS):
        model = start.personal(client)
        optimizer = make(model.parameters())
        x, y = data.train.of_client(client)
        for _ in range(2):
            optimizer = optimizer if kept else make(model.parameters())
            for _ in range(3):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        found = run.personal(client).state_dict()
        for key, value in model.state_dict().items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-12)


def test_a_kept_optimizer_belongs_to_every_checkpoint() -> None:
    method = with_phases(Alone().train(epochs=1, keep_optimizer=True))
    checkpoints: list[Any] = []
    options = {"rounds": 4, "checkpoint": checkpoints.append, "checkpoint_every": 1}
    whole = simulate(method, STAR(CLIENTS), **options)
    resumed = simulate(method, STAR(CLIENTS), rounds=4, resume=checkpoints[1])
    assert any(name.startswith("optimizer/") for name in checkpoints[1].tensors)
    assert all(torch.equal(a, b) for a, b in zip(states(whole), states(resumed), strict=True))


class ServerMomentum(NamedTuple):
    u: qv.Shared
    v: qv.Personal
    x_u: qv.Replicated[qv.Shared]


def momentum_from(start_of: Any) -> Any:
    def init(self: Any, task: qv.Task, start: qv.Start) -> ServerMomentum:
        return ServerMomentum(*start.params, start_of(start))

    def merge(self: Any, state: ServerMomentum, mixed: qv.Message) -> ServerMomentum:
        x_u = state.x_u + 0.5 * (mixed["u"] - state.x_u)
        return state._replace(u=x_u, x_u=x_u)

    return type(
        "Momentum",
        (Alone,),
        {
            "name": "momentum",
            "title": "Momentum",
            "topology": "star",
            "init": init,
            "phases": lambda self, task: (train_whole(1),),
            "message": lambda self, state: {"u": state.u.clone()},
            "merge": merge,
            "personal": lambda self, state: qv.Params(state.u, state.v),
        },
    )()


def test_server_state_is_the_same_everywhere_or_refused() -> None:
    """Clients that start apart would keep different copies of a server for ever."""
    common = momentum_from(lambda start: start.common_params.shared.clone())
    run = simulate(common, STAR(CLIENTS), common_init=False)
    copies = [run.state(client)["x_u"] for client in range(CLIENTS)]
    for other in copies[1:]:
        assert all(torch.equal(copies[0][name], other[name]) for name in other)
    own = momentum_from(lambda start: start.params.shared.clone())
    simulate(own, STAR(CLIENTS))  # all start from the same point
    with pytest.raises(qv.QuiverError, match=r"'x_u' is declared Replicated.*start.common_params"):
        simulate(own, STAR(CLIENTS), common_init=False)
    counted = momentum_from(lambda start: start.common_params.shared * start.samples)
    with pytest.raises(qv.QuiverError, match="'x_u' is declared Replicated"):
        simulate(counted, STAR(CLIENTS))
    with pytest.warns(QuiverWarning, match=r"merge makes it different.*topology = .star."):
        simulate(common, REGULAR(CLIENTS))


def test_a_lone_client_is_refused_server_state_of_its_own() -> None:
    """A peer or a rank with one client has nobody to compare with."""
    own = momentum_from(lambda start: start.params.shared.clone())
    settings = qv.RunSettings(rounds=1, dtype=torch.float64, common_init=False)
    with pytest.raises(qv.QuiverError, match="'x_u' is declared Replicated"):
        Shard(tiny_task(), tiny_data().select([3]), own, TRAINING, settings, clients=[3])


@pytest.mark.parametrize("executor", ["vectorized", "sequential"])
def test_a_loss_of_ones_own_needs_no_features(executor: str) -> None:
    """The task's own loss, written by an author, trains to the same bits."""

    def of(seen: qv.ModelOutputs, y: Tensor, state: Weights, taught: Any) -> Tensor:
        return functional.cross_entropy(seen.outputs, y, reduction="none")

    def mean(seen: qv.ModelOutputs, y: Tensor, state: Weights, taught: Any) -> Tensor:
        return functional.cross_entropy(seen.outputs, y)

    plain = simulate(with_phases(Alone().train(epochs=1)), REGULAR(CLIENTS), executor=executor)
    own = with_phases(Alone().train(epochs=1, loss=qv.Loss(of)))
    same = simulate(own, REGULAR(CLIENTS), executor=executor)
    for one, other in zip(states(plain), states(same), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    for features in (False, True):
        scalar = with_phases(Alone().train(epochs=1, loss=qv.Loss(mean, needs_features=features)))
        with pytest.raises(
            qv.QuiverError, match=r"gave \(\) for \d samples.*one number per sample"
        ):
            simulate(scalar, REGULAR(CLIENTS), executor=executor)


class Answers(NamedTuple):
    body: Tensor
    classifier: Tensor


def test_a_state_without_a_shared_field_has_no_consensus_distance(tmp_path: Path) -> None:
    def phases(self: Any, task: qv.Task) -> Any:
        train = self.train(epochs=1)
        return (replace(train, update=lambda state, trained: Answers(*trained[:2])),)

    bare = anything(init=lambda self, task, start: Answers(*start.params), phases=phases)
    run = simulate(bare, REGULAR(CLIENTS))
    assert run.rounds["consensus"].isna().all()
    page = qv.report([run], tmp_path / "report.html").read_text()
    assert "No consensus distance" in page
    assert "declared Shared: Alone." in page


def test_a_delay_on_a_star_is_refused_and_on_a_full_graph_is_that_of_its_matrix() -> None:
    with pytest.raises(qv.QuiverError, match=r"delay = 1 needs a graph on which every client"):
        simulate(qv.OSGP(epochs=1, delay=1), STAR(CLIENTS))
    full = qv.full(clients=CLIENTS)
    rows = qv.Topology.from_graph("rows", qv.Graph(full(0).sparse, full(0).active))
    folded, whole = (simulate(qv.OSGP(epochs=1, delay=1), t, rounds=4) for t in (full, rows))
    for one, other in zip(states(folded), states(whole), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_interleaved_phases_see_what_the_one_before_left() -> None:
    """Training head and body in turns on every batch is not training one after the other."""
    body = replace(train_whole(None), part="shared")  # type: ignore[arg-type]
    body = replace(body, update=lambda state, trained: state._replace(u=trained.shared))
    head = replace(train_personal(None), trains_message=True)  # type: ignore[arg-type]

    class Turns(qv.DFedAvgM):
        name, title = "turns", "Turns"

        def phases(self, task: qv.Task) -> Any:
            return (qv.Interleaved((head, body), epochs=1),)

    run = simulate(Turns(), qv.isolated(clients=CLIENTS), rounds=1, training=PLAIN)
    start = simulate(Turns(), qv.isolated(clients=CLIENTS), rounds=0)
    data = tiny_data()
    order = qv.batch_order(0, 2, 0, 0, 0, 11)
    model: Any = start.personal(2)
    x, y = data.train.of_client(2)
    for first in range(0, 11, 4):
        rows = order[first : first + 4]
        for part, rate in ((model.head, 0.05), (model.body, 0.1)):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            found = torch.autograd.grad(loss, list(part.parameters()))
            with torch.no_grad():
                for parameter, slope in zip(part.parameters(), found, strict=True):
                    parameter -= rate * slope
    for key, value in run.personal(2).state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[key], rtol=0, atol=1e-13)


def test_two_gradients_a_step_count_as_two() -> None:
    plain = simulate(qv.DFedAvgM(epochs=2), REGULAR(CLIENTS)).summary["steps"]
    assert simulate(qv.DFedSAM(epochs=2), REGULAR(CLIENTS)).summary["steps"] == 2 * plain
    star = simulate(qv.FedAvg(epochs=2), STAR(CLIENTS)).summary["steps"]
    assert simulate(qv.PerFedAvg(epochs=2), STAR(CLIENTS)).summary["steps"] == star
    assert simulate(qv.APFL(epochs=2), STAR(CLIENTS)).summary["steps"] == 2 * star + 9


def test_tracked_gradients_sum_to_the_sum_of_gradients() -> None:
    training = qv.Training(lr=0.1, batch_size=None)
    run = simulate(qv.PushDIGing(), qv.random_push(CLIENTS, 2), rounds=5, training=training)
    state = run._shard.state
    torch.testing.assert_close(state.track_u.sum(0), state.last_u.sum(0), rtol=0, atol=1e-12)
    assert np.ptp(state.mu.numpy()) > 0.1


@pytest.mark.parametrize("executor", ["vectorized", "sequential"])
def test_a_loss_of_the_whole_batch_knows_its_padding(executor: str) -> None:
    """Times the number of real samples, it moves a client as many times as far."""

    def counted(seen: Any, targets: Tensor, state: Any, _: Any, weights: Tensor) -> Tensor:
        plain = functional.cross_entropy(seen.outputs, targets, reduction="none")
        return plain * weights.sum()

    whole = with_phases(Alone().train(steps=1, loss=qv.Loss(counted, needs_weights=True)))
    plain = with_phases(Alone().train(steps=1))
    options = {"rounds": 1, "training": qv.Training(lr=0.01, batch_size=None)}
    start = states(simulate(plain, REGULAR(CLIENTS), rounds=0))[0]
    topology = qv.isolated(clients=CLIENTS)
    far, near = (
        states(simulate(method, topology, executor=executor, **options))[0] - start
        for method in (whole, plain)
    )
    sizes = torch.tensor([5.0, 7.0, 11.0, 9.0, 6.0, 8.0], dtype=torch.float64)
    torch.testing.assert_close(far, near * sizes[:, None], rtol=0, atol=1e-12)
    assert float(near.norm()) > 1e-3
