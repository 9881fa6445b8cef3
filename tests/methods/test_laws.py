"""The laws of the design, for every method on several graphs (docs/concepts.md).

A new method is one row in tests/support/small.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

import quiverfl as qv
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.exchange import MatrixExchange
from quiverfl.engine.history import History
from quiverfl.engine.phases import Group
from quiverfl.engine.rounds import mix
from quiverfl.engine.shard import Shard
from quiverfl.methods.contract import Train
from small import (
    CLIENTS,
    METHODS,
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


def shard_of(method: Any, clients: list[int] | None = None, **options: Any) -> Shard:
    data = tiny_data() if clients is None else tiny_data().only(clients)
    return Shard(
        tiny_task(),
        data,
        method,
        TRAINING,
        rounds=3,
        clients=clients,
        dtype=torch.float64,
        **options,
    )


def copy(shard: Shard) -> list[torch.Tensor]:
    return [leaf.clone() for leaf in shard.state]


@every_method
def test_1_identity_mixing_leaves_the_state_unchanged(method: Any) -> None:
    shard = shard_of(method)
    shard.train(0, ALL)
    if hasattr(shard.state, "next_mask_u"):  # Dis-PFL: apart from its new mask
        shard.state.next_mask_u.copy_(shard.state.mask_u)
        shard.state.next_mask_v.copy_(shard.state.mask_v)
    before = copy(shard)
    mix(shard, MatrixExchange(method.delay), qv.isolated(clients=CLIENTS)(0), 0)
    assert distance(before, copy(shard)) <= 1e-15


@every_case
def test_2_agreement_is_kept_by_every_legal_graph(method: Any, graphs: Any) -> None:
    shard = shard_of(method)
    for name, leaf in shard.state._asdict().items():
        if name != "samples":
            leaf[:] = leaf[0].clone()
    before = shard._personal(np.arange(CLIENTS))
    before = [part.clone() for part in before]
    exchange = MatrixExchange(method.delay)
    for t in range(4):
        mix(shard, exchange, graphs(CLIENTS)(t), t)
        after = shard._personal(np.arange(CLIENTS))
        assert distance(before, list(after)) <= 1e-14


@every_case
@given(order=st.permutations(range(CLIENTS)))
@settings(max_examples=3, deadline=None)
def test_3_permuting_clients_permutes_results(method: Any, graphs: Any, order: list[int]) -> None:
    plain, permuted = shard_of(method), shard_of(method, order)
    first, second = MatrixExchange(method.delay), MatrixExchange(method.delay)
    for t in range(2):
        graph = graphs(CLIENTS)(t)
        moved = qv.Graph(graph.sparse[order][:, order], graph.active[order], graph.hub)
        plain.train(t, graph.active)
        permuted.train(t, moved.active)
        mix(plain, first, graph, t)
        mix(permuted, second, moved, t)
    expected = [leaf[order] for leaf in plain.state]
    assert distance(expected, copy(permuted)) <= 1e-12


@pytest.mark.parametrize(
    ("method", "graphs"),
    [case for case in CASES if case[0].name in ("osgp", "dfedpgp")],
    ids=[f"{m}-{g(6).name}" for m, g in CASES if m.name in ("osgp", "dfedpgp")],
)
def test_4_mass_is_conserved_and_mu_stays_one_where_rows_sum_to_one(
    method: Any, graphs: Any
) -> None:
    shard, exchange = shard_of(method), MatrixExchange(method.delay)
    rows = not method.delay
    for t in range(6):
        graph = graphs(CLIENTS)(t)
        rows = rows and graph.row_stochastic  # in every round so far
        shard.train(t, graph.active)
        mass, values = float(_total(shard, exchange, "mu")), _total(shard, exchange, "u")
        mix(shard, exchange, graph, t)
        if graph.column_stochastic:
            assert _total(shard, exchange, "mu") == pytest.approx(mass, abs=1e-12)
            torch.testing.assert_close(_total(shard, exchange, "u"), values, rtol=0, atol=1e-12)
            assert mass == pytest.approx(CLIENTS, abs=1e-12)
        if rows:
            assert (shard.state.mu - 1).abs().max() <= 1e-12


def _total(shard: Shard, exchange: MatrixExchange, field: str) -> torch.Tensor:
    flying = [leaf for name, leaf in exchange.in_flight().items() if name.endswith("/" + field)]
    return sum((leaf.sum(dim=0) for leaf in flying), start=getattr(shard.state, field).sum(dim=0))


@every_method
def test_5_a_part_that_a_phase_does_not_train_is_bit_identical(method: Any) -> None:
    shard = shard_of(method)
    shard.train(0, ALL)
    mix(shard, MatrixExchange(method.delay), qv.full(clients=CLIENTS)(0), 0)
    group = Group(np.arange(CLIENTS), shard.ids)
    epochs = np.full(CLIENTS, 2)
    tried = 0
    for number, phase in enumerate(method.phases(tiny_task())):
        if not isinstance(phase, Train) or phase.part == "whole":
            continue
        before = [leaf.clone() for leaf in shard.state]
        after, _ = shard.trainer.train(phase, number, shard.state, group, 1, epochs)
        frozen = "v" if phase.part == "shared" else "u"
        changed = {
            name
            for name, old, new in zip(shard.state._fields, before, after, strict=True)
            if not torch.equal(old, new)
        }
        assert changed == {"u" if frozen == "v" else "v"}
        tried += 1
    if tried == 0:
        assert all(getattr(p, "part", "whole") == "whole" for p in method.phases(tiny_task()))


@every_case
def test_6_evaluating_changes_nothing(method: Any, graphs: Any) -> None:
    every = simulate(method, graphs(CLIENTS), evaluate_every=1)
    seldom = simulate(method, graphs(CLIENTS), evaluate_every=3)
    assert all(torch.equal(a, b) for a, b in zip(states(every), states(seldom), strict=True))
    shard = every._shard
    before = copy(shard)
    shard.evaluate(3, "mixed")
    shard.evaluate(3, "local")
    assert all(torch.equal(a, b) for a, b in zip(before, shard.state, strict=True))


@every_case
def test_8_inactive_clients_are_not_trained(method: Any, graphs: Any) -> None:
    shard = shard_of(method)
    active = np.array([True, False, True, False, False, True])
    before = copy(shard)
    shard.train(0, active)
    for old, new in zip(before, shard.state, strict=True):
        assert torch.equal(old[~active], new[~active])
    assert (shard.steps[~active] == 0).all()
    assert (shard.steps[active] > 0).all()


@every_method
def test_9_a_message_survives_the_wire_format(method: Any) -> None:
    shard = shard_of(method)
    shard.train(0, ALL)
    outbox = shard.outbox()
    again = load(save({name: leaf.contiguous() for name, leaf in outbox.items()}))
    assert set(again) == set(outbox)
    for name, leaf in outbox.items():
        assert again[name].dtype == leaf.dtype
        assert torch.equal(again[name], leaf)


@every_case
def test_10_interrupted_and_resumed_equals_uninterrupted(method: Any, graphs: Any) -> None:
    kept: list[Checkpoint] = []

    def keep(checkpoint: Checkpoint) -> None:
        tensors = {name: leaf.clone() for name, leaf in checkpoint.tensors.items()}
        history = History(list(checkpoint.history.evaluations), list(checkpoint.history.records))
        kept.append(Checkpoint(checkpoint.round, tensors, dict(checkpoint.local_metrics), history))

    whole = simulate(method, graphs(CLIENTS), rounds=5, checkpoint=keep, checkpoint_every=1)
    resumed = simulate(method, graphs(CLIENTS), rounds=5, resume=kept[1])
    assert all(torch.equal(a, b) for a, b in zip(states(whole), states(resumed), strict=True))
    assert whole.history.equals(resumed.history)
    for client in range(CLIENTS):
        one, other = (r.personal(client, stage="local").state_dict() for r in (whole, resumed))
        assert all(torch.equal(one[name], other[name]) for name in one)


@every_case
def test_11_vectorised_equals_one_by_one(method: Any, graphs: Any) -> None:
    options = {"epochs_per_client": [1, 2, 3, 1, 2, 3]}
    together = simulate(method, graphs(CLIENTS), executor="vectorized", **options)
    alone = simulate(method, graphs(CLIENTS), executor="sequential", **options)
    assert distance(states(together), states(alone)) <= 1e-12
    columns = ["accuracy", "loss"]
    difference = (together.history[columns] - alone.history[columns]).abs().max()
    assert (difference <= 1e-12).all()


@every_case
@pytest.mark.parametrize("parts", [[[0, 1, 2], [3, 4, 5]], [[c] for c in range(CLIENTS)]])
def test_12_one_shard_equals_several_equals_lone_peers(
    method: Any, graphs: Any, parts: list[list[int]]
) -> None:
    whole = simulate(method, graphs(CLIENTS), rounds=3)
    shards = [shard_of(method, part) for part in parts]
    exchange = MatrixExchange(method.delay)
    for t in range(3):
        graph = graphs(CLIENTS)(t)
        for part, shard in zip(parts, shards, strict=True):
            shard.train(t, graph.active[part])
        outboxes = [shard.outbox() for shard in shards]
        joined = {name: torch.cat([box[name] for box in outboxes]) for name in outboxes[0]}
        exchange.push(t, graph, joined)
        mixed = exchange.collect(t)
        for part, shard in zip(parts, shards, strict=True):
            shard.deliver({name: leaf[part] for name, leaf in mixed.items()})
    joined_states = [torch.cat(leaves) for leaves in zip(*(s.state for s in shards), strict=True)]
    assert distance(states(whole), joined_states) <= 1e-12


@every_method
def test_what_is_sent_is_given_away(method: Any) -> None:
    """Merge must not read a field that was sent as it stands: the exchange mixes in its memory."""
    shard = shard_of(method)
    shard.train(0, ALL)
    own = {leaf.data_ptr() for leaf in shard.state}
    outbox = shard.outbox()
    mixed = {name: leaf.clone() for name, leaf in outbox.items()}
    expected = shard_of(method)
    expected.train(0, ALL)
    expected.deliver({name: leaf.clone() for name, leaf in mixed.items()})
    for leaf in outbox.values():
        if leaf.data_ptr() in own:
            leaf.fill_(float("nan"))
    shard.deliver(mixed)
    assert distance(copy(expected), copy(shard)) == 0


@every_method
def test_the_same_seed_gives_the_same_run_and_another_seed_another(method: Any) -> None:
    topology = METHODS[ROWS.index(method)][1][0](CLIENTS)
    first, again = simulate(method, topology), simulate(method, topology)
    other = simulate(method, topology, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(states(first), states(again), strict=True))
    assert distance(states(first), states(other)) > 1e-3


@every_method
def test_threads_change_nothing_beyond_rounding(method: Any) -> None:
    topology = METHODS[ROWS.index(method)][1][0](CLIENTS)
    one, two = (simulate(method, topology, threads=n) for n in (1, 2))
    assert distance(states(one), states(two)) <= 1e-12
