"""The product equals an independent transcription of every method, in all of its state."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from transcriptions.cases import CASES
from transcriptions.problem import CLIENTS, differences, observed, product, transcribed
from transcriptions.spec import BODY, HEAD

METHODS = ("Local", "FedAvg", "FedPer", "FedRep", "FedBABU", "Ditto", "DFedAvgM", "DFedAvgMP")
METHODS += ("OSGP", "DisPFL", "DFedPGP")
METHODS += ("FedProx", "SCAFFOLD", "MOON", "FedProto", "APFL", "PFedMe", "PerFedAvg")
METHODS += ("DFedSAM", "DFedPGPSAM", "PushDIGing")
METHODS += ("DFedSalt", "DFedSGPSM", "DePRL", "KGT", "FedALA", "FedRoD", "FedAS")
METHODS += ("FedDBE", "ScaffoldP")
STARS = ("FedAvg", "FedPer", "FedRep", "FedBABU", "Ditto")
STARS += ("FedProx", "SCAFFOLD", "MOON", "FedProto", "APFL", "PFedMe", "PerFedAvg")
STARS += ("FedALA", "FedRoD", "FedAS", "FedDBE", "ScaffoldP", "LG-FedAvg")
PUSHES = ("OSGP", "OSGP, floor", "DFedPGP", "DFedPGP, floor")
PUSHES += ("DFedPGPSAM", "DFedPGPSAM, floor", "PushDIGing")
PUSHES += ("OSGP, debiased", "DFedPGP, debiased", "DFedPGPSAM, debiased", "DFedSGPSM")
EXECUTORS = ("vectorized", "sequential")


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", CASES)
def test_product_equals_transcription(name: str, executor: str) -> None:
    """State, the models of both stages, and the recorded accuracy and loss of every round."""
    case = CASES[name]
    outcome, clipped = transcribed(case)
    found = differences(observed(case, executor), outcome)
    wrong = {part: size for part, size in found.items() if not size <= case.tolerance}
    assert not wrong
    if case.clip_norm is not None:
        assert any(clipped)
        assert not all(clipped)


def test_every_method_has_a_transcription_with_full_and_with_mini_batches() -> None:
    for method in METHODS:
        sizes = {case.batch_size for case in CASES.values() if case.method == method}
        assert sizes == {4, None}, method


@pytest.mark.parametrize("name", STARS)
def test_the_star_leaves_clients_idle(name: str) -> None:
    """So that the rule for the local stage of idle clients is really exercised."""
    case = CASES[name]
    active = np.array([case.topology()(t).active for t in range(case.rounds)])
    assert (active.sum(axis=1) == 2).all()
    trained_before_but_not_last = active[:-1].any(axis=0) & ~active[-1]
    assert trained_before_but_not_last.any()
    assert (~active[0]).any()
    for t in range(case.rounds):
        row = case.topology()(t).weights
        assert (row == np.where(active[t], 0.5, 0.0)).all()


@pytest.mark.parametrize("name", ["OSGP, offline, delay 1", "OSGP, offline, delay 2"])
def test_some_messages_are_due_to_an_offline_client(name: str) -> None:
    case = CASES[name]
    graphs = [case.topology()(t) for t in range(case.rounds)]
    delay = case.options["delay"]
    waiting = 0
    for t in range(case.rounds - delay - 1):
        off_diagonal = graphs[t].weights * (1 - np.eye(CLIENTS))
        offline = ~graphs[t + delay].active
        waiting += int((off_diagonal[offline] > 0).sum())
    assert waiting > 0


@pytest.mark.parametrize("name", PUSHES)
def test_push_sum_weights_move(name: str) -> None:
    """Far enough from 1 that forgetting them shows, and on both sides of the floor."""
    state = [product(CASES[name], "sequential").state(i) for i in range(CLIENTS)]
    mu = np.array([float(s.mu) for s in state])
    assert mu.min() < 0.75
    assert mu.max() > 1.25
    assert abs(mu.sum() - CLIENTS) <= 1e-12


def test_fedbabu_tunes_a_copy() -> None:
    """The head is bit-identical for all and to the end; the model that is used has moved."""
    case = CASES["FedBABU"]
    run, beginning = product(case, "vectorized"), product(case, "vectorized", 0)
    for client in range(CLIENTS):
        for name in HEAD:
            head = run.state(client).v[name]
            assert torch.equal(head, beginning.state(client).v[name])
            assert torch.equal(head, run.state(0).v[name])
        tuned = dict(run.personal(client).named_parameters())
        for name in BODY:
            assert not torch.equal(tuned[name], run.state(client).u[name])


def test_dispfl_masks_move_and_keep_their_size() -> None:
    case = CASES["DisPFL"]
    run, beginning = product(case, "vectorized"), product(case, "vectorized", 0)
    moved = False
    for client in range(CLIENTS):
        for part in ("mask_u", "mask_v"):
            for name, mask in run.state(client)[part].items():
                first = beginning.state(client)[part][name]
                assert mask.sum() == first.sum()
                moved = moved or not torch.equal(mask, first)
    assert moved


@pytest.mark.parametrize(
    ("case", "density"),
    [("DisPFL", 0.5), ("DisPFL, dense", 0.9), ("DisPFL, exact share", 0.548)],
)
def test_dispfl_starts_with_erdos_renyi_kernel_densities(case: str, density: float) -> None:
    """Raw density Σdims/Πdims, scaled to the budget; what exceeds 1 is dense and solved again."""
    state = product(CASES[case], "sequential", 0).state(0)
    masks = {**state["mask_u"], **state["mask_v"]}
    raw = {n: sum(m.shape) / m.numel() for n, m in masks.items() if m.dim() > 1}
    dense = {n for n, m in masks.items() if m.dim() == 1}
    total = sum(m.numel() for m in masks.values())
    while True:
        budget = density * total - sum(masks[n].numel() for n in dense)
        scale = budget / sum(raw[n] * masks[n].numel() for n in raw if n not in dense)
        too_many = {n for n in raw if n not in dense and scale * raw[n] > 1}
        if not too_many:
            break
        dense |= too_many
    for name, mask in masks.items():
        share = 1.0 if name in dense else scale * raw[name]
        assert int(mask.sum()) == round(share * mask.numel()), name
    assert (case == "DisPFL, dense") == any(masks[n].dim() > 1 for n in dense)


def test_clients_start_together_unless_told_otherwise() -> None:
    together = product(CASES["DFedPGP"], "sequential", 0)
    apart = product(CASES["DFedPGP, own starts"], "sequential", 0)
    babu = product(CASES["FedBABU, less momentum"], "sequential", 0)
    for name in BODY:
        assert torch.equal(together.state(0).u[name], together.state(1).u[name])
        assert not torch.equal(apart.state(0).u[name], apart.state(1).u[name])
        assert not torch.equal(babu.state(0).u[name], babu.state(1).u[name])
    for name in HEAD:
        assert torch.equal(together.state(0).v[name], together.state(1).v[name])
        assert not torch.equal(apart.state(0).v[name], apart.state(1).v[name])
        assert torch.equal(babu.state(0).v[name], babu.state(1).v[name])


def test_ditto_starts_its_personal_model_at_the_global_one() -> None:
    state = product(CASES["Ditto"], "sequential", 0).state(2)
    assert all(torch.equal(state.theta_u[name], state.u[name]) for name in BODY)
    assert all(torch.equal(state.theta_v[name], state.v[name]) for name in HEAD)


def test_dispfl_starts_with_equal_weights_under_different_masks() -> None:
    start = product(CASES["DisPFL"], "sequential", 0)
    first, second = start.state(0), start.state(1)
    assert any(not torch.equal(first.mask_u[n], second.mask_u[n]) for n in BODY)
    for name in BODY:
        both = first.mask_u[name].bool() & second.mask_u[name].bool()
        assert torch.equal(first.u[name][both], second.u[name][both])
        assert (first.u[name][~first.mask_u[name].bool()] == 0).all()
