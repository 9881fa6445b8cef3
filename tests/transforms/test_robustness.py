"""Attackers, and receivers that judge: factors on links that keep what push-sum needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quiverfl as qv
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.exchange.build import build_exchange
from quiverfl.engine.settings import RunSettings
from quiverfl.results.run_files import read_run
from quiverfl.runs.config import parse_config
from quiverfl.transforms import Transforms
from quiverfl.transforms.attacks import choose_attackers
from quiverfl.transforms.noise import Noise
from quiverfl.transforms.robustness import ReceivedMessage, count_sketch, cross_links, reweigh_graph
from small import AWAY, CLIENTS, METHODS, PULL, PUSH, REGULAR, simulate, states

RULES = [qv.SelfCenteredClip(), qv.Balance(), qv.Balance(sketch=1000), qv.NormBound(factor=2.0)]
ATTACKS = [
    qv.SignFlip(share=0.34, factor=3.0),
    qv.AddNoise(share=0.34),
    qv.ScaledUpdate(share=0.34),
    qv.LabelFlip(share=0.34),
    qv.ForgedMass(share=0.34),
    qv.Adaptive(share=0.34, distance=1.0),
]
BAD = choose_attackers(ATTACKS[0], 0, CLIENTS)
GOOD = np.setdiff1d(np.arange(CLIENTS), BAD)


# Rules.


def test_a_neighbour_further_than_the_radius_is_drawn_to_it() -> None:
    """Client 0 at 0, its neighbours at 1 and at 10: with τ = 2 the second counts as if at 2."""
    ring = qv.from_matrix([[1 / 3, 1 / 3, 1 / 3], [0, 1, 0], [0, 0, 1]])
    made = build_exchange(
        Transforms(robustness=qv.SelfCenteredClip(radius=2.0)),
        qv.DFedAvgM(),
        ring,
        RunSettings(rounds=1, dtype=torch.float64),
    )
    made.push(0, ring(0), {"u": torch.tensor([[0.0], [1.0], [10.0]], dtype=torch.float64)})
    found = made.collect(0)["u"]
    torch.testing.assert_close(found[0, 0], torch.tensor((0 + 1 + 2) / 3, dtype=torch.float64))


def test_balance_takes_what_is_near_and_grows_stricter() -> None:
    near = ReceivedMessage(np.zeros(3, int), np.array([0.5, 0.9, 1.1]), np.ones(3), np.ones(3), 0.0)
    late = ReceivedMessage(near.receivers, near.distances, near.own, near.theirs, 0.9)
    rule = qv.Balance(gamma=1.0, kappa=0.5)
    assert rule.factors(near).tolist() == [1, 1, 0]
    assert rule.factors(late).tolist() == [1, 0, 0]


def test_the_outlier_rule_is_that_of_the_peers() -> None:
    seen = ReceivedMessage(np.zeros(2, int), np.ones(2), np.ones(2), np.array([9.9, 10.1]), 0.0)
    assert qv.NormBound(factor=10.0).factors(seen).tolist() == [1, 0]
    assert bool(qv.NormBound(10.0).accepts(9.9, 1.0))
    assert not bool(qv.NormBound(10.0).accepts(10.1, 1.0))


@pytest.mark.parametrize(
    "graphs", [PUSH, AWAY, REGULAR, PULL], ids=["push", "away", "both", "pull"]
)
def test_what_is_refused_goes_home(graphs: Any) -> None:
    """Columns that summed to 1 still do; where only rows did, rows do."""
    graph = graphs(CLIENTS)(0)
    receivers, _ = cross_links(graph)
    weighed = reweigh_graph(graph, np.random.default_rng(0).uniform(size=len(receivers)))
    axis = 0 if graph.column_stochastic else 1
    np.testing.assert_allclose(weighed.sparse.sum(axis=axis), 1, atol=1e-12)
    assert (
        weighed.weights[~np.eye(CLIENTS, dtype=bool)] <= graph.weights[~np.eye(CLIENTS, dtype=bool)]
    ).all()
    alone = reweigh_graph(graph, np.zeros(len(receivers)), mass=False)
    if graph.row_stochastic:
        np.testing.assert_allclose(alone.sparse.sum(axis=1), 1, atol=1e-12)
    untouched = reweigh_graph(graph, np.ones(len(receivers)))
    np.testing.assert_allclose(untouched.weights, graph.weights, atol=1e-15)


def test_what_is_refused_makes_nobody_else_weigh_more() -> None:
    """Two neighbours at 1/3 each, one refused: 2/3 of one's own, where BALANCE's paper would take
    1/3 and as much as 2/3 of the other. Where columns sum to 1 it is the sender who keeps it."""
    thirds = np.full((3, 3), 1 / 3)
    pull = np.array([[1, 1, 1], [0, 3, 0], [0, 0, 3]]) / 3
    for weights, mass in ((pull, True), (thirds, False)):
        graph = qv.from_matrix(weights)(0)
        _, senders = cross_links(graph)
        taken = reweigh_graph(graph, (senders != 1).astype(float), mass=mass).weights
        np.testing.assert_allclose(taken[0], [2 / 3, 0, 1 / 3], atol=1e-15)
    graph = qv.from_matrix(pull.T)(0)
    receivers, _ = cross_links(graph)
    taken = reweigh_graph(graph, (receivers != 1).astype(float)).weights
    np.testing.assert_allclose(taken[:, 0], [2 / 3, 0, 1 / 3], atol=1e-15)


@pytest.mark.parametrize("compression", [None, qv.Quantize(bits=8)], ids=["whole", "8 bits"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_sums_are_conserved_whatever_is_refused(rule: Any, compression: Any) -> None:
    topology, random = AWAY(CLIENTS), np.random.default_rng(1)
    made = build_exchange(
        Transforms(compression, robustness=rule),
        qv.OSGP(),
        topology,
        RunSettings(rounds=60, dtype=torch.float64),
    )
    now = {
        "u": torch.from_numpy(random.normal(size=(CLIENTS, 150)) * np.arange(1, 7)[:, None] ** 2),
        "mu": torch.ones(CLIENTS, dtype=torch.float64),
    }
    total = now["u"].sum(dim=0)
    for t in range(60):
        made.push(t, topology(t), now)
        now = made.collect(t)
        assert float(now["mu"].sum()) == pytest.approx(CLIENTS, abs=1e-12)
        assert (now["u"].sum(dim=0) - total).abs().max() <= 1e-11


def test_distances_of_sketches_are_those_of_models() -> None:
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 20_000)))
    wanted = float((rows[0] - rows[1]).norm())
    found = [count_sketch(rows, 1000, seed, "u") for seed in range(20)]
    norms = [float((a - b).norm()) for a, b in found]
    assert np.mean(norms) == pytest.approx(wanted, rel=0.02)
    assert np.std(norms) < 0.05 * wanted


def test_refused_models_are_not_sent_once_sketches_went_ahead() -> None:
    attack = qv.SignFlip(share=0.34, factor=3.0)
    plain = simulate(qv.DFedPGP(), PUSH(CLIENTS), rounds=1, adversary=attack)
    sketch = qv.Balance(gamma=1.5, sketch=10)
    coded = simulate(qv.DFedPGP(), PUSH(CLIENTS), rounds=1, adversary=attack, robustness=sketch)
    receivers, _ = cross_links(PUSH(CLIENTS)(0))
    taken = round((coded.summary["bytes"] - len(receivers) * 40) / (35 * 8 + 8))
    assert 0 < taken < len(receivers)
    assert coded.summary["bytes"] == taken * (35 * 8 + 8) + len(receivers) * 40
    assert plain.summary["bytes"] == len(receivers) * (35 * 8 + 8)


# Attackers.


def test_attackers_are_chosen_by_the_seed() -> None:
    assert len(BAD) == 2
    chosen = {tuple(choose_attackers(ATTACKS[0], seed, 20).tolist()) for seed in range(5)}
    assert len(chosen) == 5
    assert all(len(who) == 7 for who in chosen)


def test_what_attackers_send_by_hand() -> None:
    sent = {"u": torch.tensor([[1.0, 2.0]]), "mu": torch.tensor([0.5])}
    before = {"u": torch.tensor([[0.5, 1.0]])}
    noise = Noise(0, "adversary", 3, np.array([4]))

    def forged(attack: Any) -> tuple[list[float], float]:
        found = attack.attack(sent, before, "mu", noise)
        return found["u"][0].tolist(), float(found["mu"][0])

    assert forged(qv.SignFlip(factor=3.0)) == ([-3.0, -6.0], 0.5)
    assert forged(qv.ScaledUpdate(factor=-5.0)) == ([-2.0, -4.0], 0.5)
    assert forged(qv.ForgedMass(factor=0.1)) == ([1.0, 2.0], pytest.approx(0.05))
    assert forged(qv.LabelFlip()) == ([1.0, 2.0], 0.5)
    # ‖before‖ = √1.25 is also the norm of its update (0.5, 1): half of it back is half of before.
    assert forged(qv.Adaptive(margin=0.5, distance=1.0)) == (pytest.approx([0.25, 0.5]), 0.5)
    noisy, mass = forged(qv.AddNoise(deviation=0.1))
    assert mass == 0.5
    assert noisy != [1.0, 2.0]
    many = Noise(0, "adversary", 3, np.array([4, 5])).draw_like("u", torch.zeros(2, 10_001))
    assert float(many.mean()) == pytest.approx(0, abs=0.03)
    assert float(many.std()) == pytest.approx(1, abs=0.03)
    assert torch.equal(noise.draw_like("u", torch.zeros(1, 10_001))[0], many[0])
    assert not torch.equal(many[0], many[1])


PAIR = qv.from_matrix([[0.5, 0.5], [0.5, 0.5]])


def exchanged(transforms: Transforms, method: Any, sent: dict[str, Any], first: Any) -> Any:
    """What two clients have after round 2 of 4."""
    settings = RunSettings(rounds=4, dtype=torch.float64)
    made = build_exchange(transforms, method, PAIR, settings, lambda: first)
    made.push(2, PAIR(2), {name: leaf.clone() for name, leaf in sent.items()})
    return made.collect(2)


def test_an_attacker_that_adapts_is_just_taken() -> None:
    """Both have one model when the round begins; the bound is exp(-0.5 · 2/4) times its norm."""
    start = torch.tensor([[3.0, 4.0], [3.0, 4.0]], dtype=torch.float64)
    bad = int(choose_attackers(qv.Adaptive(share=0.5), 0, 2)[0])
    sent = start.clone()
    sent[bad] *= 1.1
    reach = np.exp(-0.25)
    for attack, taken in (
        (qv.Adaptive(share=0.5, margin=0.999), 0.999 * reach),
        (qv.Adaptive(share=0.5, margin=1.0, distance=1.001 * reach), 0.0),
    ):
        transforms = Transforms(robustness=qv.Balance(), adversary=attack)
        found = exchanged(transforms, qv.DFedAvgM(), {"u": sent}, {"u": start})["u"]
        torch.testing.assert_close(found[1 - bad], start[0] * (1 - taken / 2))


@pytest.mark.parametrize(
    ("rule", "own", "others"),
    [(None, (1.5, 1.0), (1.5, 0.55)), (qv.Balance(), (2.0, 1.0), (1.0, 1.0))],
    ids=["taken", "refused"],
)
def test_an_attacker_deceives_others_and_not_itself(
    rule: Any, own: tuple[float, float], others: tuple[float, float]
) -> None:
    """It has (u, μ) = (2, 1) and sends (2, 0.1); the other has (1, 1). What is refused comes home
    as it was, so that an attacker whom nobody believes does not divide itself to infinity."""
    attack = qv.ForgedMass(share=0.5, factor=0.1)
    bad = int(choose_attackers(attack, 0, 2)[0])
    u = torch.ones(2, 1, dtype=torch.float64)
    u[bad] = 2.0
    sent = {"u": u, "mu": torch.ones(2, dtype=torch.float64)}
    found = exchanged(Transforms(robustness=rule, adversary=attack), qv.OSGP(), sent, {"u": u})
    for client, (numerator, mass) in ((bad, own), (1 - bad, others)):
        assert float(found["u"][client, 0]) == pytest.approx(numerator)
        assert float(found["mu"][client]) == pytest.approx(mass)


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_every_attack_moves_honest_clients_and_is_resumed(attack: Any) -> None:
    kept: list[Checkpoint] = []
    options = {"rounds": 4, "adversary": attack}
    whole = simulate(
        qv.DFedPGP(), PUSH(CLIENTS), checkpoint=kept.append, checkpoint_every=1, **options
    )
    again = simulate(qv.DFedPGP(), PUSH(CLIENTS), resume=kept[1], **options)
    plain = simulate(qv.DFedPGP(), PUSH(CLIENTS), rounds=4)
    assert all(torch.equal(a, b) for a, b in zip(states(whole), states(again), strict=True))
    u, without = (run._shard.state.u[GOOD] for run in (whole, plain))
    assert (u - without).abs().max() > 1e-3


def test_the_mean_is_that_of_honest_clients_here_and_in_the_folder(tmp_path: Path) -> None:
    config = {
        "data": {"clients": 5},
        "run": {"rounds": 1},
        "adversary": {"name": "sign_flip", "share": 0.4},
        "topology": {"neighbors": 2},
    }
    run = qv.Experiment.of(config).run(tmp_path / "run")
    assert len(run.attackers) == 2
    rows = run.history[run.history["stage"] == "mixed"]
    mean = rows[~rows["client"].isin(run.attackers)]["accuracy"].mean()
    assert run.summary["stages"]["mixed"]["last"]["mean"] == pytest.approx(mean)
    theirs = rows[rows["client"].isin(run.attackers)]["accuracy"].mean()
    assert run.summary["attackers"]["stages"]["mixed"]["last"]["mean"] == pytest.approx(theirs)
    read = read_run(tmp_path / "run")
    assert list(read.attackers) == run.attackers
    assert read.values("mixed", "accuracy").columns.tolist() == [
        client for client in range(5) if client not in run.attackers
    ]
    saved = simulate(qv.DFedPGP(), PUSH(CLIENTS), rounds=1, adversary=ATTACKS[0])
    assert read_run(saved.save(tmp_path / "saved")).attackers == tuple(BAD)


# What goes together.

ALLOWED = {"osgp", "dfedpgp", "dfedpgpsam", "pushdiging", "dfedavgm", "dfedavgmp", "dfedsam"}
CASES = [
    pytest.param(
        method, graphs, id=str(method), marks=() if method.name in ALLOWED else pytest.mark.slow
    )
    for method, graphs in {m.name: (m, choices[0]) for m, choices in METHODS}.values()
]
"""Those that are refused for the reasons that compression has are in the slow tests."""


@pytest.mark.parametrize(("method", "graphs"), CASES)
def test_every_method_is_judged_or_refused(method: Any, graphs: Any) -> None:
    options = {"robustness": qv.Balance(), "adversary": qv.SignFlip(share=0.34)}
    if method.name in ALLOWED and not method.delay:
        run = simulate(method, graphs(CLIENTS), rounds=2, **options)
        assert len(run.rounds) == 2
        return
    with pytest.raises(qv.QuiverError, match=r"Leave|leave"):
        simulate(method, graphs(CLIENTS), rounds=2, **options)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        (
            {"robustness": {"name": "krum"}},
            "robustness.name = 'krum': unknown robustness; known are",
        ),
        ({"adversary": {"name": "noise", "share": 2}}, "adversary.share = 2: it must be"),
        ({"robustness": {"name": "balance", "sketch": 0}}, "robustness.sketch = 0: it must be"),
    ],
)
def test_what_cannot_be_honoured_is_refused(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(qv.QuiverError) as found:
        parse_config(sections)
    assert sentence in str(found.value)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(qv.QuiverError, match="cannot be compared with all of one's own"):
        simulate(qv.DFedPGP(), PUSH(CLIENTS), robustness=qv.Balance(), compression=qv.TopK())
    with pytest.raises(qv.QuiverError, match="a late model"):
        simulate(qv.OSGP(delay=1), PUSH(CLIENTS), robustness=qv.Balance())
    for rule in (None, qv.SelfCenteredClip()):
        with pytest.raises(qv.QuiverError, match="no bound to stay inside of"):
            simulate(qv.DFedPGP(), PUSH(CLIENTS), robustness=rule, adversary=qv.Adaptive())
    with pytest.raises(qv.QuiverError, match="no push-sum mass to forge"):
        simulate(qv.DFedAvgM(), REGULAR(CLIENTS), adversary=qv.ForgedMass())
