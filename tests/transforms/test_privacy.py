"""Updates that are clipped and blurred, what they cost, and a budget that ends a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from opacus.accountants import RDPAccountant

import quiverfl as qv
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.local import gradients
from quiverfl.engine.local.examples import Batch
from quiverfl.engine.local.gradients import bind_samples
from quiverfl.engine.local.programs import Program, Vectorized
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.shard import Shard
from quiverfl.results.run_files import read_run
from quiverfl.runs.config import parse_config
from quiverfl.transforms.noise import Noise
from quiverfl.transforms.privacy import BudgetSpent, affordable, epsilon
from small import (
    AWAY,
    CLIENTS,
    METHODS,
    PUSH,
    REGULAR,
    TRAINING,
    simulate,
    states,
    tiny_data,
    tiny_task,
)

PRIVATE = qv.UpdatePrivacy(clip=0.5, noise=1.0)


@pytest.mark.parametrize(("noise", "releases"), [(1.0, 1), (4.0, 100), (0.8, 10)])
def test_the_accountant_is_that_of_the_library(noise: float, releases: int) -> None:
    """Opacus' own accountant, fed release by release; and the textbook's bound for any order.

    A Gaussian mechanism has Rényi divergence α/(2σ²), which gives ε = T/(2σ²) + √(2 T log(1/δ))/σ.
    """
    accountant = RDPAccountant()
    for _ in range(releases):
        accountant.step(noise_multiplier=noise, sample_rate=1.0)
    found = epsilon(releases, noise, 1e-5)
    assert found == pytest.approx(accountant.get_epsilon(delta=1e-5), rel=0.01)
    rho = releases / (2 * noise**2)
    assert found <= rho + 2 * math.sqrt(rho * math.log(1e5)) + 0.01
    assert found >= 0.7 * (rho + 2 * math.sqrt(rho * math.log(1e5)))


def test_nothing_released_costs_nothing_and_a_budget_pays_for_so_many() -> None:
    assert epsilon(0, 1.0, 1e-5) == 0
    most = affordable(10.0, 2.0, 1e-5)
    assert epsilon(most, 2.0, 1e-5) <= 10 < epsilon(most + 1, 2.0, 1e-5)
    assert affordable(0.01, 1.0, 1e-5) == 0


def test_an_update_is_clipped_over_all_leaves_together_and_blurred() -> None:
    """(3, 4) and (0, 12) have norm 13 together; with clip 6.5 half of each is left."""
    before = {"u": torch.tensor([[1.0, 1.0]]), "v": torch.tensor([[0.0, 0.0]])}
    sent = {"u": torch.tensor([[4.0, 5.0]]), "v": torch.tensor([[0.0, 12.0]])}
    sent["mu"] = torch.tensor([0.7])
    noise = Noise(0, "privacy", 0, np.array([3]))
    found = qv.UpdatePrivacy(clip=6.5, noise=1e-9).privatize(sent, before, "mu", noise)
    torch.testing.assert_close(found["u"], torch.tensor([[2.5, 3.0]]))
    torch.testing.assert_close(found["v"], torch.tensor([[0.0, 6.0]]))
    assert float(found["mu"]) == pytest.approx(0.7)
    small = qv.UpdatePrivacy(clip=20.0, noise=1e-9).privatize(sent, before, "mu", noise)
    torch.testing.assert_close(small["u"], sent["u"])
    wide = {"u": torch.zeros(2, 5000)}
    blurred = qv.UpdatePrivacy(clip=2.0, noise=3.0).privatize(
        wide, wide, None, Noise(0, "privacy", 0, np.array([3, 4]))
    )
    assert float(blurred["u"].std()) == pytest.approx(6.0, rel=0.03)


def test_releases_are_counted_client_by_client_and_resumed() -> None:
    kept: list[Checkpoint] = []
    options = {"rounds": 4, "privacy": PRIVATE}
    whole = simulate(
        qv.DFedPGP(), AWAY(CLIENTS), checkpoint=kept.append, checkpoint_every=1, **options
    )
    again = simulate(qv.DFedPGP(), AWAY(CLIENTS), resume=kept[1], **options)
    assert all(torch.equal(a, b) for a, b in zip(states(whole), states(again), strict=True))
    releases = np.zeros(CLIENTS, dtype=int)
    for t, record in enumerate(whole._history.records):
        weights = AWAY(CLIENTS)(t).weights
        releases += (
            (weights.sum(0) - weights.diagonal()) + (weights.sum(1) - weights.diagonal())
        ) > 0
        assert record["epsilon"] == [epsilon(int(n), 1.0, 1e-5) for n in releases]
    assert releases.min() < releases.max()
    assert whole.rounds["epsilon"].iloc[-1] == epsilon(int(releases.max()), 1.0, 1e-5)
    assert whole.summary["epsilon"] == whole.rounds["epsilon"].iloc[-1]
    assert again._history.records[-1]["epsilon"] == whole._history.records[-1]["epsilon"]


def test_what_a_client_learns_while_away_is_clipped_with_what_it_sends_later() -> None:
    """Over any number of rounds away, what it releases moves by the clipped update and the blur."""
    away = [
        qv.from_matrix(np.eye(2))(0),
        qv.from_matrix([[0.5, 0.5], [0.5, 0.5]])(0),
    ]
    topology = qv.custom(lambda t: away[min(t // 3, 1)].weights, clients=2)
    private = qv.UpdatePrivacy(clip=1e-3, noise=1e-9)
    data = qv.FederatedData.from_arrays(
        [(np.eye(6), np.arange(6) % 3)] * 2, [(np.eye(6), np.arange(6) % 3)] * 2, classes=3
    )
    run = qv.simulate(
        tiny_task(),
        data,
        method=qv.OSGP(epochs=3),
        topology=topology,
        training=TRAINING,
        rounds=4,
        seed=0,
        dtype=torch.float64,
        threads=1,
        privacy=private,
    )
    start = tiny_task().initial_params(0)
    moved = run._shard.state.u[0] - start.shared.double()
    assert 1e-9 < float(moved.norm()) <= 1.1e-3


def test_a_budget_ends_the_run_and_says_so(tmp_path: Path) -> None:
    budget = epsilon(2, 1.0, 1e-5) * 1.01
    with pytest.raises(BudgetSpent, match=r"round 2, client 0: .*epsilon_budget"):
        simulate(
            qv.DFedPGP(),
            PUSH(CLIENTS),
            rounds=4,
            privacy=qv.UpdatePrivacy(noise=1.0, epsilon_budget=budget),
        )


def test_the_folder_says_what_was_spent(tmp_path: Path) -> None:
    config = {
        "data": {"clients": 4},
        "run": {"rounds": 2},
        "topology": {"neighbors": 2},
        "privacy": {"name": "update", "clip": 1.0, "noise": 2.0},
    }
    run = qv.Experiment.of(config).run(tmp_path / "run")
    read = read_run(tmp_path / "run")
    assert float(read.rounds["epsilon"].iloc[-1]) == pytest.approx(epsilon(2, 2.0, 1e-5))
    assert run.summary["epsilon"] == pytest.approx(epsilon(2, 2.0, 1e-5))


CASES = list({method.name: (method, choices[0]) for method, choices in METHODS}.values())
ALLOWED = {"osgp", "dfedpgp", "dfedpgpsam", "dfedavgm", "dfedavgmp", "dfedsam", "pushdiging"}


@pytest.mark.parametrize(
    ("method", "graphs"),
    [
        pytest.param(*case, marks=() if case[0].name in ALLOWED else pytest.mark.slow)
        for case in CASES
    ],
    ids=[f"{m}" for m, _ in CASES],
)
def test_every_method_is_private_or_refused(method: Any, graphs: Any) -> None:
    if method.name in ALLOWED:
        run = simulate(method, graphs(CLIENTS), rounds=1, privacy=PRIVATE)
        assert run.summary["epsilon"] > 0
        return
    with pytest.raises(qv.QuiverError, match=r"Leave|leave"):
        simulate(method, graphs(CLIENTS), rounds=1, privacy=PRIVATE)


# Inside training.


def trained(private: Any, method: Any = None, **options: Any) -> Shard:
    settings = RunSettings(rounds=3, dtype=torch.float64, **options)
    method = method or qv.DFedAvgM(epochs=1)
    plain = qv.Training(lr=0.1, batch_size=4)
    shard = Shard(tiny_task(), tiny_data(), method, plain, settings, private=private)
    shard.train(0, np.ones(CLIENTS, dtype=bool))
    return shard


def test_samples_are_clipped_one_by_one() -> None:
    """Client 0 has five samples: a batch of four and one of one, computed by hand."""
    clip = 0.3
    shard = trained(qv.DPSGD(clip=clip, noise=1e-12))
    model = (
        tiny_task()
        .make_module(qv.Params(*(p.double() for p in tiny_task().initial_params(0))))
        .double()
    )
    parameters = [p.requires_grad_() for p in model.parameters()]
    x, y = tiny_data().train.of_client(0)
    order = qv.batch_order(0, client=0, round=0, phase=0, epoch=0, size=5)
    for batch in (order[:4], order[4:]):
        total = [torch.zeros_like(p) for p in parameters]
        for sample in batch:
            outputs = model(x[sample : sample + 1].double())
            loss = torch.nn.functional.cross_entropy(outputs, y[sample : sample + 1])
            grads = torch.autograd.grad(loss, parameters)
            norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
            for into, g in zip(total, grads, strict=True):
                into += g * min(1.0, clip / norm)
        with torch.no_grad():
            for p, into in zip(parameters, total, strict=True):
                p -= 0.1 * into / len(batch)
    expected = dict(model.named_parameters())
    found = tiny_task().named_params(qv.Params(shard.state.u[0], shard.state.v[0]))
    for name, leaf in found.items():
        torch.testing.assert_close(leaf, expected[name].detach(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("part", ["shared", "personal", "whole"])
def test_gradients_of_many_samples_are_those_of_one_after_the_other(part: Any) -> None:
    task, executor = tiny_task(), Vectorized()
    start = [torch.stack([p.double(), 2 * p.double()]) for p in task.initial_params(0)]
    program = Program.of(task, torch.float64, torch.device("cpu"))
    x = torch.randn(2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(14).view(2, 7) % 3
    one = executor.bind(program, qv.Params(*start), part)
    each = [Batch(2, x[:, s : s + 1], y[:, s : s + 1]) for s in range(7)]
    wanted = torch.stack([one(batch) for batch in each], dim=1)
    for features in (False, True):
        found = bind_samples(program, qv.Params(*start), part, None, features)(2, x, y)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("executor", ["vectorized", "sequential"])
def test_how_many_samples_are_at_once_changes_nothing(
    executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, found = qv.DPSGD(clip=0.5), []
    for size in (1, 15_000, gradients.BYTES):  # vectorized: one, two, all of a batch
        monkeypatch.setattr(gradients, "BYTES", size)
        shard = trained(private, executor=executor)
        assert shard.context.by_sample == (executor == "vectorized" or torch.get_num_threads() == 1)
        found.append(shard.state)
    for state in found[1:]:
        for one, other in zip(found[0], state, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_without_clipping_and_noise_it_is_plain_training() -> None:
    private, plain = trained(qv.DPSGD(clip=1e6, noise=1e-18)), trained(None)
    for one, other in zip(private.state, plain.state, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_executors_agree_and_noise_has_its_deviation() -> None:
    private = qv.DPSGD(clip=0.5, noise=2.0)
    together, alone = (trained(private, executor=e) for e in ("vectorized", "sequential"))
    for one, other in zip(together.state, alone.state, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    still = trained(qv.DPSGD(clip=0.5, noise=1e-12))
    blur = (together.state.u - still.state.u)[2]  # eleven samples: batches of 4, 4 and 3
    wanted = 0.1 * 2.0 * 0.5 * math.sqrt(2 / 16 + 1 / 9)
    assert float(blur.std()) == pytest.approx(wanted, rel=0.5)


def test_epochs_of_all_phases_are_counted_and_resumed() -> None:
    kept: list[Checkpoint] = []
    method, private = qv.DFedPGP(personal_epochs=1, shared_epochs=2), qv.DPSGD(noise=2.0)
    options = {"rounds": 3, "privacy": private}
    whole = simulate(method, AWAY(CLIENTS), checkpoint=kept.append, checkpoint_every=1, **options)
    again = simulate(method, AWAY(CLIENTS), resume=kept[0], **options)
    assert all(torch.equal(a, b) for a, b in zip(states(whole), states(again), strict=True))
    visits = sum(3 * AWAY(CLIENTS)(t).active.astype(int) for t in range(3))
    assert whole._shard.visits.tolist() == visits.tolist()
    assert whole._history.records[-1]["epsilon"] == [epsilon(int(n), 2.0, 1e-5) for n in visits]
    assert again._history.records[-1]["epsilon"] == whole._history.records[-1]["epsilon"]


def test_phases_that_take_turns_on_a_batch_are_blurred_by_their_own_numbers() -> None:
    """APFL's two models start alike and see the same batches: with equal noise they would agree."""
    method = qv.APFL(epochs=1, adaptive=False, alpha=1.0)
    still, blurred = (trained(qv.DPSGD(clip=1e-3, noise=n), method) for n in (1e-9, 1e3))
    first = (blurred.state.u - still.state.u)[0]
    second = (blurred.state.own_u - still.state.own_u)[0]
    assert float((first - second).norm()) > 0.5 * float(first.norm())


def test_a_budget_ends_training_before_anything_is_sent() -> None:
    budget = epsilon(6, 2.0, 1e-5) * 1.01
    private = qv.DPSGD(noise=2.0, epsilon_budget=budget)
    with pytest.raises(BudgetSpent, match="round 2"):
        simulate(qv.DFedPGP(shared_epochs=2), PUSH(CLIENTS), rounds=4, privacy=private)


UNCLIPPED = {"fedproto", "moon", "dfedsam", "dfedpgpsam", "perfedavg", "pushdiging"}
UNCLIPPED |= {"dfedsalt", "dfedsgpsm", "fedrod", "fedas", "feddbe"}


@pytest.mark.parametrize(("method", "graphs"), CASES, ids=[f"{m}" for m, _ in CASES])
def test_every_look_at_the_data_is_private_or_refused(method: Any, graphs: Any) -> None:
    if method.name in UNCLIPPED or method == qv.DisPFL(epochs=1, regrow="gradient"):
        with pytest.raises(qv.QuiverError, match="would not be private"):
            simulate(method, graphs(CLIENTS), rounds=1, privacy=qv.DPSGD())
        return
    if method.name == "fedbn":
        with pytest.raises(qv.QuiverError, match=r"BatchNorm.*none can be clipped by itself"):
            simulate(method, graphs(CLIENTS), rounds=1, privacy=qv.DPSGD())
        return
    run = simulate(method, graphs(CLIENTS), rounds=1, privacy=qv.DPSGD())
    assert run.summary["epsilon"] > 0


@pytest.mark.parametrize("method", [qv.APFL(), qv.DisPFL(regrow="gradient")], ids=str)
def test_an_option_may_make_a_method_look_at_its_data(method: Any) -> None:
    topology = REGULAR(CLIENTS)
    with pytest.raises(qv.QuiverError, match="would not be private"):
        simulate(method, topology, rounds=1, privacy=qv.DPSGD())
    other = {"apfl": qv.APFL(adaptive=False), "dispfl": qv.DisPFL()}[method.name]
    assert simulate(other, topology, rounds=1, privacy=qv.DPSGD()).summary["epsilon"] > 0


def test_compression_comes_after_privacy() -> None:
    """What is coded has been blurred already, so coding costs no privacy and keeps the sums."""
    run = simulate(
        qv.DFedAvgM(), REGULAR(CLIENTS), rounds=2, privacy=PRIVATE, compression=qv.Quantize(bits=4)
    )
    assert run.summary["epsilon"] == epsilon(2, 1.0, 1e-5)


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"name": "update", "noise": 0}, "privacy.noise = 0: it must be a positive number"),
        ({"name": "update", "delta": 1}, "privacy.delta = 1: it must be below 1"),
        ({"name": "updates"}, "privacy.name = 'updates': unknown privacy; did you mean 'update'?"),
    ],
)
def test_what_cannot_be_honoured_is_refused(section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(qv.QuiverError) as found:
        parse_config({"privacy": section})
    assert sentence in str(found.value)
