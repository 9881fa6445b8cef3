"""Rules for what is taken, between peers: the simulation's numbers, refused shares come home."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import quiverfl as qv
from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.transforms import Transforms
from quiverfl.transforms.attacks import choose_attackers

from .test_methods import ONE_PULL, play_peers, same_as_simulated, simulated
from .test_swarm import crash_and_compare, swarm

__all__ = ["swarm"]

FLIPS = qv.SignFlip(share=0.3, factor=3.0)
NEAR = Transforms(robustness=qv.Balance(gamma=2.0), adversary=FLIPS)
EVERYTHING = replace(
    NEAR, compression=qv.Quantize(bits=8), privacy=qv.UpdatePrivacy(clip=0.5, noise=0.02)
)
CLIPS = Transforms(robustness=qv.SelfCenteredClip(radius=0.5), adversary=FLIPS)
LARGE = Transforms(
    robustness=qv.NormBound(factor=2.0), adversary=qv.ScaledUpdate(share=0.3, factor=-500.0)
)
TWO = qv.random_push(clients=3, neighbors=2, seed=0)


@pytest.mark.parametrize(
    ("method", "topology", "transforms"),
    [
        (qv.OSGP(epochs=1), TWO, EVERYTHING),
        pytest.param(
            qv.OSGP(epochs=1),
            TWO,
            replace(NEAR, compression=qv.Quantize(bits=8)),
            marks=pytest.mark.slow,
        ),
        pytest.param(qv.OSGP(epochs=1), TWO, NEAR, marks=pytest.mark.slow),
        pytest.param(qv.DFedAvgM(epochs=1), qv.ring(4), LARGE, marks=pytest.mark.slow),
        pytest.param(qv.DFedPGP(1, 1), ONE_PULL(3), CLIPS, marks=pytest.mark.slow),
        pytest.param(qv.OSGP(epochs=1), ONE_PULL(3), NEAR, marks=pytest.mark.slow),
    ],
)
def test_sync_peers_refuse_what_their_simulation_refuses(
    tmp_path: Path, method: Any, topology: Any, transforms: Transforms
) -> None:
    """Bit for bit: what is sent back is home in the same round."""
    played = play_peers(tmp_path, method, topology, torch.float32, transforms=transforms)
    same_as_simulated(played, method, topology, torch.float32, transforms)
    free = replace(transforms, robustness=None)
    trusting = simulated(method, topology, torch.float32, arithmetic="peers", **vars(free))
    assert not torch.equal(trusting._shard.state.u, played.field("u"))
    if not played.nodes[0].settings.copies:
        assert played.report.refunded > 0
        (bad,) = choose_attackers(transforms.adversary, 0, topology.clients)
        for node in played.nodes:
            received = read_statement(node.store.folder).received
            refused = {line.transfer.sender for line in received if line.refusal}
            assert node.number == bad or refused <= {f"peer-{bad}"}


@pytest.mark.slow
def test_async_peers_send_back_what_they_do_not_take(tmp_path: Path) -> None:
    """Σμ is whole again at the end, and what an attacker sent is with the attacker."""
    method = qv.OSGP(epochs=1)
    played = play_peers(tmp_path, method, TWO, torch.float64, "async", NEAR)
    assert played.report.passed, played.report.problems
    assert played.report.units == 3 * UNIT
    (bad,) = choose_attackers(FLIPS, 0, 3)
    lines = [read_statement(node.store.folder) for node in played.nodes]
    taken = [r for one in lines for r in one.received if r.transfer.sender == f"peer-{bad}"]
    assert all(r.refusal == "robustness: balance" for r in taken)
    assert taken


@pytest.mark.slow
def test_a_crash_around_what_is_sent_back_changes_nothing_at_all(swarm) -> None:
    """Nothing is taken in one run; in the other some is, and some is sent back."""
    for gamma, kind in ((0.5, "refuse"), (1.42, "absorb")):
        rule = qv.Balance(gamma=gamma, kappa=0.0)
        points = [f"{when} {kind} commit" for when in ("before", "after")]
        crash_and_compare(swarm, points, settings={"rule": rule})


@pytest.mark.parametrize(
    ("topology", "transforms", "sentence"),
    [
        (TWO, CLIPS, r'Use "balance" or "norm", or random_pull'),
        (TWO, Transforms(robustness=qv.Balance(sketch=100)), "Leave sketch out"),
        (TWO, Transforms(adversary=qv.ForgedMass()), "choose another attack"),
    ],
)
def test_what_peers_cannot_judge_is_said(topology: Any, transforms: Any, sentence: str) -> None:
    with pytest.raises(QuiverError, match=sentence):
        simulated(qv.OSGP(), topology, torch.float32, arithmetic="peers", **vars(transforms))
