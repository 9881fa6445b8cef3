"""Members that join a simulated run and leave it: who is where, and where the mass is."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import quiverfl as qv
from quiverfl.engine.members import Members
from quiverfl.errors import QuiverError, Stopped
from quiverfl.runs.experiment import Experiment
from quiverfl.topologies import Membership, random_pull, random_push, with_members

PLAN = Membership(10, joins=((5, 2), (9, 1)), leaves=((7, 2),), grant=0.5, seed=3)


def configure(**changes: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "data": {
            **{"name": "digits", "clients": 8, "partition": "iid", "samples_per_client": 20},
            **{"joins": [[3, 2], [6, 1]], "leaves": [[5, 2]], "join_mass": 0.5},
        },
        "model": {"name": "mlp", "hidden": [8]},
        "topology": {"name": "random_push", "neighbors": 2},
        "run": {"rounds": 8},
    }
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values}
    return tree


def test_who_is_a_member_when() -> None:
    counts = [int(PLAN.find_present(t).sum()) for t in range(12)]
    assert counts == [7] * 5 + [9] * 2 + [7] * 2 + [8] * 3
    assert PLAN.find_joining(5).tolist() == [7, 8]
    assert PLAN.find_joining(9).tolist() == [9]
    gone = PLAN.find_leaving(6)
    assert len(gone) == 2
    assert not any(PLAN.find_present(t)[gone].any() for t in range(7, 20))
    assert set(PLAN.choose_sponsors(5)) <= set(range(7))
    assert not set(PLAN.choose_sponsors(9)) & set(gone.tolist())


@pytest.mark.parametrize("gives_mass", [True, False])
def test_the_graph_of_a_round_is_that_of_its_members(gives_mass: bool) -> None:
    def make(clients: int) -> qv.Topology:
        return random_push(clients=clients, neighbors=2, seed=1)

    topology = pickle.loads(pickle.dumps(with_members(make, PLAN, gives_mass)))
    for t in range(12):
        graph, present = topology(t), PLAN.find_present(t)
        outside = ~present
        assert graph.column_stochastic
        assert np.array_equal(graph.active, present)
        assert np.array_equal(graph.weights[outside][:, outside], np.eye(int(outside.sum())))
        leaving = PLAN.find_leaving(t)
        inside = graph.weights[present][:, present]
        if gives_mass and len(leaving):
            assert (graph.weights[leaving] == 0).all()  # they are given nothing, and keep nothing
        else:
            assert np.array_equal(inside, make(int(present.sum()))(t).weights)


def test_who_leaves_without_a_receiver_that_stays_finds_an_heir() -> None:
    plan = Membership(4, leaves=((2, 3),), seed=0)
    topology = with_members(lambda n: qv.directed_ring(n), plan)
    graph = topology(1)
    (stays,) = np.flatnonzero(plan.find_present(2))
    assert graph.column_stochastic
    assert graph.weights[stays].sum() == 4


@pytest.mark.parametrize("method", ["dfedpgp", "osgp", "dfedpgpsam"])
def test_mass_is_what_was_brought(method: str) -> None:
    """Seven begin with 1 each, three bring a half; those who leave give all they have."""
    run = Experiment.of(configure(method={"name": method})).simulation.run()
    rounds = run.rounds
    brought = [5.0] * 3 + [6.0] * 3 + [6.5] * 2
    assert rounds["members"].tolist() == [5, 5, 5, 7, 7, 5, 6, 6]
    assert np.allclose(rounds["mu_sum"], brought, rtol=0, atol=1e-12)
    history = run.history[run.history["stage"] == "mixed"]
    counted = history.groupby("round")["accuracy"].count().tolist()
    assert counted == rounds["members"].tolist()


def run_for(simulation: Any, rounds: int) -> Any:
    return replace(simulation, settings=replace(simulation.settings, rounds=rounds)).run()


def test_who_has_left_keeps_its_model_and_who_joins_has_a_members() -> None:
    tree = configure(data={"joins": [[1, 2]], "leaves": [[5, 2]]}, run={"rounds": 9})
    simulation = Experiment.of(tree).simulation
    plan = simulation.topology.membership
    early, late = run_for(simulation, 6), run_for(simulation, 9)
    for client in plan.find_leaving(4).tolist():
        before, after = early.parameters(client), late.parameters(client)
        assert all(torch.equal(before[name], after[name]) for name in before)
    # What begins round 1: two newcomers have the shared part of their sponsors, and their mass.
    run = run_for(Experiment.of(configure(data={"joins": [[7, 3]], "leaves": None})).simulation, 8)
    shard, plan = run._shard, Membership(8, joins=((7, 3),), grant=0.5, seed=5)
    members = Members(plan)
    members.begin_round(shard, 7)
    z = shard.state.u / shard.state.mu.to(shard.state.u.dtype).unsqueeze(1)
    for newcomer, sponsor in zip(plan.find_joining(7), plan.choose_sponsors(7), strict=True):
        assert shard.state.mu[newcomer] == 0.5
        assert torch.allclose(z[newcomer], z[sponsor], rtol=1e-6)
        assert not torch.equal(shard.state.v[newcomer], shard.state.v[sponsor])


@pytest.mark.parametrize("method", ["dfedavgm", "dfedsam"])
def test_without_a_mass_members_only_come_and_go(method: str) -> None:
    topology = {"name": "random_regular", "neighbors": 2}
    tree = configure(method={"name": method}, data={"join_mass": 1.0})
    tree["topology"] = topology
    run = Experiment.of(tree).simulation.run()
    assert run.rounds["members"].tolist() == [5, 5, 5, 7, 7, 5, 6, 6]
    assert run.rounds["mu_sum"].isna().all()


def test_a_stopped_run_goes_on_to_the_same_bits() -> None:
    """Stopped in every round in turn, also right before somebody joins and after somebody left."""
    simulation = Experiment.of(configure()).simulation
    whole = simulation.run()
    for stop in range(1, 8):
        kept: list[Any] = []
        rounds = iter(range(1, 9))

        def keep(checkpoint: Any, kept: list[Any] = kept) -> None:
            kept.append(copy.deepcopy(checkpoint))

        def is_over(rounds: Iterator[int] = rounds, stop: int = stop) -> bool:
            return next(rounds) == stop

        with pytest.raises(Stopped):
            simulation.run(checkpoint=keep, stop=is_over)
        resumed = simulation.run(resume=kept[-1])
        for client in range(8):
            one, other = whole.parameters(client), resumed.parameters(client)
            assert all(torch.equal(one[name], other[name]) for name in one)
        assert np.array_equal(whole.rounds["mu_sum"], resumed.rounds["mu_sum"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"joins": [[0, 1]]}}, "a round from 1 on and a number of members"),
        ({"data": {"joins": [[3, 1], [3, 2]]}}, "joins names round 3 twice"),
        ({"data": {"joins": [[3, 8]]}}, "nobody begins the run"),
        ({"data": {"leaves": [[5, 7]]}}, "in round 5 nobody would be left"),
        ({"data": {"leaves": [[8, 1]]}}, "names round 8, and the run has 8 rounds"),
        ({"data": {"join_mass": 2.0}}, "a mass above 0, at most 1"),
        ({"data": {"joins": None}}, r"data\.join_mass needs data\.joins"),
        ({"topology": {"name": "loss_push"}}, "clients choose by what others report"),
        ({"run": {"arithmetic": "peers"}}, r'do not go with run\.arithmetic = "peers"'),
        ({"privacy": {"name": "update"}}, "a newcomer is given a model without noise"),
        ({"method": {"name": "osgp", "delay": 1}}, r"do not go with method\.delay"),
    ],
)
def test_what_members_cannot_do_is_said(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(QuiverError, match=words):
        Experiment.of(configure(**changes)).simulation.check()


def test_a_server_chooses_by_itself() -> None:
    tree = configure(method={"name": "fedavg"}, topology={"name": "star"})
    tree["topology"] = {"name": "star", "sampled": 3}
    with pytest.raises(QuiverError, match="a server chooses who takes part"):
        Experiment.of(tree)


def test_a_graph_that_pulls_loses_who_leaves() -> None:
    plan = Membership(6, leaves=((2, 1),))
    topology = with_members(lambda n: random_pull(clients=n, neighbors=2), plan)
    assert all(topology(t).row_stochastic for t in range(4))
