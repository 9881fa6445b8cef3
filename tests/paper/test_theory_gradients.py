"""The gradients of the theorem, against closed forms on least squares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

import quiverfl as qv
import small
from quiverfl.engine import gradient_norms as gradients
from quiverfl.laws.problem import quadratics
from quiverfl.runs.config import parse_config
from quiverfl.runs.experiment import run_in_folder

Floats = npt.NDArray[np.float64]
SHARED, PERSONAL = 3, 2


class Split(nn.Module):
    """x · w with the first weights shared and the last ones personal."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(SHARED, 1, bias=False)
        self.head = nn.Linear(PERSONAL, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x[..., :SHARED]) + self.head(x[..., SHARED:])


def half_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2).sum(dim=-1) / 2


TASK = qv.Task(model=Split, personal=("head",), loss=half_square, metrics={})


def ragged(clients: int) -> qv.FederatedData:
    """Clients with 5 to 16 rows of the quadratics' data."""
    whole = quadratics(clients, dimension=SHARED + PERSONAL, samples=16, seed=3).data
    pairs = [
        tuple(part[: 5 + 7 * i % 12] for part in whole.train.of_client(i))
        for i in range(whole.clients)
    ]
    return qv.FederatedData.from_arrays(pairs, [(x[:0], y[:0]) for x, y in pairs])


def by_hand(data: qv.FederatedData, run: qv.Run) -> tuple[float, float]:
    """(Δ_ū, Δ_v) with plain loops: ∇F_i(w) = Xᵀ(Xw - y)/n."""
    states = [run.state(client) for client in range(data.clients)]
    u = np.array([state.u["body.weight"].numpy().ravel() for state in states])
    v = np.array([state.v["head.weight"].numpy().ravel() for state in states])
    mu = np.array([float(state.mu) for state in states])
    mean = u.mean(axis=0)
    shared = np.zeros(SHARED)
    personal = 0.0
    for client in range(data.clients):
        x, y = (part.numpy() for part in data.train.of_client(client))

        def slope(w: Floats, x: Floats = x, y: Floats = y) -> Floats:
            return x.T @ (x @ w - y.ravel()) / len(x)

        shared += slope(np.concatenate([mean, v[client]]))[:SHARED]
        own = slope(np.concatenate([u[client] / mu[client], v[client]]))[SHARED:]
        personal += float(own @ own)
    return float(((shared / data.clients) ** 2).sum()), personal / data.clients


def measured(data: qv.FederatedData, method: Any, **options: Any) -> tuple[qv.Run, Any]:
    settings: dict[str, Any] = {
        "topology": qv.random_push(clients=data.clients, neighbors=2, seed=1),
        "training": qv.Training(lr=0.05, batch_size=4),
        "rounds": 3,
        "dtype": torch.float64,
        "threads": 1,
        "gradients": True,
    }
    run = qv.simulate(TASK, data, method=method, **{**settings, **options})
    return run, run.rounds.iloc[-1]


@pytest.mark.parametrize("executor", ["vectorized", "sequential"])
@pytest.mark.parametrize("slab", [4, 512])
def test_they_are_those_of_the_closed_form(
    executor: str, slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 clients are more than one chunk; a slab of 4 cuts every client's rows in pieces."""
    monkeypatch.setattr(gradients, "SLAB", slab)
    data = ragged(30)
    run, last = measured(data, qv.DFedPGP(shared_epochs=2), executor=executor)
    shared, personal = by_hand(data, run)
    assert float(run.state(0).mu) != 1  # or z and u would be the same
    assert last.gradient_shared == pytest.approx(shared, rel=1e-12)
    assert last.gradient_personal == pytest.approx(personal, rel=1e-12)


def test_looking_changes_nothing_and_off_is_none() -> None:
    data = ragged(6)
    looked, _ = measured(data, qv.DFedPGP(shared_epochs=2))
    blind, last = measured(data, qv.DFedPGP(shared_epochs=2), gradients=False)
    assert small.distance(small.states(looked), small.states(blind)) == 0
    assert last.gradient_shared is None
    assert last.gradient_personal is None


def test_only_evaluated_rounds_are_measured() -> None:
    run, _ = measured(ragged(6), qv.DFedPGP(shared_epochs=1), rounds=5, evaluate_every=2)
    assert run.rounds["gradient_shared"].notna().tolist() == [False, True, False, True, True]


def test_augmentation_plays_no_part() -> None:
    plain = ragged(6)
    noisy = qv.FederatedData(plain.train, plain.test, augment=lambda x, keys: x + 5)
    still = qv.DFedPGP(personal_epochs=0, shared_epochs=0)
    assert measured(plain, still)[1].gradient_shared == measured(noisy, still)[1].gradient_shared


def test_a_model_without_a_personal_part_has_no_personal_gradient() -> None:
    whole = qv.Task(model=Split, personal=(), loss=half_square, metrics={})
    run = qv.simulate(
        whole,
        ragged(6),
        method=qv.DFedAvgM(epochs=1),
        topology=qv.ring(clients=6),
        training=qv.Training(lr=0.05),
        rounds=1,
        gradients=True,
    )
    assert run.rounds.iloc[-1].gradient_personal == 0
    assert run.rounds.iloc[-1].gradient_shared > 0


@pytest.mark.parametrize("row", small.METHODS, ids=lambda row: row[0].name)
def test_every_method_can_be_measured(row: Any) -> None:
    method, graphs = row
    run = small.simulate(method, graphs[0](small.CLIENTS), rounds=2, gradients=True)
    assert (run.rounds[["gradient_shared", "gradient_personal"]] > 0).all(axis=None)


def test_with_messages_in_flight_the_mean_is_of_the_mass_that_is_here() -> None:
    """Nobody trains and all agree: u/μ is the start in every round, however much is under way."""
    still = qv.OSGP(epochs=0, delay=1)
    run, _ = measured(ragged(6), still)
    assert run.rounds["mu_min"].min() < 0.9
    assert np.ptp(run.rounds["gradient_shared"].astype(float)) < 1e-12


def test_a_configuration_can_ask_for_them(tmp_path: Path) -> None:
    tree = {"data": {"clients": 4}, "run": {"rounds": 1, "gradients": True}}
    asked, plain = parse_config(tree), parse_config({**tree, "run": {"rounds": 1}})
    assert asked.identity() == plain.identity()  # the same run, looked at more closely
    run_in_folder(asked, tmp_path)
    record = json.loads((tmp_path / "rounds.jsonl").read_text())
    assert record["gradient_shared"] > 0
    assert record["gradient_personal"] > 0
