"""The laws of the design, for every method on several graphs (docs/concepts.md).

A new method is one row in tests/support/small.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import quiverfl as qv
from quadratics import quadratics
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.context import ClientGroup, Place
from quiverfl.engine.exchange import MatrixExchange
from quiverfl.engine.rounds import communicate
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.shard import Shard
from quiverfl.methods.contract import Interleaved, Train
from quiverfl.methods.optional import Weighs
from quiverfl.methods.state import fields_of, roles
from quiverfl.peer.manifest import Manifest
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
ORDER = [3, 0, 5, 1, 4, 2]
"""Of clients: one stays, the others move."""


def counts_epochs(method: Any) -> bool:
    phases = method.phases(tiny_task())
    return any(isinstance(p, Train | Interleaved) and p.epochs is not None for p in phases)


class LinearPair(nn.Module):
    """x·w in two steps, so that there is a body and a head: fixed features, then a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class TwoClasses(LinearPair):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2, bias=False)


def half_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().sum(dim=-1) / 2


def shard_of(method: Any, clients: list[int] | None = None, **options: Any) -> Shard:
    data = tiny_data() if clients is None else tiny_data().only(clients)
    settings = RunSettings(rounds=3, dtype=torch.float64, **options)
    return Shard(tiny_task(), data, method, TRAINING, settings, clients=clients)


def copy(shard: Shard) -> list[torch.Tensor]:
    return [leaf.clone() for leaf in shard.state]


@every_method
def test_1_identity_mixing_is_idle(method: Any) -> None:
    """It leaves the model in use as it is, and a second time leaves the whole state as it is.

    Server state may move at the first merge (SCAFFOLD's c, FedProto's prototypes), and Dis-PFL's
    new mask is applied by it; nothing may move at the second.
    """
    shard, exchange = shard_of(method), MatrixExchange(method.delay)
    shard.train(0, ALL)
    before = [part.clone() for part in shard._personal(np.arange(CLIENTS))]
    alone = qv.isolated(clients=CLIENTS)(0)
    communicate(shard, exchange, alone, 0)
    if not isinstance(method, Weighs):
        assert distance(before, list(shard._personal(np.arange(CLIENTS)))) <= 1e-15
    once = copy(shard)
    communicate(shard, exchange, alone, 1)
    assert distance(once, copy(shard)) <= 1e-15


@every_case
def test_2_agreement_is_kept_by_every_legal_graph(method: Any, graphs: Any) -> None:
    shard = shard_of(method)
    for role in ("shared", "personal", "any"):
        for leaf in fields_of(shard.state, role).values():
            leaf[:] = leaf[0].clone()
    before = shard._personal(np.arange(CLIENTS))
    before = [part.clone() for part in before]
    exchange = MatrixExchange(method.delay)
    for t in range(4):
        communicate(shard, exchange, graphs(CLIENTS)(t), t)
        after = shard._personal(np.arange(CLIENTS))
        assert distance(before, list(after)) <= 1e-14


@every_case
def test_3_permuting_clients_permutes_results(method: Any, graphs: Any) -> None:
    order = ORDER
    plain, permuted = shard_of(method), shard_of(method, order)
    first, second = MatrixExchange(method.delay), MatrixExchange(method.delay)
    for t in range(2):
        graph = graphs(CLIENTS)(t)
        moved = qv.Graph(graph.sparse[order][:, order], graph.active[order], graph.hub)
        plain.train(t, graph.active)
        permuted.train(t, moved.active)
        communicate(plain, first, graph, t)
        communicate(permuted, second, moved, t)
    expected = [leaf[order] for leaf in plain.state]
    assert distance(expected, copy(permuted)) <= 1e-12


@every_case
def test_4_what_is_sent_is_conserved_and_mass_stays_one_where_rows_sum_to_one(
    method: Any, graphs: Any
) -> None:
    """Every leaf of every method: where columns sum to 1, what arrives and flies was sent."""
    shard, exchange = shard_of(method), MatrixExchange(method.delay)
    rows = not method.delay
    balanced = graphs if graphs(CLIENTS)(0).column_stochastic else REGULAR
    for t in range(4):  # a delay of 2 has arrivals in two of them
        graph = balanced(CLIENTS)(t)
        rows = rows and graph.row_stochastic  # in every round so far
        shard.train(t, graph.active)
        outbox = {name: leaf.clone() for name, leaf in shard.outbox().items()}
        flying = exchange.in_flight()
        sent = {name: _total(leaf, flying, name) for name, leaf in outbox.items()}
        exchange.push(t, graph, {name: leaf.clone() for name, leaf in outbox.items()})
        mixed = exchange.collect(t)
        for name, total in sent.items():
            now = _total(mixed[name], exchange.in_flight(), name)
            torch.testing.assert_close(now, total, rtol=0, atol=1e-12)
        shard.deliver(mixed)
        if method.mass is None:
            continue
        mass = getattr(shard.state, method.mass)
        everything = _total(mass, exchange.in_flight(), method.mass)
        assert float(everything) == pytest.approx(CLIENTS, abs=1e-12)
        if rows:
            assert (mass - 1).abs().max() <= 1e-12


def _total(leaf: torch.Tensor, flying: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    away = [tensor.sum(dim=0) for key, tensor in flying.items() if key.endswith("/" + name)]
    return sum(away, start=leaf.sum(dim=0))


@every_method
def test_5_a_part_that_a_phase_does_not_train_is_bit_identical(method: Any) -> None:
    shard = shard_of(method)
    shard.train(0, ALL)
    communicate(shard, MatrixExchange(method.delay), qv.full(clients=CLIENTS)(0), 0)
    group = ClientGroup(np.arange(CLIENTS), shard.ids)
    epochs = np.full(CLIENTS, 2)
    kinds = roles(type(shard.state))
    tried = 0
    for number, phase in enumerate(method.phases(tiny_task())):
        if not isinstance(phase, Train) or phase.part == "whole":
            continue
        before = [leaf.clone() for leaf in shard.state]
        after, *_ = shard.trainer.train(phase, shard.state, group, Place(1, number), epochs)
        changed = {
            kinds[name]
            for name, old, new in zip(shard.state._fields, before, after, strict=True)
            if not torch.equal(old, new)
        }
        assert changed == {phase.part}
        tried += 1
    if tried == 0:
        assert all(getattr(p, "part", "whole") == "whole" for p in method.phases(tiny_task()))


@every_case
def test_6_evaluating_changes_nothing(method: Any, graphs: Any) -> None:
    every = simulate(method, graphs(CLIENTS), rounds=2, evaluate_every=1)
    seldom = simulate(method, graphs(CLIENTS), rounds=2, evaluate_every=2)
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
def test_7_the_loss_falls_on_quadratics(method: Any) -> None:
    """Least squares with a known optimum: the training loss falls by half within thirty rounds."""
    made = quadratics(clients=CLIENTS, dimension=6, samples=12, spread=0.3, seed=2)
    task = qv.Task(model=LinearPair, personal=("head",), loss=half_square, metrics={})
    topology = METHODS[ROWS.index(method)][1][0](CLIENTS)
    options = {"topology": topology, "training": qv.Training(lr=0.05, batch_size=None)}
    options |= {"rounds": 30, "evaluate_every": 30, "dtype": torch.float64, "threads": 1}
    if method.name == "fedproto":  # its prototypes are of classes, which least squares has none of
        with pytest.raises(qv.QuiverError, match="one class label"):
            qv.simulate(task, made.data, method=method, **options)
        labels = (made.data.train.y[:, 0] > 0).long()
        split = replace(made.data.train, y=labels)
        data = qv.FederatedData(split, split, classes=2)
        options["training"] = qv.Training(lr=1.0, batch_size=None)
        task, made = qv.Task(model=TwoClasses), replace(made, data=data)
    method = _for_quadratics(method)
    long = qv.simulate(task, made.data, method=method, **options)
    short = qv.simulate(task, made.data, method=method, **(options | {"rounds": 1}))
    for stage in ("local", "mixed"):
        first, last = (
            run.history[run.history["stage"] == stage]["loss"].mean() for run in (short, long)
        )
        assert last < first / 2
        assert last < 1.5


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
    shard = shard_of(method)
    shard.train(0, ALL)
    leaves = {name: leaf[0].numpy() for name, leaf in shard.outbox().items()}
    if not leaves:
        return
    parameters = [(name, leaf.shape) for name, leaf in sorted(leaves.items())]
    manifest = Manifest.of(leaves, parameters, sparse=isinstance(method, Weighs))
    payload = manifest.pack(leaves)
    assert len(payload) <= int(shard.payload(shard.outbox())[0]) + 8 * len(leaves)
    again = manifest.unpack(payload)
    assert set(again) == set(leaves)
    for name, leaf in leaves.items():
        assert again[name].dtype == leaf.dtype
        assert np.array_equal(again[name], leaf)


@every_case
def test_10_interrupted_and_resumed_equals_uninterrupted(method: Any, graphs: Any) -> None:
    kept: list[Checkpoint] = []
    topology = graphs(CLIENTS)
    whole = simulate(method, topology, rounds=4, checkpoint=kept.append, checkpoint_every=1)
    resumed = simulate(method, graphs(CLIENTS), rounds=4, resume=kept[1])
    assert all(torch.equal(a, b) for a, b in zip(states(whole), states(resumed), strict=True))
    assert whole.history.equals(resumed.history)
    for client in range(CLIENTS):
        one, other = (r.personal(client, stage="local").state_dict() for r in (whole, resumed))
        assert all(torch.equal(one[name], other[name]) for name in one)


@every_case
def test_11_vectorised_equals_one_by_one(method: Any, graphs: Any) -> None:
    options: dict[str, Any] = {"rounds": 2}
    if counts_epochs(method):
        options["epochs_per_client"] = [1, 2, 3, 1, 2, 3]
    together = simulate(method, graphs(CLIENTS), executor="vectorized", **options)
    alone = simulate(method, graphs(CLIENTS), executor="sequential", **options)
    assert distance(states(together), states(alone)) <= 1e-12
    columns = ["accuracy", "loss"]
    difference = (together.history[columns] - alone.history[columns]).abs().max()
    assert (difference <= 1e-12).all()


@every_case
def test_12_one_shard_equals_several_equals_lone_peers(method: Any, graphs: Any) -> None:
    whole = states(simulate(method, graphs(CLIENTS), rounds=3, evaluate_every=3))
    for parts in ([[0, 1, 2], [3, 4, 5]], [[client] for client in range(CLIENTS)]):
        assert distance(whole, _in_parts(method, graphs, parts)) <= 1e-12


def _in_parts(method: Any, graphs: Any, parts: list[list[int]]) -> list[torch.Tensor]:
    """The states after three rounds on shards of these clients."""
    shards = [shard_of(method, part) for part in parts]
    exchange = MatrixExchange(method.delay)
    for t in range(3):
        graph = graphs(CLIENTS)(t)
        for part, shard in zip(parts, shards, strict=True):
            shard.train(t, graph.active[part], share=float(graph.active.mean()))
        outboxes = [shard.outbox() for shard in shards]
        joined = {name: torch.cat([box[name] for box in outboxes]) for name in outboxes[0]}
        exchange.push(t, graph, joined)
        mixed = exchange.collect(t)
        for part, shard in zip(parts, shards, strict=True):
            shard.deliver({name: leaf[part] for name, leaf in mixed.items()})
    return [torch.cat(leaves) for leaves in zip(*(s.state for s in shards), strict=True)]


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
    first, again = (simulate(method, topology, rounds=2) for _ in range(2))
    other = simulate(method, topology, rounds=2, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(states(first), states(again), strict=True))
    assert distance(states(first), states(other)) > 1e-3


@every_method
def test_threads_change_nothing_beyond_rounding(method: Any) -> None:
    topology = METHODS[ROWS.index(method)][1][0](CLIENTS)
    one, two = (simulate(method, topology, rounds=1, threads=n) for n in (1, 2))
    assert distance(states(one), states(two)) <= 1e-12
