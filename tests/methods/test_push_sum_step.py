"""The step on z = u/μ: the paper's η/μ, bounded by a floor, or η whatever the mass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import quiverfl as qv
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.shard import Shard
from quiverfl.methods.push_sum import Step, offers_step
from quiverfl.runs.config import parse_config
from small import CLIENTS, PULL, TRAINING, distance, simulate, states, tiny_data, tiny_task

ALL = np.ones(CLIENTS, dtype=bool)
ETA = 0.5
PLAIN = qv.Training(lr=ETA, personal_lr=ETA, batch_size=None)
METHODS = [qv.DFedPGP, qv.DFedPGPSAM, qv.DFedSGPSM, qv.OSGP]
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)


def with_mass(method: Any, mass: float, training: qv.Training = TRAINING) -> Shard:
    """A shard whose clients hold so much mass, all at the z they start with."""
    settings = RunSettings(rounds=3, dtype=torch.float64)
    shard = Shard(tiny_task(), tiny_data(), method, training, settings)
    state = shard.state
    scaled: dict[str, Any] = {"u": state.u * mass, "mu": state.mu * mass}
    if isinstance(method, qv.OSGP | qv.DFedSGPSM):  # all of the model has mass
        scaled["v"] = state.v * mass
    shard.state = state._replace(**scaled)
    return shard


def moved(method: Any, mass: float) -> torch.Tensor:
    """By how much one full-batch step moves z."""
    shard = with_mass(method, mass, PLAIN)
    before = shard.personal(np.arange(CLIENTS)).shared.clone()
    shard.train(0, ALL)
    return shard.personal(np.arange(CLIENTS)).shared - before


@pytest.mark.parametrize(
    ("options", "mass", "times"),
    [
        ({}, 0.25, 4.0),
        ({}, 2.0, 0.5),
        ({"step": "debiased"}, 0.25, 1.0),
        ({"step": "debiased"}, 2.0, 1.0),
        ({"step_floor": 1.0}, 0.25, 1.0),
        ({"step_floor": 1.0}, 2.0, 0.5),
        ({"step_floor": 0.5}, 0.25, 2.0),
    ],
    ids=str,
)
def test_one_step_moves_z_by(options: dict[str, Any], mass: float, times: float) -> None:
    """In η times the gradient: at μ = 1 every rule moves z by that much."""
    method = qv.DFedPGP(personal_epochs=0, shared_epochs=1, **options)
    expected = moved(qv.DFedPGP(personal_epochs=0, shared_epochs=1), 1.0) * times
    assert float(expected.abs().max()) > 1e-2
    torch.testing.assert_close(moved(method, mass), expected, rtol=0, atol=1e-15)


@every_method
def test_debiased_training_does_not_depend_on_the_mass(method: Any) -> None:
    """With momentum, decay, clipping and SAM's radius; powers of 2, so that bits must agree."""
    reached = {}
    for step in ("debiased", "paper"):
        for mass in (1.0, 0.0625):
            shard = with_mass(method(step=step), mass)
            shard.train(0, ALL)
            reached[step, mass] = shard.personal(np.arange(CLIENTS))
            assert torch.equal(shard.state.mu, torch.full_like(shard.state.mu, mass))
    one, other = (reached["debiased", mass] for mass in (1.0, 0.0625))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert distance(list(reached["paper", 1.0]), list(reached["paper", 0.0625])) > 1e-2


@every_method
def test_the_steps_are_one_where_the_mass_is_one(method: Any) -> None:
    """On graphs whose rows sum to 1 the option changes no bit."""
    runs = [simulate(method(step=step), PULL(CLIENTS), rounds=2) for step in ("paper", "debiased")]
    first, second = (states(run) for run in runs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_floor_has_no_place_beside_the_debiased_step() -> None:
    with pytest.raises(qv.QuiverError, match=r'method\.step_floor = 0\.5: .*step = "debiased"'):
        qv.DFedPGP(step="debiased", step_floor=0.5)
    with pytest.raises(qv.QuiverError, match=r"method\.step = 'debias': did you mean 'debiased'"):
        qv.OSGP(step="debias")


def test_the_option_left_out_changes_no_identity() -> None:
    """Runs that were recorded before there was a choice stay the same runs."""
    plain = parse_config({"method": {"name": "dfedpgp"}})
    debiased = parse_config({"method": {"name": "dfedpgp", "step": "debiased"}})
    assert plain.identity() == parse_config({}).identity()
    assert debiased.identity() != plain.identity()


def test_whose_step_can_be_chosen() -> None:
    """By the type of the option: a method of one's own may call something else `step`."""
    offering = {name for name in qv.METHODS if offers_step(qv.METHODS[name])}
    assert offering == {"dfedpgp", "dfedpgpsam", "dfedsgpsm", "osgp"}

    class Own(qv.DFedPGP):
        pass

    class Other:
        step: float = 0.1

    class Third:
        step: Step = "paper"

    assert [offers_step(kind) for kind in (Own, Other, Third)] == [True, False, True]
