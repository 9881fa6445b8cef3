"""What the engine could not carry out for a method is refused, with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

import quiverfl as qv
from authored import Alone, Weights, anything, with_phases
from quiverfl.engine.checks.functions import check_functions
from quiverfl.engine.checks.probe import ModelProbe
from quiverfl.engine.shard import Shard
from small import CLIENTS, REGULAR, STAR, TRAINING, simulate, states, tiny_data, tiny_task


def test_a_learning_rate_that_nobody_reads_is_refused() -> None:
    def descend(state: Weights, moment: qv.StepInfo) -> Weights:
        assert moment.gradient is not None
        return state._replace(body=state.body - 0.1 * moment.gradient.shared)

    with pytest.raises(qv.QuiverError, match=r"training\.lr would change nothing"):
        simulate(with_phases(qv.SingleStep(descend, needs_gradient=True)), REGULAR(CLIENTS))


def test_a_step_that_branches_is_refused_or_done_one_by_one() -> None:
    def branch(state: Weights, moment: qv.StepInfo) -> Weights:
        return state if state.body.sum() > 0 else state._replace(body=-state.body)

    def where(state: Weights, moment: qv.StepInfo) -> Weights:
        return state._replace(body=torch.where(state.body.sum() > 0, state.body, -state.body))

    with pytest.raises(qv.QuiverError, match="sequential=True"):
        simulate(with_phases(qv.SingleStep(branch)), REGULAR(CLIENTS))
    slow = simulate(with_phases(qv.SingleStep(branch, sequential=True)), REGULAR(CLIENTS))
    fast = simulate(with_phases(qv.SingleStep(where)), REGULAR(CLIENTS))
    assert all(torch.equal(a, b) for a, b in zip(states(slow), states(fast), strict=True))


def reads_what_it_sent(self: Any, state: Weights, mixed: qv.Message) -> Weights:
    return state._replace(body=0.5 * state.body + 0.5 * mixed["body"])


def steep(gradient: qv.Params, point: qv.Params, state: Weights) -> qv.Params:
    return point if gradient.shared.sum() > 0 else gradient


def absorbs_in_place(state: Weights, trained: qv.methods.Trained) -> Weights:
    state.body.copy_(trained.shared)
    return Weights(state.body, trained.personal)


def pulls_in_place(gradient: qv.Params, point: qv.Params, state: Weights) -> qv.Params:
    gradient.shared.add_(point.shared)
    return gradient


def shrinks_in_place(state: Weights, moment: qv.StepInfo) -> Weights:
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
        (anything(init=lambda self, task, start: tuple(start.params)), "a state is a NamedTuple"),
        (
            anything(init=lambda self, task, start: Weights(1.0, start.params.personal)),
            "is a float",
        ),
        (anything(init=lambda self, task, start: Wrong(*start.params)), "declared Scalar"),
        (anything(mass="mu"), "no Scalar field of that name; it has: body, classifier"),
        (
            anything(init=lambda self, task, start: Counts(*start.params, torch.tensor(3))),
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
            anything(init=lambda self, task, start: Weights(*(p.mul_(2) for p in start.params))),
            "init changes start.params or start.common_params in place",
        ),
        (
            anything(personal=lambda self, state: qv.Params(state.body.mul_(0.5), state[1])),
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
            with_phases(replace(Alone().train(epochs=1), update=absorbs_in_place)),
            "absorbs_in_place changes 'body' of the Weights it is given in place",
        ),
        (
            with_phases(Alone().train(epochs=1, gradient=pulls_in_place)),
            "pulls_in_place changes 'shared' of the Params it is given in place",
        ),
        (
            with_phases(Alone().train(epochs=1), qv.SingleStep(shrinks_in_place)),
            "shrinks_in_place changes 'classifier' of the Weights it is given in place",
        ),
        (
            with_phases(Alone().train(epochs=1), qv.SingleStep(shrinks_in_place, sequential=True)),
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
            r"steep failed in test_refused_methods.py, line \d+: .*no if on a value",
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
            with_phases(
                qv.Interleaved((qv.SingleStep(lambda s, _: s, needs_noise=True),), epochs=1)
            ),
            "inside Interleaved cannot have needs_noise",
        ),
    ],
)
def test_what_the_engine_could_not_carry_out_is_refused(method: Any, words: str) -> None:
    with pytest.raises(qv.QuiverError, match=words):
        simulate(method, REGULAR(CLIENTS))


def test_a_refused_function_leaves_the_states_as_they_were() -> None:
    """The trial is on a copy: nothing that belongs to the run has changed when it is refused."""
    shrinking = with_phases(qv.SingleStep(shrinks_in_place))
    settings = qv.RunSettings(rounds=1, dtype=torch.float64)
    shard = Shard(tiny_task(), tiny_data(), shrinking, TRAINING, settings)
    before = [leaf.clone() for leaf in shard.state]
    probe = ModelProbe.from_data(tiny_task(), tiny_data(), torch.float64)
    with pytest.raises(qv.QuiverError, match="in place"):
        check_functions(shrinking, tiny_task(), probe, TRAINING, alike=True)
    assert all(torch.equal(a, b) for a, b in zip(before, shard.state, strict=True))


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


def test_types_that_cannot_be_read_are_refused() -> None:
    class Inner(NamedTuple):
        body: Local  # type: ignore[name-defined]  # noqa: F821
        classifier: qv.Personal

    odd = anything(init=lambda self, task, start: Inner(*start.params))
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


def test_keywords_of_earlier_versions_are_refused_with_the_new_name() -> None:
    train: Any = qv.Train
    with pytest.raises(qv.QuiverError, match=r"Train\(point=…\): .* Train\(params=…\)"):
        train(part="whole", epochs=1, point=Alone().personal, update=lambda state, _: state)
    with pytest.raises(qv.QuiverError, match=r"Train\(absorb=…\): .* Train\(update=…\)"):
        train(part="whole", epochs=1, params=Alone().personal, absorb=lambda state, _: state)
    for kind, old, new in (
        (qv.Lookahead, "to", "gradient_at"),
        (qv.Loss, "of", "function"),
        (qv.SingleStep, "one_by_one", "sequential"),
        (qv.Interleaved, "sent", "trains_message"),
        (qv.custom, "looks", "reports"),
    ):
        owner: Any = kind
        with pytest.raises(qv.QuiverError, match=rf"\({old}=…\): .*\({new}=…\)"):
            owner(**{old: None})


def test_attributes_of_earlier_versions_are_refused_with_the_new_name() -> None:
    info: Any = qv.StepInfo(0, 1, qv.Training(lr=0.5), 1.0)
    assert info.lr == 0.5
    with pytest.raises(AttributeError, match=r"StepInfo\.rate is now called lr"):
        _ = info.rate
    with pytest.raises(AttributeError, match="has no attribute 'speed'"):
        _ = info.speed
    training: Any = qv.Training()
    with pytest.raises(AttributeError, match=r"Training\.rate is now called lr_at"):
        training.rate(0)
    with pytest.raises(AttributeError, match=r"Trained\.reach is now called effective_lr_sum"):
        _ = qv.methods.Trained(*[torch.zeros(1)] * 6).reach  # type: ignore[attr-defined]
    for kind, old, new in (
        (qv.Topology, "fixed", "from_graph"),
        (qv.Devices, "drawn", "draw"),
        (qv.MethodCheck, "broken", "broken_laws"),
        (qv.SweepResult, "failed", "failures"),
    ):
        with pytest.raises(AttributeError, match=rf"{kind.__name__}\.{old} is now called {new}"):
            getattr(kind, old)
