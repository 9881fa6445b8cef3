"""The contract: what a method may ask for works, and what nobody would carry out is refused."""

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
from quiverfl.engine.features import head_is_last
from quiverfl.engine.shard import Shard
from quiverfl.errors import QuiverWarning
from quiverfl.methods.parts import train_personal, train_whole
from quiverfl.models import MODELS, make_model
from small import CLIENTS, REGULAR, STAR, TRAINING, simulate, states, tiny_data, tiny_task

ROOT = Path(qv.__file__).parent
READ_FIRST = (
    "engine/rounds.py",
    "methods/contract.py",
    "methods/dfedpgp.py",
    "topologies/graph.py",
)


def test_what_a_newcomer_reads_first_is_four_hundred_lines_at_most() -> None:
    assert sum(len((ROOT / name).read_text().splitlines()) for name in READ_FIRST) <= 400


class Weights(NamedTuple):
    """No field is called u."""

    body: qv.Shared
    classifier: qv.Personal


@dataclass(frozen=True)
class Alone(qv.Method[Weights]):
    """A method whose phases a test chooses; nothing is sent but the shared part."""

    name = "alone"
    title = "Alone"
    topology = "random_regular"

    def init(self, task: qv.Task, start: qv.Start) -> Weights:
        return Weights(*start.point)

    def phases(self, task: qv.Task) -> tuple[qv.methods.Phase[Weights], ...]:
        return (self.train(epochs=1),)

    def train(self, **options: Any) -> qv.Train[Weights]:
        return qv.Train(
            part="whole",
            point=self.personal,
            absorb=lambda state, trained: Weights(trained.shared, trained.personal),
            **options,
        )

    def message(self, state: Weights) -> qv.Message:
        return {"body": state.body}

    def merge(self, state: Weights, mixed: qv.Message) -> Weights:
        return state._replace(body=mixed["body"])

    def personal(self, state: Weights) -> qv.Point:
        return qv.Point(state.body, state.classifier)


def with_phases(*phases: Any) -> Any:
    return type("Chosen", (Alone,), {"phases": lambda self, task: phases})()


def test_fields_have_roles_by_type_and_names_of_their_own() -> None:
    run = simulate(Alone(), REGULAR(CLIENTS))
    assert set(run.state(0)["body"]) == {"body.0.weight", "body.0.bias"}
    assert set(run.state(0)["classifier"]) == {"head.weight", "head.bias"}
    assert run.rounds["consensus"].notna().all()


# --- what a step sees ---------------------------------------------------------------------------


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
        return Noted(*start.point, *(start.point.shared.new_zeros(()) for _ in range(5)))

    def phases(self, task: qv.Task) -> tuple[qv.methods.Phase[Noted], ...]:
        train: qv.Train[Noted] = qv.Train(
            part="whole",
            epochs=2,
            point=self.personal,
            absorb=lambda state, trained: state._replace(
                u=trained.shared,
                v=trained.personal,
                steps=trained.steps,
                rate=trained.rate,
                share=trained.share,
            ),
        )
        first: qv.Once[Noted] = qv.Once(
            lambda state, moment: state._replace(first=moment.noise.mean()), noise=True
        )
        second: qv.Once[Noted] = qv.Once(
            lambda state, moment: state._replace(second=moment.noise.mean()), noise=True
        )
        return first, train, second

    def message(self, state: Noted) -> qv.Message:
        return {"u": state.u}

    def merge(self, state: Noted, mixed: qv.Message) -> Noted:
        return state._replace(u=mixed["u"])

    def personal(self, state: Noted) -> qv.Point:
        return qv.Point(state.u, state.v)


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
    def descend(state: Weights, moment: qv.Moment) -> Weights:
        assert moment.gradient is not None
        return Weights(
            state.body - moment.rate * moment.gradient.shared,
            state.classifier - moment.rate * moment.gradient.personal,
        )

    method = with_phases(qv.Once(descend, gradient=True))
    plain = {"training": qv.Training(lr=0.3, batch_size=4)}
    once = simulate(method, REGULAR(CLIENTS), **plain)
    train = simulate(with_phases(Alone().train(steps=1)), REGULAR(CLIENTS), **plain)
    assert once.summary["steps"] == train.summary["steps"] == 3 * CLIENTS
    for one, other in zip(states(once), states(train), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_a_learning_rate_that_nobody_reads_is_refused() -> None:
    def descend(state: Weights, moment: qv.Moment) -> Weights:
        assert moment.gradient is not None
        return state._replace(body=state.body - 0.1 * moment.gradient.shared)

    with pytest.raises(qv.QuiverError, match=r"training\.lr would change nothing"):
        simulate(with_phases(qv.Once(descend, gradient=True)), REGULAR(CLIENTS))


def test_a_step_that_branches_is_refused_or_done_one_by_one() -> None:
    def branch(state: Weights, moment: qv.Moment) -> Weights:
        return state if state.body.sum() > 0 else state._replace(body=-state.body)

    def where(state: Weights, moment: qv.Moment) -> Weights:
        return state._replace(body=torch.where(state.body.sum() > 0, state.body, -state.body))

    with pytest.raises(qv.QuiverError, match="one_by_one=True"):
        simulate(with_phases(qv.Once(branch)), REGULAR(CLIENTS))
    slow = simulate(with_phases(qv.Once(branch, one_by_one=True)), REGULAR(CLIENTS))
    fast = simulate(with_phases(qv.Once(where)), REGULAR(CLIENTS))
    assert all(torch.equal(a, b) for a, b in zip(states(slow), states(fast), strict=True))


def test_statistics_are_sums_over_the_clients_own_samples() -> None:
    seen: list[Tensor] = []

    def count(view: qv.Seen, targets: Tensor, weights: Tensor, state: Any) -> qv.Message:
        return {"samples": weights.sum(), "labels": (targets * weights).sum()}

    class Counted(NamedTuple):
        u: qv.Shared
        v: qv.Personal
        samples: qv.Scalar
        labels: qv.Scalar

    class Counting(Alone):
        def init(self, task: qv.Task, start: qv.Start) -> Any:
            return Counted(*start.point, *(start.point.shared.new_zeros(()) for _ in range(2)))

        def phases(self, task: qv.Task) -> Any:
            step = lambda state, moment: state._replace(**moment.statistics)  # noqa: E731
            return (qv.Once(step, statistics=count),)

        def message(self, state: Any) -> qv.Message:
            return {"u": state.u}

        def merge(self, state: Any, mixed: qv.Message) -> Any:
            return state._replace(u=mixed["u"])

        def personal(self, state: Any) -> qv.Point:
            return qv.Point(state.u, state.v)

    data = tiny_data()
    for executor in ("vectorized", "sequential"):
        run = simulate(Counting(), REGULAR(CLIENTS), rounds=1, executor=executor)
        for client in range(CLIENTS):
            _, y = data.train.of(client)
            assert int(run.state(client).samples) == len(y)
            assert int(run.state(client).labels) == int(y.sum())
    assert not seen


# --- steps, batches, optimizers -----------------------------------------------------------------


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
        x, y = data.train.of(client)
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


# --- what is refused ----------------------------------------------------------------------------


def anything(**changed: Any) -> Any:
    return type("Odd", (Alone,), changed)()


def reads_what_it_sent(self: Any, state: Weights, mixed: qv.Message) -> Weights:
    return state._replace(body=0.5 * state.body + 0.5 * mixed["body"])


def steep(gradient: qv.Point, point: qv.Point, state: Weights) -> qv.Point:
    return point if gradient.shared.sum() > 0 else gradient


def absorbs_in_place(state: Weights, trained: qv.methods.Trained) -> Weights:
    state.body.copy_(trained.shared)
    return Weights(state.body, trained.personal)


def pulls_in_place(gradient: qv.Point, point: qv.Point, state: Weights) -> qv.Point:
    gradient.shared.add_(point.shared)
    return gradient


def shrinks_in_place(state: Weights, moment: qv.Moment) -> Weights:
    state.classifier.mul_(0.5)
    return state


def forgets(self: Any, state: Weights, mixed: qv.Message) -> None:
    pass


class Counts(NamedTuple):
    body: qv.Shared
    classifier: qv.Personal
    count: qv.Scalar


class Wrong(NamedTuple):
    body: qv.Shared
    classifier: qv.Scalar


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (anything(init=lambda self, task, start: tuple(start.point)), "a state is a NamedTuple"),
        (anything(init=lambda self, task, start: Weights(1.0, start.point.personal)), "is a float"),
        (anything(init=lambda self, task, start: Wrong(*start.point)), "declared Scalar"),
        (anything(mass="mu"), "no Scalar field of that name; it has: body, classifier"),
        (
            anything(init=lambda self, task, start: Counts(*start.point, torch.tensor(3))),
            "'count' has type torch.int64",
        ),
        (anything(merge=reads_what_it_sent), "merge reads what message sent as it stands"),
        (anything(merge=forgets), r"forgets failed: ValueError|forgets returned a NoneType"),
        (
            anything(merge=lambda self, state, mixed: Weights(mixed["body"][:3], state[1])),
            r"made the state's field 'body' \(3,\)",
        ),
        (anything(merge=lambda self, state, mixed: mixed["uu"]), "KeyError: 'uu'"),
        (anything(message=lambda self, state: (state.body,)), "message returned a tuple"),
        (
            anything(personal=lambda self, state: (state[0], state[1])),
            "returned a tuple; it must return a model",
        ),
        (
            anything(init=lambda self, task, start: Weights(*(p.mul_(2) for p in start.point))),
            "init changes start.point or start.common in place",
        ),
        (
            anything(personal=lambda self, state: qv.Point(state.body.mul_(0.5), state[1])),
            "changes 'body' of the Weights it is given in place",
        ),
        (
            anything(message=lambda self, state: {"body": state.body.add_(1)}),
            "changes 'body' of the Weights it is given in place",
        ),
        (
            anything(merge=lambda self, state, mixed: Weights(mixed["body"].mul_(2), state[1])),
            "changes 'body' of the dict it is given in place",
        ),
        (
            with_phases(replace(Alone().train(epochs=1), absorb=absorbs_in_place)),
            "absorbs_in_place changes 'body' of the Weights it is given in place",
        ),
        (
            with_phases(Alone().train(epochs=1, gradient=pulls_in_place)),
            "pulls_in_place changes 'shared' of the Point it is given in place",
        ),
        (
            with_phases(Alone().train(epochs=1), qv.Once(shrinks_in_place)),
            "shrinks_in_place changes 'classifier' of the Weights it is given in place",
        ),
        (
            with_phases(Alone().train(epochs=1), qv.Once(shrinks_in_place, one_by_one=True)),
            "shrinks_in_place changes 'classifier' of the Weights it is given in place",
        ),
        (with_phases(), r"phases returned \(\), so its clients would never train"),
        (with_phases(qv.Interleaved((), epochs=1)), "an Interleaved is empty"),
        (anything(name="fedavg"), "has name = 'fedavg', which is one of Quiver's own methods"),
        (anything(title="FedAvg"), "give it a title of its own"),
        (anything(topolgy="star"), "has 'topolgy', .* did you mean 'topology'"),
        (anything(mrege=forgets), "did you mean 'merge'"),
        (anything(unused=("lrr",)), "unused = 'lrr': .*did you mean 'lr'"),
        (anything(delay=-1), "delay = -1: it must be a whole number"),
        (anything(phases=lambda self, task: self.train(epochs=1)), r"such as \(train,\) with its"),
        (with_phases(replace(Alone().train(epochs=1), part="all")), "part = 'all'"),
        (with_phases(Alone().train(epochs=1, lookahead=steep)), r"write lookahead=Lookahead"),
        (
            with_phases(Alone().train(epochs=1, lookahead=qv.Lookahead(steep))),
            r"steep failed in test_contract.py, line \d+: .*no if on a value",
        ),
        (
            with_phases(Alone().train(epochs=1, settings=lambda t: replace(t, optimizer="adam"))),
            "gives a phase settings that do not work with this run's.*momentum=0.0",
        ),
        (with_phases(Alone().train()), "needs epochs or steps"),
        (with_phases(Alone().train(epochs=1, steps=2)), "needs epochs or steps, one of them"),
        (
            with_phases(qv.Interleaved((Alone().train(epochs=1),), epochs=1)),
            "inside Interleaved cannot have epochs",
        ),
        (
            with_phases(qv.Interleaved((qv.Once(lambda s, _: s, noise=True),), epochs=1)),
            "inside Interleaved cannot have noise",
        ),
    ],
)
def test_what_the_engine_could_not_carry_out_is_refused(method: Any, words: str) -> None:
    with pytest.raises(qv.QuiverError, match=words):
        simulate(method, REGULAR(CLIENTS))


def test_a_refused_function_leaves_the_states_as_they_were() -> None:
    """The trial is on a copy: nothing that belongs to the run has changed when it is refused."""
    shrinking = with_phases(qv.Once(shrinks_in_place))
    settings = qv.RunSettings(rounds=1, dtype=torch.float64)
    shard = Shard(tiny_task(), tiny_data(), shrinking, TRAINING, settings)
    before = [leaf.clone() for leaf in shard.state]
    with pytest.raises(qv.QuiverError, match="in place"):
        shard.train(0, np.ones(CLIENTS, dtype=bool))
    assert all(torch.equal(a, b) for a, b in zip(before, shard.state, strict=True))


class ServerMomentum(NamedTuple):
    u: qv.Shared
    v: qv.Personal
    x_u: qv.Replicated[qv.Shared]


def momentum_from(start_of: Any) -> Any:
    def init(self: Any, task: qv.Task, start: qv.Start) -> ServerMomentum:
        return ServerMomentum(*start.point, start_of(start))

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
            "personal": lambda self, state: qv.Point(state.u, state.v),
        },
    )()


def test_server_state_is_the_same_everywhere_or_refused() -> None:
    """Clients that start apart would keep different copies of a server for ever."""
    common = momentum_from(lambda start: start.common.shared.clone())
    run = simulate(common, STAR(CLIENTS), common_init=False)
    copies = [run.state(client)["x_u"] for client in range(CLIENTS)]
    for other in copies[1:]:
        assert all(torch.equal(copies[0][name], other[name]) for name in other)
    own = momentum_from(lambda start: start.point.shared.clone())
    simulate(own, STAR(CLIENTS))  # all start from the same point
    with pytest.raises(qv.QuiverError, match=r"'x_u' is declared Replicated.*start.common"):
        simulate(own, STAR(CLIENTS), common_init=False)
    counted = momentum_from(lambda start: start.common.shared * start.samples)
    with pytest.raises(qv.QuiverError, match="'x_u' is declared Replicated"):
        simulate(counted, STAR(CLIENTS))
    with pytest.warns(QuiverWarning, match=r"merge makes it different.*topology = .star."):
        simulate(common, REGULAR(CLIENTS))


def test_a_lone_client_is_refused_server_state_of_its_own() -> None:
    """A peer or a rank with one client has nobody to compare with."""
    own = momentum_from(lambda start: start.point.shared.clone())
    settings = qv.RunSettings(rounds=1, dtype=torch.float64, common_init=False)
    with pytest.raises(qv.QuiverError, match="'x_u' is declared Replicated"):
        Shard(tiny_task(), tiny_data().only([3]), own, TRAINING, settings, clients=[3])


@pytest.mark.parametrize("executor", ["vectorized", "sequential"])
def test_a_loss_of_ones_own_needs_no_features(executor: str) -> None:
    """The task's own loss, written by an author, trains to the same bits."""

    def of(seen: qv.Seen, y: Tensor, state: Weights, taught: Any) -> Tensor:
        return functional.cross_entropy(seen.outputs, y, reduction="none")

    def mean(seen: qv.Seen, y: Tensor, state: Weights, taught: Any) -> Tensor:
        return functional.cross_entropy(seen.outputs, y)

    plain = simulate(with_phases(Alone().train(epochs=1)), REGULAR(CLIENTS), executor=executor)
    own = with_phases(Alone().train(epochs=1, loss=qv.Loss(of)))
    same = simulate(own, REGULAR(CLIENTS), executor=executor)
    for one, other in zip(states(plain), states(same), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    for features in (False, True):
        scalar = with_phases(Alone().train(epochs=1, loss=qv.Loss(mean, features=features)))
        with pytest.raises(
            qv.QuiverError, match=r"gave \(\) for \d samples.*one number per sample"
        ):
            simulate(scalar, REGULAR(CLIENTS), executor=executor)


def test_a_rate_of_ones_own_in_every_phase_is_refused() -> None:
    fixed = Alone().train(epochs=1, settings=lambda t: replace(t, lr=0.05))
    scaled = Alone().train(epochs=1, settings=lambda t: replace(t, lr=0.5 * t.lr))
    with pytest.raises(qv.QuiverError, match=r"training.lr would change nothing.*unused"):
        simulate(with_phases(fixed), REGULAR(CLIENTS))
    simulate(with_phases(scaled), REGULAR(CLIENTS))
    simulate(with_phases(fixed, scaled), REGULAR(CLIENTS))
    declared = type("Declared", (type(with_phases(fixed)),), {"unused": ("lr",)})()
    simulate(declared, REGULAR(CLIENTS))


def test_a_method_without_one_of_its_functions_is_refused() -> None:
    class Half(qv.Method[Weights]):
        name, title, topology = "half", "Half", "random_regular"

    with pytest.raises(qv.QuiverError, match="Half has no function 'init'"):
        simulate(Half(), REGULAR(CLIENTS))


class Answers(NamedTuple):
    body: Tensor
    classifier: Tensor


def test_a_state_without_a_shared_field_has_no_consensus_distance(tmp_path: Path) -> None:
    def phases(self: Any, task: qv.Task) -> Any:
        train = self.train(epochs=1)
        return (replace(train, absorb=lambda state, trained: Answers(*trained[:2])),)

    bare = anything(init=lambda self, task, start: Answers(*start.point), phases=phases)
    run = simulate(bare, REGULAR(CLIENTS))
    assert run.rounds["consensus"].isna().all()
    page = qv.report([run], tmp_path / "report.html").read_text()
    assert "No consensus distance" in page
    assert "declared Shared: Alone." in page


def test_types_that_cannot_be_read_are_refused() -> None:
    class Inner(NamedTuple):
        body: Local  # type: ignore[name-defined]  # noqa: F821
        classifier: qv.Personal

    odd = anything(init=lambda self, task, start: Inner(*start.point))
    with pytest.raises(qv.QuiverError, match="Inner: the types of its fields cannot be read"):
        simulate(odd, REGULAR(CLIENTS))


def test_an_object_that_declares_too_little_is_refused() -> None:
    class Bare:
        name = "bare"

    with pytest.raises(qv.QuiverError, match=r"Bare declares no 'title'.*inherits quiverfl.Method"):
        simulate(Bare(), REGULAR(CLIENTS))


@pytest.mark.parametrize("method", [qv.PFedMe(), qv.PushDIGing()])
def test_unequal_epochs_are_refused_where_nothing_counts_epochs(method: Any) -> None:
    topology = STAR(CLIENTS) if method.mass is None else qv.random_push(CLIENTS, 2)
    with pytest.raises(qv.QuiverError, match="epochs_per_client"):
        simulate(method, topology, epochs_per_client=[1] * CLIENTS)


def test_a_delay_on_a_star_is_refused_and_on_a_full_graph_is_that_of_its_matrix() -> None:
    with pytest.raises(qv.QuiverError, match=r"delay = 1 needs a graph on which every client"):
        simulate(qv.OSGP(epochs=1, delay=1), STAR(CLIENTS))
    full = qv.full(clients=CLIENTS)
    rows = qv.Topology.fixed("rows", qv.Graph(full(0).sparse, full(0).active))
    folded, whole = (simulate(qv.OSGP(epochs=1, delay=1), t, rounds=4) for t in (full, rows))
    for one, other in zip(states(folded), states(whole), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_options_outside_their_type_are_named() -> None:
    for make, words in [
        (lambda: qv.APFL(alpha=1.5), r"method.alpha = 1.5: it must be a number in \[0, 1\]"),
        (lambda: qv.APFL(adaptive=1), "method.adaptive = 1: it must be true or false"),
        (lambda: qv.PFedMe(inner_steps=0), "method.inner_steps = 0: .* whole number ≥ 1"),
        (lambda: qv.FedAvg(weighting="sample"), "did you mean 'samples'"),
        (lambda: qv.DFedPGP(step_floor=-1), "must be a positive number, or left out"),
        (lambda: qv.DFedPGP(shared_epochs=True), "must be a whole number"),
    ]:
        with pytest.raises(qv.QuiverError, match=words):
            make()


# --- the head on features computed once ---------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Clamped(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).clamp(-0.1, 0.1)


class ClampedInPlace(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).clamp_(-0.1, 0.1)


class ReadsHead(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x) * self.head.weight.mean())


class ReadsHeadUnseen(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x) * self.head.weight.detach().mean())


class Keyword(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(input=self.body(x))


class TwoArguments(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Bilinear(5, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x), self.body(x))


class Twice(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)) + self.head(self.body(-x))


class ChangedAfterwards(Plain):
    def forward(self, x: Tensor) -> Tensor:
        outputs = self.head(self.body(x))
        outputs.clamp_(-0.1, 0.1)
        return outputs


class Tied(Plain):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.head = nn.Linear(5, 5)
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), self.head)


@pytest.mark.parametrize("executor", ["vectorized", "sequential"])
@pytest.mark.parametrize(
    "model",
    [
        Plain,
        Clamped,
        ClampedInPlace,
        ChangedAfterwards,
        ReadsHead,
        ReadsHeadUnseen,
        Keyword,
        TwoArguments,
        Twice,
        Tied,
    ],
)
@pytest.mark.parametrize("method", [qv.DFedPGP(personal_epochs=3), qv.FedRep(4, 1)], ids=str)
def test_a_head_is_trained_as_if_no_features_were_kept(
    method: Any, model: Any, executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = STAR(CLIENTS) if method.mass is None else qv.random_push(CLIENTS, 2)

    def run() -> list[Tensor]:
        found = qv.simulate(
            qv.Task(model),
            tiny_data(),
            method=method,
            topology=topology,
            training=TRAINING,
            rounds=2,
            dtype=torch.float64,
            executor=executor,
            threads=1,
        )
        proven.append(found._shard.trainer._head_is_last)
        return states(found)

    proven: list[bool | None] = []
    shortened = run()
    monkeypatch.setattr("quiverfl.engine.trainer.head_is_last", lambda *_: False)
    plain = run()
    assert proven == [model is Plain, False]
    for one, other in zip(shortened, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


class Branching(Plain):
    """Clamped for some inputs only: no call shows it, and no graph can be made of it."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.head(self.body(x))
        return outputs.clamp(-0.1, 0.1) if float(x.abs().max()) > 2 else outputs


class Deep(Plain):
    """A head of several layers is a head all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("model", "proven"), [(Plain, True), (Deep, True), (Branching, False), (Tied, False)]
)
def test_the_graph_of_the_call_is_the_proof(model: Any, proven: bool) -> None:
    assert head_is_last(model(), "head") is proven
    assert not head_is_last(model(), None)


def test_the_packages_models_have_proof() -> None:
    for name in MODELS:
        assert head_is_last(make_model(name, (3, 32, 32), 10), "head"), name


# --- frozen parameters and impure models --------------------------------------------------------


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.body[0].weight.requires_grad_(False)


@pytest.mark.parametrize("executor", ["vectorized", "sequential"])
def test_a_frozen_parameter_stays_is_not_sent_and_is_kept_once(executor: Any) -> None:
    task = qv.Task(Frozen)
    assert task.shared_layout.names == ("body.0.bias",)
    run = qv.simulate(
        task,
        tiny_data(),
        method=qv.DFedPGP(),
        topology=qv.random_push(CLIENTS, 2),
        training=TRAINING,
        rounds=3,
        seed=5,
        executor=executor,
    )
    frozen = task.skeleton.body[0].weight
    for client in range(CLIENTS):
        model: Any = run.personal(client)
        assert torch.equal(model.body[0].weight, frozen)
        assert not torch.equal(model.body[0].bias, task.skeleton.body[0].bias)
    assert int(run.rounds["network_bytes"].iloc[0]) == CLIENTS * 2 * (5 * 4 + 8)
    x = torch.randn(4, 6)
    program = run._shard.context.program()
    point = run._shard.model(0, "mixed")
    seen = program.call(program.named(point), x, features=False)
    torch.testing.assert_close(seen.outputs, run.personal(0)(x))


def test_a_model_with_nothing_to_train_is_refused() -> None:
    class Ice(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)

    class IceHead(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.head.requires_grad_(False)

    with pytest.raises(qv.QuiverError, match=r"every parameter .* requires_grad=False"):
        qv.Task(Ice)
    with pytest.raises(qv.QuiverError, match="'head' matches frozen parameters only"):
        qv.Task(IceHead)


class Dropping(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(self.body(x), 0.5))


class Noisy(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x + torch.randn_like(x)))


class Choosing(Plain):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return self.head(hidden[:, torch.randperm(5)] if self.training else hidden)


class Mixing(Plain):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return self.head(hidden - hidden.mean(dim=0))


class Remembering(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(dim=0)
        return self.head(hidden - self.mean)


class Talking(Plain):
    def forward(self, x: Tensor) -> Any:
        return str(self.head(self.body(x)))


class Scoring(Plain):
    def forward(self, x: Tensor) -> Any:
        logits = self.head(self.body(x))
        return {"logits": logits, "score": logits.sum()}


@pytest.mark.parametrize("executor", ["auto", "sequential"])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Dropping, "draws random numbers in evaluation.*training=self.training"),
        (Noisy, "draws random numbers in evaluation"),
        (Choosing, "draws random numbers with randperm"),
        (Mixing, "depends on the other samples of the batch"),
        (Remembering, "changes its buffer 'mean' in forward"),
        (Talking, "returns a str; it must return a tensor"),
        (Scoring, r"output 'score' has shape \(\) for 2 samples"),
    ],
)
def test_a_model_that_is_no_function_of_its_parameters_is_refused(
    model: Any, words: str, executor: Any
) -> None:
    before = torch.random.get_rng_state()
    with pytest.raises(qv.QuiverError, match=words):
        qv.simulate(
            qv.Task(model),
            tiny_data(),
            method=qv.DFedAvgM(),
            topology=REGULAR(CLIENTS),
            training=TRAINING,
            rounds=1,
            executor=executor,
        )
    assert torch.equal(torch.random.get_rng_state(), before)


# --- gradients elsewhere, losses of the method's own --------------------------------------------


def test_interleaved_phases_see_what_the_one_before_left() -> None:
    """Training head and body in turns on every batch is not training one after the other."""
    body = replace(train_whole(None), part="shared")  # type: ignore[arg-type]
    body = replace(body, absorb=lambda state, trained: state._replace(u=trained.shared))
    head = replace(train_personal(None), sent=True)  # type: ignore[arg-type]

    class Turns(qv.DFedAvgM):
        name, title = "turns", "Turns"

        def phases(self, task: qv.Task) -> Any:
            return (qv.Interleaved((head, body), epochs=1),)

    run = simulate(Turns(), qv.isolated(clients=CLIENTS), rounds=1, training=PLAIN)
    start = simulate(Turns(), qv.isolated(clients=CLIENTS), rounds=0)
    data = tiny_data()
    order = qv.batch_order(0, 2, 0, 0, 0, 11)
    model: Any = start.personal(2)
    x, y = data.train.of(2)
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


PLAIN = qv.Training(lr=0.1, personal_lr=0.05, batch_size=4)


def test_features_are_asked_for_where_there_is_no_head() -> None:
    with pytest.raises(qv.QuiverError, match="name one submodule as personal"):
        qv.simulate(
            qv.Task(Plain, personal=()),
            tiny_data(),
            method=qv.MOON(),
            topology=STAR(CLIENTS),
            training=TRAINING,
            rounds=1,
        )


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
