"""The laws of the design, for every method on several graphs (docs/explanation/concepts.md).

A new method is one row in tests/support/small.py. What is measured is in quiverfl.laws, which
methods outside of the package are checked by, too; tolerances here are tighter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import quiverfl as qv
from quiverfl.engine.exchange.exchange import Exchange
from quiverfl.engine.exchange.matrix import MatrixProduct
from quiverfl.engine.local.context import ClientGroup, PhaseIndex
from quiverfl.engine.rounds import exchange_messages
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.shard import Shard
from quiverfl.laws import round_laws, run_laws
from quiverfl.laws.problem import Case
from quiverfl.laws.round_laws import changed_by
from quiverfl.laws.run_laws import counts_epochs, least_squares, losses_after, two_classes
from quiverfl.methods.contract import Interleaved, Train
from quiverfl.methods.state import field_roles
from quiverfl.topologies.topology import find_offline
from small import (
    CLIENTS,
    METHODS,
    REGULAR,
    TRAINING,
    distance,
    simulate,
    states,
    tiny_data,
    tiny_task,
)

ROWS = [method for method, _ in METHODS]
CASES = [(method, graphs) for method, choices in METHODS for graphs in choices]
every_method = pytest.mark.parametrize("method", ROWS, ids=str)
every_case = pytest.mark.parametrize(
    ("method", "graphs"), CASES, ids=[f"{m}-{g(6).name}" for m, g in CASES]
)
ALL = np.ones(CLIENTS, dtype=bool)


def shard_of(method: Any, **options: Any) -> Shard:
    settings = RunSettings(rounds=3, dtype=torch.float64, **options)
    return Shard(tiny_task(), tiny_data(), method, TRAINING, settings)


def copy(shard: Shard) -> list[torch.Tensor]:
    return [leaf.clone() for leaf in shard.state]


def case_of(method: Any, graphs: Any = REGULAR) -> Case:
    return Case(method, graphs(CLIENTS))


@every_method
def test_1_identity_mixing_is_idle(method: Any) -> None:
    """It leaves the model in use as it is, and a second time leaves the whole state as it is.

    Server state may move at the first merge (SCAFFOLD's c, FedProto's prototypes), and Dis-PFL's
    new mask is applied by it; nothing may move at the second.
    """
    assert round_laws.identity_mixing(case_of(method), tolerance=1e-15, whole=True) is None


@every_case
def test_2_agreement_is_kept_by_every_legal_graph(method: Any, graphs: Any) -> None:
    assert round_laws.agreement(case_of(method, graphs), tolerance=1e-14) is None


@every_case
def test_3_permuting_clients_permutes_results(method: Any, graphs: Any) -> None:
    assert round_laws.permutation(case_of(method, graphs), tolerance=1e-12) is None


@every_case
def test_4_what_is_sent_is_conserved_and_mass_stays_one_where_rows_sum_to_one(
    method: Any, graphs: Any
) -> None:
    """Every leaf of every method: where columns sum to 1, what arrives and flies was sent."""
    assert round_laws.conservation(case_of(method, graphs), tolerance=1e-12) is None


@every_method
def test_5_a_part_that_a_phase_does_not_train_is_bit_identical(method: Any) -> None:
    """And nothing but the fields of the part that it trains changes."""
    assert round_laws.untrained_parts(case_of(method)) is None
    shard = case_of(method).shard()
    shard.train(0, ALL)
    kinds = field_roles(type(shard.state))
    tried = 0
    for number, phase in enumerate(method.phases(tiny_task())):
        if not isinstance(phase, Train) or phase.part == "whole":
            continue
        changed, point_moved = changed_by(shard, phase, number)
        assert {kinds[name] for name in changed} == {phase.part}
        assert not point_moved
        tried += 1
    if tried == 0:
        assert all(getattr(p, "part", "whole") == "whole" for p in method.phases(tiny_task()))


@every_case
def test_6_evaluating_changes_nothing(method: Any, graphs: Any) -> None:
    assert run_laws.evaluating(case_of(method, graphs)) is None


@every_case
def test_8_inactive_clients_are_not_trained(method: Any, graphs: Any) -> None:
    case = case_of(method, graphs)
    assert round_laws.inactive_clients(case) is None
    shard = case.shard()
    shard.train(0, round_laws.SOME)
    assert (shard.steps[~round_laws.SOME] == 0).all()
    assert (shard.steps[round_laws.SOME] > 0).all()


@every_method
def test_7_the_loss_falls_on_quadratics(method: Any) -> None:
    """Least squares with a known optimum: the training loss falls by half within thirty rounds."""
    topology = METHODS[ROWS.index(method)][1][0](CLIENTS)
    problem = least_squares()
    if method.name in ("fedproto", "fedrod", "fedas", "feddbe"):  # no classes, no bias
        with pytest.raises(
            qv.QuiverError, match=r"one class label|linear layer with a bias|balanced softmax"
        ):
            losses_after(method, topology, 30, problem)
        problem = two_classes()
    method = _for_quadratics(method)
    long, short = (losses_after(method, topology, rounds, problem) for rounds in (30, 1))
    for stage in ("local", "mixed"):
        assert long[stage] < short[stage] / 2
        assert long[stage] < 1.5
    assert run_laws.falling_loss(Case(method, topology)) is None


def _for_quadratics(method: Any) -> Any:
    """Half of a linear map's weights cannot fit it, and λ = 2 is weaker than its curvature."""
    if method.name == "dispfl":
        return replace(method, density=1.0)
    if method.name == "pfedme":
        return replace(method, proximal=5.0)
    return method


@every_method
def test_9_a_message_survives_the_wire_format(method: Any) -> None:
    """The peers' own: what they pack and unpack."""
    assert round_laws.wire_format(case_of(method)) is None


@every_case
def test_10_interrupted_and_resumed_equals_uninterrupted(method: Any, graphs: Any) -> None:
    assert run_laws.resuming(case_of(method, graphs)) is None


@every_case
def test_11_vectorised_equals_one_by_one(method: Any, graphs: Any) -> None:
    assert run_laws.vectorising(case_of(method, graphs), tolerance=1e-12) is None


@every_case
def test_12_one_shard_equals_several_equals_lone_peers(method: Any, graphs: Any) -> None:
    case = case_of(method, graphs)
    assert round_laws.several_shards(case, tolerance=1e-12) is None
    whole = states(case.run(evaluate_every=3))
    by_hand = round_laws.in_parts(case, [list(range(CLIENTS))])
    assert distance(whole, list(by_hand.values())) <= 1e-12


@every_case
def test_who_is_offline_keeps_the_whole_state(method: Any, graphs: Any) -> None:
    """After two rounds with everybody, in which servers' state has come to all of them."""
    if graphs(CLIENTS)(0).hub:
        graphs = REGULAR
    shard, exchange = shard_of(method), Exchange(MatrixProduct())
    for t in range(2):
        shard.train(t, ALL)
        exchange_messages(shard, exchange, qv.full(clients=CLIENTS)(t), t)
    away = np.zeros(CLIENTS, dtype=bool)
    for t in range(2, 6):
        graph = qv.participating(graphs(CLIENTS), fraction=0.5, seed=5)(t)
        shard.train(t, graph.active)
        before = copy(shard)
        exchange_messages(shard, exchange, graph, t)
        gone = find_offline(graph)
        for old, new in zip(before, shard.state, strict=True):
            torch.testing.assert_close(new[gone], old[gone], rtol=1e-13, atol=1e-15)
        away |= gone
    assert away.any()


@every_method
def test_who_takes_no_step_keeps_the_state(method: Any) -> None:
    """Clients 2 and 4 have no epochs, beside others who have some; law 11 is tried so, too."""
    if not counts_epochs(method):
        return
    idle, epochs = [2, 4], np.array([1, 2, 0, 1, 0, 3])
    shard = shard_of(method, epochs_per_client=tuple(epochs.tolist()))
    exchange, group = (
        Exchange(MatrixProduct(method.delay)),
        ClientGroup(np.arange(CLIENTS), shard.ids),
    )
    tried = 0
    for t in range(3):
        for number, phase in enumerate(method.phases(tiny_task())):
            if not isinstance(phase, Train | Interleaved) or not phase.trains_message:
                continue
            before = copy(shard)
            state, place = shard.state, PhaseIndex(t, number)
            after, steps, _ = shard.trainer.train(phase, state, group, place, epochs)
            assert (np.flatnonzero(steps == 0) == idle).all()
            assert all(
                torch.equal(old[idle], new[idle]) for old, new in zip(before, after, strict=True)
            )
            tried += 1
        shard.train(t, ALL)
        exchange_messages(shard, exchange, qv.full(clients=CLIENTS)(t), t)
    assert tried


@every_method
def test_what_is_sent_is_given_away(method: Any) -> None:
    """Merge must not read a field that was sent as it stands: the exchange mixes in its memory."""
    shard = case_of(method).shard()
    shard.train(0, ALL)
    own = {leaf.data_ptr() for leaf in shard.state}
    outbox = shard.outbox()
    mixed = {name: leaf.clone() for name, leaf in outbox.items()}
    expected = case_of(method).shard()
    expected.train(0, ALL)
    expected.merge({name: leaf.clone() for name, leaf in mixed.items()})
    for leaf in outbox.values():
        if leaf.data_ptr() in own:
            leaf.fill_(float("nan"))
    shard.merge(mixed)
    assert distance(list(expected.state), list(shard.state)) == 0


@every_method
def test_the_same_seed_gives_the_same_run_and_another_seed_another(method: Any) -> None:
    topology = METHODS[ROWS.index(method)][1][0](CLIENTS)
    assert run_laws.reproducing(Case(method, topology)) is None
    first, again = (simulate(method, topology, rounds=2) for _ in range(2))
    other = simulate(method, topology, rounds=2, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(states(first), states(again), strict=True))
    assert distance(states(first), states(other)) > 1e-3


@every_method
def test_threads_change_nothing_beyond_rounding(method: Any) -> None:
    topology = METHODS[ROWS.index(method)][1][0](CLIENTS)
    one, two = (simulate(method, topology, rounds=1, threads=n) for n in (1, 2))
    assert distance(states(one), states(two)) <= 1e-12
