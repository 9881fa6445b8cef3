"""Peers that choose whom to push to, from what those told them, without a server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quiverfl as qv
from quiverfl.engine.checks.peers import choose_message_split, seen_alone
from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.link.messages import Manifest
from quiverfl.topologies.reports import ReportSpec, ReportView
from quiverfl.transforms import Transforms
from quiverfl.transforms.codec import MessageCodec, Origin

from .swarm import make_folders
from .test_methods import node_on, play_peers, same_as_simulated, same_states, simulated

RULES = [
    qv.loss_push(clients=4, neighbors=2, explore=1, seed=3),
    qv.similar_push(clients=4, neighbors=2, explore=0, sketch=8, seed=3),
    qv.bandit_push(clients=4, neighbors=1, explore=0, seed=3),
]
SMALL = Transforms(qv.TopK(fraction=0.1))


@pytest.mark.parametrize(
    ("method", "topology", "transforms"),
    [
        (qv.OSGP(epochs=1), RULES[0], SMALL),
        pytest.param(qv.DFedPGP(1, 1), RULES[1], Transforms(), marks=pytest.mark.slow),
        pytest.param(qv.OSGP(epochs=1), RULES[2], Transforms(), marks=pytest.mark.slow),
        pytest.param(
            qv.OSGP(epochs=1),
            qv.participating(RULES[0], fraction=0.7, seed=1),
            Transforms(),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_sync_peers_choose_as_their_simulation_does(
    tmp_path: Path, method: Any, topology: Any, transforms: Transforms
) -> None:
    """Bit for bit: the same graphs, so the same sums; what is told goes with the shares."""
    played = play_peers(tmp_path, method, topology, torch.float32, transforms=transforms)
    same_as_simulated(played, method, topology, torch.float32, transforms)


@pytest.mark.slow
def test_what_was_told_is_remembered_over_restarts(tmp_path: Path) -> None:
    """All stop somewhere on the way and start again; the graphs are those of an even run."""
    method, topology = qv.OSGP(epochs=1), RULES[2]
    folders = make_folders(tmp_path, 4)

    async def scenario() -> list[Any]:
        for stops_at in (1, 3, None):
            nodes = [node_on(folder, method, topology, torch.float64) for folder in folders]
            tasks = [asyncio.create_task(node.run()) for node in nodes]
            while stops_at is not None and nodes[0].transactions.accounts.round < stops_at:
                await asyncio.sleep(0.005)
            for node in nodes if stops_at is not None else []:
                node.stop()
            await asyncio.wait_for(asyncio.gather(*tasks), 120)
            for node in nodes:
                node.store.close()
        return nodes

    nodes = asyncio.run(scenario())
    same_states(nodes, method, topology)


@pytest.mark.parametrize("topology", RULES, ids=lambda topology: topology.name)
def test_nobody_needs_to_know_what_others_were_told(topology: Any) -> None:
    """A column of the graph is a function of that client's own row of the view."""
    chance, looks = np.random.default_rng(0), topology.reports
    told = chance.normal(size=(4, 4, looks.width)).astype(np.float32)
    told[chance.random((4, 4)) < 0.3] = np.nan
    heard = chance.integers(-1, 5, size=(4, 4)).astype(np.int32)
    view = ReportView(looks, told, heard, (heard + 1).astype(np.int32))
    for round in range(5):
        whole, alone = topology(round, view), seen_alone(topology)(round, view)
        assert (whole.sparse.toarray() == alone.sparse.toarray()).all()


@pytest.mark.slow
def test_async_peers_choose_too(tmp_path: Path) -> None:
    played = play_peers(tmp_path, qv.OSGP(epochs=1), RULES[0], torch.float64, "async")
    assert played.report.passed, played.report.problems
    assert played.report.units == 4 * UNIT
    for node in played.nodes:
        view, received = node.learner.view, read_statement(node.store.folder).received
        assert view is not None
        known = {i for i in range(4) if view.heard[node.number, i] >= 0}
        assert known == {int(line.transfer.sender[-1]) for line in received}
        assert np.isfinite(view.loss[node.number, [*known, node.number]]).all()


def test_what_is_told_goes_before_the_message() -> None:
    message = {"u": np.arange(100, dtype=np.float32)}
    said, origin = np.array([1.5, np.nan], dtype=np.float32), Origin(0, 0)
    coding = MessageCodec(qv.TopK(fraction=1.0), seed=0)
    for manifest in (
        Manifest.of(message, report_size=2),
        Manifest.of(message, coding=coding, report_size=2),
    ):
        payload = manifest.pack_report(said) + manifest.pack(message)
        assert manifest.allows_size(len(payload))
        assert not manifest.allows_size(len(payload) - 8)
        np.testing.assert_array_equal(manifest.unpack_report(payload), said)
        np.testing.assert_array_equal(manifest.unpack(payload, origin)["u"], message["u"])
        assert manifest.hash != Manifest.of(message, coding=manifest.coding).hash


def test_a_receivers_choice_is_refused() -> None:
    def pull(round: int, view: ReportView) -> Any:
        return qv.random_pull(clients=4, neighbors=1, seed=0)(round)

    for topology in (
        qv.custom(pull, 4, reports=ReportSpec(loss=True)),
        qv.similar_pull(4, 2, seed=0),
    ):
        with pytest.raises(QuiverError, match="in which senders choose"):
            choose_message_split(qv.OSGP(), topology, 3)
        with pytest.raises(QuiverError, match="in which senders choose"):
            simulated(qv.OSGP(), topology, torch.float32, arithmetic="peers")
