"""Every decentralized method between peers: what `simulate` computes, bit for bit (law 12)."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import quiverfl as qv
from quiverfl.engine.checks.peers import choose_message_split
from quiverfl.engine.evaluation import client_model
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.shard import Shard
from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.audit import AuditReport, audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.accounts.store import NoStore, Store, Trace
from quiverfl.peer.context import Agreement, Limits, PeerContext
from quiverfl.peer.folder import Settings
from quiverfl.peer.learner import ShardLearner
from quiverfl.peer.link.roster import ROSTER, Roster
from quiverfl.peer.node import Node
from quiverfl.peer.setup import create_store
from quiverfl.topologies import Topology
from quiverfl.transforms import PLAIN, Transforms
from small import (
    AWAY,
    METHODS,
    PULL,
    PUSH,
    REGULAR,
    SIZES,
    SOME,
    TRAINING,
    normed_task,
    tiny_data,
    tiny_task,
)

from .swarm import make_folders

ROUNDS = 4
DECENTRALIZED = [m for m, _ in METHODS if m.topology != "star" and not m.delay]
Mode = Literal["sync", "async"]
ONE_PUSH = lambda m: qv.random_push(clients=m, neighbors=1, seed=0)  # noqa: E731
ONE_PULL = lambda m: qv.random_pull(clients=m, neighbors=1, seed=0)  # noqa: E731


def node_on(
    folder: Path,
    method: Any,
    topology: Topology,
    dtype: torch.dtype,
    mode: Mode = "sync",
    transforms: Transforms = PLAIN,
    trace: Trace = lambda point: None,
    task: qv.Task | None = None,
) -> Node:
    """A peer with the small federation's client of its number."""
    roster = Roster.read(folder / ROSTER)
    number, task = roster.number(folder.name), task or tiny_task()
    settings = RunSettings(rounds=ROUNDS, dtype=dtype, executor="sequential", threads=1)
    data = tiny_data(SIZES[: topology.clients]).select([number])
    private = transforms.privacy if isinstance(transforms.privacy, qv.DPSGD) else None
    shard = Shard(task, data, method, TRAINING, settings, clients=[number], private=private)
    learner = ShardLearner(shard, task, method, transforms, topology.clients, topology.reports)
    agreement = Agreement(roster.run, folder.name, "c" * 64, learner.manifest)
    try:
        store = Store.open(folder / "store", trace)
    except NoStore:
        store = create_store(folder / "store", learner, agreement, trace)
    how = Settings(
        rounds=ROUNDS,
        mode=mode,
        linger=20.0,
        bind=roster.member(folder.name).address,
        copies=choose_message_split(method, topology, ROUNDS) == "copies",
        rule=transforms.robustness,
    )
    lines: list[dict[str, Any]] = []
    ctx = PeerContext.open(folder, store, agreement, Limits(retry_cap=2.0), trace)
    node = Node(ctx, learner, topology, how, lines.append)
    node.lines = lines  # type: ignore[attr-defined]
    return node


@dataclass
class Played:
    nodes: list[Node]
    states: list[Any]
    report: AuditReport
    first: float  # the mean loss on the training data before the first round

    def field(self, name: str) -> torch.Tensor:
        return torch.stack([getattr(state, name)[0] for state in self.states])


def play_peers(
    root: Path,
    method: Any,
    topology: Topology,
    dtype: torch.dtype = torch.float64,
    mode: Mode = "sync",
    transforms: Transforms = PLAIN,
    task: qv.Task | None = None,
) -> Played:
    folders = make_folders(root, topology.clients)

    async def scenario() -> tuple[list[Node], float]:
        nodes = [
            node_on(folder, method, topology, dtype, mode, transforms, task=task)
            for folder in folders
        ]
        first = float(np.mean([training_loss(node) for node in nodes]))
        outcomes = await asyncio.wait_for(asyncio.gather(*(node.run() for node in nodes)), 120)
        for node, outcome in zip(nodes, outcomes, strict=True):
            node.store.close()
            assert outcome.finished, outcome
        return nodes, first

    nodes, first = asyncio.run(scenario())
    report = audit([read_statement(folder / "store") for folder in folders])
    return Played(nodes, [node.learner._shard.state for node in nodes], report, first)


def training_loss(node: Node) -> float:
    model: nn.Module = node.learner._task.model().double().eval()
    split = tiny_data().train.select([node.number])
    leaves = {name: torch.from_numpy(leaf).double() for name, leaf in node.learner.model().items()}
    model.load_state_dict(leaves)
    return nn.functional.cross_entropy(model(split.x.double()), split.y).item()


def simulated(
    method: Any,
    topology: Topology,
    dtype: torch.dtype,
    task: qv.Task | None = None,
    **options: Any,
) -> qv.Run:
    return qv.simulate(
        task or tiny_task(),
        tiny_data(SIZES[: topology.clients]),
        method=method,
        topology=topology,
        training=TRAINING,
        rounds=ROUNDS,
        dtype=dtype,
        threads=1,
        **options,
    )


def same_as_simulated(
    played: Played,
    method: Any,
    topology: Topology,
    dtype: torch.dtype,
    transforms: Transforms = PLAIN,
    task: qv.Task | None = None,
) -> None:
    run = simulated(method, topology, dtype, task, arithmetic="peers", **vars(transforms))
    for name, leaf in run._shard.state._asdict().items():
        assert torch.equal(played.field(name), leaf), name
    for number, node in enumerate(played.nodes):
        mine = run.history[run.history.client == number]
        for line in node.lines:  # type: ignore[attr-defined]
            for stage in ("local", "mixed"):
                there = mine[(mine["round"] == line["round"]) & (mine.stage == stage)]
                for metric, value in line[stage].items():
                    assert value == there[metric].item(), (number, line["round"], stage, metric)
    assert played.report.passed, played.report.problems
    assert played.report.units == topology.clients * UNIT


def same_states(nodes: Any, method: Any, topology: Topology) -> None:
    """Of peers that were stopped and started again, so that their history has a gap."""
    run = simulated(method, topology, torch.float64, arithmetic="peers")
    for name, leaf in run._shard.state._asdict().items():
        found = torch.stack([getattr(node.learner._shard.state, name)[0] for node in nodes])
        assert torch.equal(found, leaf), name


FEW = [
    (qv.DFedAvgM(epochs=1), qv.ring(4)),
    (qv.DisPFL(epochs=1), qv.ring(4)),
    (qv.PushDIGing(), ONE_PUSH(3)),
    (qv.DFedPGP(shared_epochs=1), ONE_PULL(3)),
]


@pytest.mark.parametrize(("method", "topology"), FEW, ids=[m.name for m, _ in FEW])
def test_sync_peers_equal_the_simulation(tmp_path: Path, method: Any, topology: Topology) -> None:
    """Without and with a mass, sparse, by shares and by copies; float32, over gRPC."""
    played = play_peers(tmp_path, method, topology, torch.float32)
    same_as_simulated(played, method, topology, torch.float32)


@pytest.mark.parametrize("buffers", ["personal", "mixed"])
def test_batch_norm_between_three_peers(tmp_path: Path, buffers: Any) -> None:
    """Statistics stay at the peer, or travel as one more leaf; a restart finds them again."""
    topology, method = ONE_PUSH(3), qv.DFedPGP(shared_epochs=1)
    task = normed_task(buffers=buffers)
    played = play_peers(tmp_path, method, topology, torch.float32, task=task)
    same_as_simulated(played, method, topology, torch.float32, task=task)
    run = simulated(method, topology, torch.float32, task, arithmetic="peers")
    for number, node in enumerate(played.nodes):
        learner: Any = node.learner
        assert torch.equal(learner._shard.statistics[0], run._shard.statistics[number])
        assert ("running_statistics" in learner.message()) == (buffers == "mixed")
        rest, exported = learner.rest(), learner.model()
        learner._shard.statistics.zero_()
        learner.restore(rest)
        assert torch.equal(learner._shard.statistics[0], run._shard.statistics[number])
        wanted = run.parameters(number)
        assert exported.keys() == wanted.keys()
        assert (exported["body.2.running_var"] == wanted["body.2.running_var"].numpy()).all()


GRAPHS = {
    REGULAR: "regular",
    PUSH: "push",
    PULL: "pull",
    SOME: "some away",
    AWAY: "push, some away",
}
EVERY = [
    (method, graphs, dtype)
    for method in DECENTRALIZED
    for graphs in GRAPHS
    for dtype in (torch.float32, torch.float64)
    if method.mass is not None or method.topology == "isolated" or graphs not in (PUSH, AWAY)
]


def called(value: Any) -> str:
    """A parameter in the name of a case."""
    return GRAPHS.get(value) or str(value)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "graphs", "dtype"), EVERY, ids=called)
def test_every_method_equals_its_simulation_on_every_graph(
    tmp_path: Path, method: Any, graphs: Any, dtype: torch.dtype
) -> None:
    played = play_peers(tmp_path, method, graphs(4), dtype)
    same_as_simulated(played, method, graphs(4), dtype)


class GossipState(NamedTuple):
    u: qv.Shared
    v: qv.Personal
    m_u: qv.Shared
    samples: qv.Scalar


@dataclass(frozen=True)
class WeightedGossip(qv.Method[GossipState]):
    """One's own method: sample-weighted, a merge with memory, an optimizer that lives on."""

    name = "weighted"
    title = "Weighted gossip"
    topology = "random_regular"

    def init(self, task: qv.Task, start: qv.Start) -> GossipState:
        point, samples = start.params, torch.tensor(float(start.samples), dtype=torch.float64)
        return GossipState(*point, torch.zeros_like(point.shared), samples)

    def phases(self, task: qv.Task) -> tuple[Any, ...]:
        return (
            qv.Train(
                part="whole",
                epochs=1,
                params=self.personal,
                update=lambda state, t: state._replace(u=t.shared, v=t.personal),
                keep_optimizer=True,
            ),
        )

    def message(self, state: GossipState) -> qv.Message:
        return {"u": state.samples.to(state.u.dtype) * state.u, "n": state.samples.clone()}

    def merge(self, state: GossipState, mixed: qv.Message) -> GossipState:
        mean = mixed["u"] / mixed["n"].to(mixed["u"].dtype)
        m_u = 0.5 * state.m_u + (mean - state.u)
        return state._replace(u=state.u + m_u, m_u=m_u)

    def personal(self, state: GossipState) -> qv.Params:
        return qv.Params(state.u, state.v)


def test_a_restart_in_the_middle_of_a_round_merges_once(tmp_path: Path) -> None:
    """Two peers push and wait for the third, which is not there; then all start again.

    The method is one's own: its merge reads what it sent, and is not the same when done twice; its
    optimizer lives on; and a peer that does not train keeps its last model for stage `local`.
    """
    method, topology = WeightedGossip(), qv.participating(qv.ring(3), fraction=0.7, seed=1)
    folders = make_folders(tmp_path, 3)

    async def scenario() -> list[Node]:
        waiting = _waits_for_another(topology)
        first = [node_on(folder, method, topology, torch.float64) for folder in folders]
        tasks = [asyncio.create_task(first[number].run()) for number in waiting]
        while not all(first[number].state == "waiting" for number in waiting):
            assert not any(task.done() for task in tasks)
            await asyncio.sleep(0.01)
        for number in waiting:
            first[number].stop()
        await asyncio.gather(*tasks)
        assert any(first[number].transactions.accounts.pushed for number in waiting)
        for node in first:
            node.store.close()
        nodes = [node_on(folder, method, topology, torch.float64) for folder in folders]
        await asyncio.wait_for(asyncio.gather(*(node.run() for node in nodes)), 60)
        for node in nodes:
            node.store.close()
        return nodes

    nodes = asyncio.run(scenario())
    same_states(nodes, method, topology)
    kept = [node.learner.rest() for node in nodes]
    assert any("optimizer/0/momentum" in name for rest in kept for name in rest), kept[0].keys()


def _waits_for_another(topology: Topology) -> list[int]:
    """Two clients, one of which gets from the third in the first round it talks in."""
    for round in range(ROUNDS):
        pairs = {(int(r), int(s)) for r, s in zip(*topology(round).sparse.nonzero(), strict=True)}
        for receiver, sender in sorted(pairs):
            if receiver != sender:
                return [number for number in range(3) if number != sender]
    raise AssertionError("nobody talks on this graph")


@pytest.mark.parametrize(
    ("method", "topology"),
    [
        (qv.DFedAvgM(epochs=0), qv.ring(3)),
        (qv.DFedPGP(0, 0), ONE_PULL(3)),
        (qv.DisPFL(epochs=0), qv.ring(3)),
    ],
    ids=["shares", "copies", "sparse"],
)
def test_async_peers_average(tmp_path: Path, method: Any, topology: Topology) -> None:
    """Nobody trains: what is averaged stays in the hull, and shares keep the mean of all."""
    folders = make_folders(tmp_path, 3)

    async def scenario() -> tuple[list[Any], list[Node]]:
        nodes = [node_on(folder, method, topology, torch.float64, "async") for folder in folders]
        chance = torch.Generator().manual_seed(1)
        for node in nodes:
            shard = node.learner._shard
            changed = torch.randn(shard.state.u.shape, generator=chance, dtype=torch.float64)
            masks = getattr(shard.state, "mask_u", torch.ones_like(changed))
            shard.state = shard.state._replace(u=changed * masks)
            memory = node.transactions.memory
            node.transactions.memory = replace(memory, message=node.learner.message())
        before = [node.learner._shard.state.u[0].clone() for node in nodes]
        await asyncio.wait_for(asyncio.gather(*(node.run() for node in nodes)), 60)
        for node in nodes:
            node.store.close()
        return before, nodes

    before, nodes = asyncio.run(scenario())
    report = audit([read_statement(folder / "store") for folder in folders])
    assert report.error == 0
    assert report.units == 3 * UNIT
    after = torch.stack([client_model(node.learner._shard, 0, "mixed")[0].shared for node in nodes])
    first = torch.stack(before)
    if method.name == "dispfl":
        assert ((after != 0).sum(dim=1) <= (first != 0).sum(dim=1)).all()
        return
    assert (after <= first.max(dim=0).values + 1e-9).all()
    assert (after >= first.min(dim=0).values - 1e-9).all()
    assert after.var(dim=0).sum() < first.var(dim=0).sum() / 2
    masses = np.array([node.transactions.accounts.units / UNIT for node in nodes])
    if method.name == "dfedavgm":
        mean = (torch.from_numpy(masses)[:, None] * after).sum(dim=0) / 3
        assert torch.allclose(mean, first.mean(dim=0), atol=1e-9)
    else:
        assert (masses == 1).all()


ISOLATED = lambda m: qv.isolated(clients=m)  # noqa: E731
GRAPHS[ISOLATED] = "isolated"
APART = [(method, graphs) for method, graphs, dtype in EVERY if dtype is torch.float64]
APART += [(method, ISOLATED) for method in DECENTRALIZED if method.topology == "isolated"]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "graphs"), APART, ids=called)
def test_every_method_learns_on_every_graph_without_waiting(
    tmp_path: Path, method: Any, graphs: Any
) -> None:
    """Async: everybody finishes and is better than before, and the books add up."""
    topology = graphs(4)
    played = play_peers(tmp_path, method, topology, torch.float64, "async")
    assert played.report.passed, played.report.problems
    assert played.report.units + played.report.in_flight == topology.clients * UNIT
    assert (played.report.transfers > 0) == (graphs is not ISOLATED)
    for node in played.nodes:
        assert [line["round"] for line in node.lines] == list(range(ROUNDS))  # type: ignore
    after = [training_loss(node) for node in played.nodes]
    assert np.mean(after) < played.first, (played.first, after)


def test_every_method_is_carried_or_refused() -> None:
    """No method is left out of the tables above, nor of the one in docs/reference/peers.md."""
    tried = {method.name for method in DECENTRALIZED}
    refused = {method.name for method, _ in METHODS if method.topology == "star"}
    assert tried | refused == set(qv.METHODS)
    text = (Path(__file__).parents[2] / "docs" / "reference" / "peers.md").read_text()
    table = text[text.index("| method | `sync` | `async` |") :].split("\n\n")[0]
    for row in table.splitlines()[2:]:
        named = set(re.findall(r"`([a-z]+)`", row.split("|")[1])) & set(qv.METHODS)
        kept = named & refused if "refused: it needs a server" in row else named & tried
        assert named == kept, row
    assert {name for name in qv.METHODS if f"`{name}`" in table} == set(qv.METHODS)


@pytest.mark.parametrize("method", [m for m, _ in METHODS if m.topology == "star"], ids=repr)
def test_server_methods_are_refused(method: Any) -> None:
    with pytest.raises(QuiverError, match=r"needs a server, and peers have none\. Use dfedavgm"):
        choose_message_split(method, REGULAR(6), 3)


def test_what_peers_cannot_carry_is_said() -> None:
    with pytest.raises(QuiverError, match=r"'star' has a server, .*use random_push"):
        choose_message_split(qv.DFedAvgM(), qv.star(clients=6, sampled=2, seed=0), 3)
    with pytest.raises(QuiverError, match=r"method\.delay = 2: .*Set delay = 0"):
        choose_message_split(qv.OSGP(delay=2), PUSH(6), 3)
    with pytest.raises(QuiverError, match="every row of the mixing matrix must sum to 1"):
        choose_message_split(qv.DFedAvgM(), PUSH(6), 3)
    turning = qv.custom(lambda t: (PUSH if t == 3 else PULL)(6)(t), 6)
    with pytest.raises(QuiverError, match="in round 3 the rows of the mixing matrix do not sum"):
        choose_message_split(qv.OSGP(), turning, 5)
    assert (
        choose_message_split(qv.OSGP(), PUSH(6), 3)
        == choose_message_split(qv.DFedAvgM(), REGULAR(6), 3)
        == "shares"
    )
    assert (
        choose_message_split(qv.OSGP(), PULL(6), 3)
        == choose_message_split(qv.DFedAvgM(), PULL(6), 3)
        == "copies"
    )


def test_the_simulation_refuses_what_peers_do() -> None:
    with pytest.raises(QuiverError, match="needs a server"):
        simulated(qv.FedAvg(), REGULAR(4), torch.float32, arithmetic="peers")
    with pytest.raises(QuiverError, match='with arithmetic = "peers" use "sequential"'):
        simulated(qv.OSGP(), PUSH(4), torch.float32, arithmetic="peers", executor="vectorized")
    with pytest.raises(QuiverError, match="arithmetic = 'peer': did you mean 'peers'"):
        simulated(qv.OSGP(), PUSH(4), torch.float32, arithmetic="peer")


@pytest.mark.parametrize("graphs", [REGULAR, PUSH, PULL])
def test_the_peers_arithmetic_is_the_same_sum(graphs: Any) -> None:
    """To rounding; and interrupted and resumed equals uninterrupted, mass and all."""
    method = qv.OSGP(epochs=1) if graphs is not REGULAR else qv.DFedAvgM(epochs=1)
    matrix = simulated(method, graphs(6), torch.float64)
    kept: list[Any] = []
    options = {"arithmetic": "peers", "checkpoint": kept.append, "checkpoint_every": 1}
    peers = simulated(method, graphs(6), torch.float64, **options)
    resumed = simulated(method, graphs(6), torch.float64, arithmetic="peers", resume=kept[1])
    for one, other, third in zip(
        matrix._shard.state, peers._shard.state, resumed._shard.state, strict=True
    ):
        assert torch.allclose(one, other, atol=1e-11)
        assert torch.equal(other, third)
