"""`qv.check_method`: a method that breaks a law is reported with that law's sentence."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import quiverfl as qv
from authored import Alone, Weights, anything, with_phases
from quiverfl.cli.main import app
from quiverfl.engine.shard import Shard
from quiverfl.laws.check import LAWS
from quiverfl.laws.problem import TRAINING, Case, tiny_data, tiny_task
from quiverfl.laws.round_laws import identity_mixing, inactive_clients
from quiverfl.topologies import Topology
from small import CLIENTS, REGULAR, STAR

from .test_add_a_method import block, example

OTHERS = {law.number for law in LAWS}


class AlaState(NamedTuple):
    trained: qv.Shared
    blend: qv.Shared
    v: qv.Personal


@dataclass(frozen=True)
class Ala(qv.Method[AlaState]):
    """Blends its trained model with the neighbours', element by element, as FedALA does."""

    right: bool = False

    name, title, topology = "ala", "ALA", "random_regular"

    def init(self, task: qv.Task, start: qv.Start) -> AlaState:
        return AlaState(start.params.shared, start.params.shared.clone(), start.params.personal)

    def phases(self, task: qv.Task) -> tuple[qv.Train[AlaState], ...]:
        return (
            qv.Train(
                part="whole",
                epochs=1,
                params=lambda state: qv.Params(state.blend, state.v),
                update=self._update,
            ),
        )

    def _update(self, state: AlaState, trained: Any) -> AlaState:
        blend = trained.shared if self.right else state.blend
        return AlaState(trained.shared, blend, trained.personal)

    def message(self, state: AlaState) -> qv.Message:
        return {"u": state.trained.clone()}

    def merge(self, state: AlaState, mixed: qv.Message) -> AlaState:
        own = state.trained
        weights = torch.sigmoid(own)  # any number in (0, 1) for every element
        return state._replace(blend=own + weights * (mixed["u"] - own))

    def personal(self, state: AlaState) -> qv.Params:
        """The blend: what merge left, and so stale right after training unless it is right."""
        return qv.Params(state.blend, state.v)


@dataclass(frozen=True)
class Remembers(Alone):
    """Counts how often its functions are called, on itself and not in its state."""

    calls: list[int] = field(default_factory=lambda: [0])

    def call(self) -> float:
        self.calls[0] += 1
        return 0.01 * self.calls[0]


class CountsPersonal(Remembers):
    def personal(self, state: Weights) -> qv.Params:
        self.call()
        return qv.Params(state.body, state.classifier)

    def merge(self, state: Weights, mixed: qv.Message) -> Weights:
        return state._replace(body=mixed["body"] * (1 - 1e-3 * self.calls[0]))


class CountsTraining(Remembers):
    def phases(self, task: qv.Task) -> tuple[qv.methods.Phase[Weights], ...]:
        return (qv.Train(part="whole", epochs=1, params=self.personal, update=self._counting),)

    def _counting(self, state: Weights, trained: Any) -> Weights:
        return Weights(trained.shared * (1 + self.call()), trained.personal)


class ShowsTraining(CountsTraining):
    def _counting(self, state: Weights, trained: Any) -> Weights:
        self.call()
        return Weights(trained.shared, trained.personal)

    def personal(self, state: Weights) -> qv.Params:
        return qv.Params(state.body * (1 + 0.01 * self.calls[0]), state.classifier)


class CountsMerges(Remembers):
    def merge(self, state: Weights, mixed: qv.Message) -> Weights:
        return state._replace(body=mixed["body"] * (1 - self.call()))


class CountsStarts(Remembers):
    def init(self, task: qv.Task, start: qv.Start) -> Weights:
        return Weights(start.params.shared + self.call(), start.params.personal)


class UnseededStart(Alone):
    def init(self, task: qv.Task, start: qv.Start) -> Weights:
        noise = torch.from_numpy(np.random.default_rng().normal(size=len(start.params.shared)))
        return Weights(start.params.shared + noise, start.params.personal)


class Counted(NamedTuple):
    body: qv.Shared
    classifier: qv.Personal
    n: qv.Scalar


@dataclass(frozen=True)
class OwnCount(Alone):
    """Divides a mean weighted by sample counts by its own count."""

    def init(self, task: qv.Task, start: qv.Start) -> Any:
        return Counted(*start.params, start.params.shared.new_tensor(float(start.samples)))

    def phases(self, task: qv.Task) -> Any:
        def update(state: Any, trained: Any) -> Any:
            return state._replace(body=trained.shared, classifier=trained.personal)

        return (qv.Train(part="whole", epochs=1, params=self.personal, update=update),)

    def message(self, state: Any) -> qv.Message:
        return {"body": state.n * state.body}

    def merge(self, state: Any, mixed: qv.Message) -> Any:
        return state._replace(body=mixed["body"] / state.n)


class Pushed(NamedTuple):
    body: qv.Shared
    classifier: qv.Personal
    mu: qv.Scalar


@dataclass(frozen=True)
class Push(OwnCount):
    """Push-sum. `fault` says what merge does with what arrived."""

    fault: str = ""
    mass = "mu"
    topology = "random_push"

    def init(self, task: qv.Task, start: qv.Start) -> Any:
        return Pushed(*start.params, torch.ones((), dtype=torch.float64))

    def phases(self, task: qv.Task) -> Any:
        def update(state: Any, trained: Any) -> Any:
            body = trained.shared * state.mu.to(trained.shared.dtype)
            return state._replace(body=body, classifier=trained.personal)

        return (qv.Train(part="whole", epochs=1, params=self.personal, update=update),)

    def message(self, state: Any) -> qv.Message:
        return {"body": state.body, "mu": state.mu}

    def merge(self, state: Any, mixed: qv.Message) -> Any:
        body, mu = mixed["body"], mixed["mu"]
        if self.fault == "de-biased":
            body, mu = body / mu, mu
        if self.fault == "doubled":
            mu = 2 * mu
        return state._replace(body=body, mu=mu)

    def personal(self, state: Any) -> qv.Params:
        return qv.Params(state.body / state.mu.to(state.body.dtype), state.classifier)


def head_phase(**changed: Any) -> Any:
    """Trains the classifier; the body should stand still."""
    return qv.Train(
        part="personal",
        epochs=1,
        params=lambda state: qv.Params(state.body, state.classifier),
        update=lambda state, trained: Weights(
            changed.get("body", 1.0) * state.body,
            trained.personal if changed.get("absorbs", True) else state.classifier,
        ),
    )


def uphill(gradient: qv.Params, point: qv.Params, state: Weights) -> qv.Params:
    return qv.Params(-gradient.shared, -gradient.personal)


def nowhere(gradient: qv.Params, point: qv.Params, state: Weights) -> qv.Params:
    return qv.Params(0 * gradient.shared, 0 * gradient.personal)


WHOLE = Alone().train(epochs=1)
HALVED = anything(
    message=lambda self, state: {"body": state.body.half()},
    merge=lambda self, state, mixed: state._replace(body=mixed["body"].to(torch.float64)),
)

BREAKS: list[tuple[str, Any, int, str]] = [
    ("stale personal", Ala(), 1, r"receives its own message .* its shared part differs by "),
    (
        "shrinking",
        anything(merge=lambda self, state, mixed: state._replace(body=0.9 * mixed["body"])),
        1,
        "personal is called at both moments and must be right at both",
    ),
    ("own count", OwnCount(), 2, "mixing should leave every model as it is; after round 1 the sh"),
    (
        "order",
        CountsStarts(),
        3,
        "should not depend on where the client stands.*field '.*' differs",
    ),
    ("doubled mass", Push(fault="doubled"), 4, "mass 'mu' .* should stay 6 in sum; .* it is 12"),
    ("de-biased", Push(fault="de-biased"), 4, "leaf 'body', summed .* merge must keep what push"),
    ("moved body", with_phases(head_phase(body=0.99), WHOLE), 5, "phase 0 .*; 'body' changed"),
    ("nothing kept", with_phases(head_phase(absorbs=False), WHOLE), 5, "no field changed"),
    ("looks", CountsPersonal(), 6, "evaluated in every round ends elsewhere .* field 'body'"),
    ("uphill", with_phases(Alone().train(epochs=1, gradient=uphill)), 7, "the loss should fall fr"),
    (
        "nowhere",
        with_phases(Alone().train(epochs=1, gradient=nowhere)),
        7,
        r"; it is .* at stage l",
    ),
    ("others train", ShowsTraining(), 8, "should keep their model; the shared part that personal"),
    ("two bytes", HALVED, 9, "numbers of 4 or 8 bytes .* leaf 'body' is torch.float16"),
    (
        "understated",
        anything(payload=lambda self, message: torch.tensor(1)),
        9,
        r"in the bytes that payload counts, 1, .*; it takes \d\d+",
    ),
    (
        "merges",
        CountsMerges(),
        10,
        "interrupted after two of four .*same bits; field 'body'",
    ),
    ("groups", CountsTraining(), 11, "reach the numbers they reach one by one; .* field 'body'"),
    ("starts", CountsStarts(), 12, "clients in 2 places should reach the states they reach"),
    ("unseeded", UnseededStart(), 13, "the same seed should give the same run; field 'body' dif"),
]


@pytest.mark.parametrize(
    ("method", "number", "words"),
    [pytest.param(*case, id=f"{case[1]} {name}") for name, *case in BREAKS],
)
def test_a_broken_law_is_reported_with_its_sentence(method: Any, number: int, words: str) -> None:
    check = qv.check_method(method, skip=OTHERS - {number})
    assert [one.number for one in check.broken_laws] == [number]
    assert re.search(words, check.broken_laws[0].sentence), check
    assert f"law {number}, " in str(check)


def test_every_law_has_a_method_that_breaks_it() -> None:
    assert {number for _, _, number, _ in BREAKS} == OTHERS


@pytest.mark.parametrize("method", [Alone(), Ala(right=True), Push(), example()(epochs=2)], ids=str)
def test_a_lawful_method_breaks_none(method: Any) -> None:
    check = qv.check_method(method)
    assert check.broken_laws == ()
    assert [one.verdict for one in check.verdicts] == ["kept"] * len(LAWS)


def test_what_a_method_remembers_outside_of_its_state_breaks_no_law_on_looking_again() -> None:
    """Every run starts with a copy of the method, so a mistake is named for what it is."""
    method = CountsPersonal()
    assert [one.number for one in qv.check_method(method, skip=OTHERS - {6, 13}).broken_laws] == [6]
    assert method.calls == [0]


class MomentumState(NamedTuple):
    u: qv.Shared
    v: qv.Personal
    x: qv.Replicated[qv.Shared]
    m: qv.Replicated[qv.Shared]


class ServerMomentum(Alone):
    """A server that moves by itself."""

    topology = "star"

    def init(self, task: qv.Task, start: qv.Start) -> Any:
        common = start.common_params.shared
        return MomentumState(*start.params, common.clone(), torch.zeros_like(common))

    def phases(self, task: qv.Task) -> Any:
        def update(state: Any, trained: Any) -> Any:
            return state._replace(u=trained.shared, v=trained.personal)

        return (qv.Train(part="whole", epochs=1, params=self.personal, update=update),)

    def message(self, state: Any) -> qv.Message:
        return {"u": state.u}

    def merge(self, state: Any, mixed: qv.Message) -> Any:
        m = 0.5 * state.m + mixed["u"] - state.x
        return state._replace(u=state.x + m, x=state.x + m, m=m)

    def personal(self, state: Any) -> qv.Params:
        return qv.Params(state.u, state.v)


def test_server_state_may_move_by_itself() -> None:
    assert qv.check_method(ServerMomentum()).lawful
    case = Case(ServerMomentum(), STAR(CLIENTS), TRAINING)
    assert "a second time" in str(identity_mixing(case, whole=True))


def test_training_of_clients_that_are_away_is_seen() -> None:
    """No method can do that by its functions alone: the fault is in the shard."""

    class TrainsAll(Shard):
        def train(self, round: int, active: Any, share: float | None = None) -> None:
            super().train(round, np.ones_like(active), share)

    class Faulty(Case):
        def shard(self, clients: Any = None) -> Shard:
            settings = qv.RunSettings(rounds=1, dtype=torch.float64)
            return TrainsAll(tiny_task(), tiny_data(), self.method, TRAINING, settings)

    topology: Topology = REGULAR(CLIENTS)
    assert inactive_clients(Case(Alone(), topology)) is None
    assert "their field 'body' changed" in str(inactive_clients(Faulty(Alone(), topology)))


def test_what_could_not_run_is_refused_with_the_sentence_of_a_run() -> None:
    with pytest.raises(qv.QuiverError, match="give a method object"):
        qv.check_method(Alone)  # type: ignore[arg-type]
    with pytest.raises(qv.QuiverError, match="did you mean 'merge'"):
        qv.check_method(anything(mrege=None))
    with pytest.raises(qv.QuiverError, match=r"skip = \[14\]: laws are numbered from 1 to 13"):
        qv.check_method(Alone(), skip=[14])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lawful.py").write_text(block())
    shrinks = block().replace('ProxState(mixed["u"]', 'ProxState(0.9 * mixed["u"]')
    assert shrinks != block()
    (tmp_path / "unlawful.py").write_text(shrinks)
    importlib.invalidate_caches()
    return tmp_path


def quiver(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "300"})


def test_the_command_ends_with_1_and_says_what_is_broken(here: Path) -> None:
    kept = quiver("check", "lawful:DFedProx", "--set", "epochs=2", "--set", "method.proximal=0.5")
    assert kept.exit_code == 0, kept.output
    assert "DFedProx: 13 of 13 laws kept." in kept.output
    skip = [word for n in sorted(OTHERS - {1, 9}) for word in ("--skip", str(n))]
    broken = quiver("check", "unlawful:DFedProx", *skip)
    assert broken.exit_code == 1, broken.output
    assert "DFedProx: 1 of 2 laws kept." in broken.output
    assert "law 1, identity mixing leaves the model in use as it is: where every" in broken.output


def test_the_command_gives_json(here: Path) -> None:
    skip = [word for n in sorted(OTHERS - {1}) for word in ("--skip", str(n))]
    said = quiver("check", "unlawful:DFedProx", "--json", *skip)
    assert said.exit_code == 1
    verdicts = json.loads(said.stdout)
    assert [v["verdict"] for v in verdicts] == ["broken"] + ["skipped"] * 12
    assert verdicts[0]["graphs"] == ["random_regular"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lawful:DFedPrix"], "did you mean 'DFedProx'"),
        (["lawful:DFedProx", "--set", "epoch=2"], "did you mean 'epochs'"),
        (["lawful:DFedProx", "--set", "epochs=-1"], "method.epochs = -1"),
        (["lawful:DFedProx", "--set", "epochs"], "--set 'epochs': write option=value"),
        (["lawful:DFedProx", "--set", "training.lr=1"], "'training.lr': .* options of the method"),
    ],
)
def test_what_the_command_cannot_take_is_named(here: Path, words: list[str], message: str) -> None:
    said = quiver("check", *words)
    assert isinstance(said.exception, qv.QuiverError)
    assert re.search(message, str(said.exception)), said.exception


def test_a_name_of_an_own_helper_is_refused_with_the_way_out() -> None:
    with pytest.raises(qv.QuiverError, match=r"'personal_now'.*a helper .*'_personal_now'"):
        qv.check_method(anything(personal_now=lambda self, state: state))
    assert qv.check_method(anything(_personal_now=lambda self: 0), skip=OTHERS - {1}).lawful
