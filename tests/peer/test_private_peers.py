"""Privacy between peers: the simulation's numbers by the seed, nobody's by a secret."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quiverfl as qv
from quiverfl.peer.demo import make_swarm
from quiverfl.peer.folder import PeerFolder
from quiverfl.peer.setup import assemble
from quiverfl.transforms import Transforms
from quiverfl.transforms.noise import Noise

from .swarm import make_folders
from .test_methods import ONE_PUSH, ROUNDS, node_on, play_peers, same_as_simulated, simulated

BLURRED = Transforms(privacy=qv.UpdatePrivacy(clip=0.5, noise=0.3))
GRADIENTS = Transforms(privacy=qv.DPSGD(clip=0.5, noise=0.5))
CODED = Transforms(qv.Quantize(bits=8, feedback="remainder"), qv.UpdatePrivacy(noise=0.1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "topology", "transforms"),
    [
        (qv.OSGP(epochs=1), ONE_PUSH(3), BLURRED),
        (qv.DFedPGP(1, 1), ONE_PUSH(3), GRADIENTS),
        (qv.DFedAvgM(epochs=1), qv.ring(3), CODED),
        (qv.DFedPGP(1, 1), qv.random_pull(3, 1), BLURRED),
    ],
)
def test_sync_peers_are_as_private_as_their_simulation(
    tmp_path: Path, method: Any, topology: Any, transforms: Transforms
) -> None:
    """By the seed: the same numbers, bit for bit, and the same ε."""
    played = play_peers(tmp_path, method, topology, torch.float32, transforms=transforms)
    same_as_simulated(played, method, topology, torch.float32, transforms)
    spent = simulated(method, topology, torch.float32, **vars(transforms)).rounds["epsilon"]
    assert max(node.lines[-1]["epsilon"] for node in played.nodes) == spent.iloc[-1] > 0


@pytest.mark.slow
def test_secret_noise_is_nobody_elses(tmp_path: Path) -> None:
    """It is what its store keeps, so a restart draws it again; the run's seed says nothing."""
    folders = make_swarm(tmp_path, 2, 3, "sync")
    for folder in folders.values():
        path = folder.path / "run.toml"
        path.write_text(path.read_text() + '\n[privacy]\nname = "update"\nclip = 0.5\n')

    async def released(folder: PeerFolder) -> Any:
        node = await assemble(PeerFolder.read(folder.path))
        message = node.learner.message(0)["u"]
        node.store.close()
        return message

    one, other = folders.values()
    first, again, theirs = (asyncio.run(released(folder)) for folder in (one, one, other))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, theirs)
    for folder in folders.values():
        path = folder.path / "run.toml"
        path.write_text(path.read_text().replace("[peers]", '[peers]\nnoise = "seed"'))
        (folder.store).rename(folder.path / "old store")
    known = asyncio.run(released(one))
    assert not np.array_equal(first, known)
    assert 0.4 < np.std(first - known) / (0.5 * 2**0.5) < 1.6


def test_a_round_from_another_state_has_other_noise(tmp_path: Path) -> None:
    """On a restored backup: the difference of two releases of a round must not be without noise."""
    folder = make_folders(tmp_path, 2)[0]
    node = node_on(folder, qv.OSGP(epochs=0), ONE_PUSH(2), torch.float64, transforms=BLURRED)
    learner: Any = node.learner
    learner.draw_noise_from(b"secret")

    def released(shift: float) -> Any:
        learner._shard.state = first._replace(u=first.u + shift)
        learner.train(3, True, 1.0, False)
        return learner.message(3)["u"] - learner.message()["u"]

    first = learner._shard.state
    once, again, other = released(0.0), released(0.0), released(1e-9)
    assert np.array_equal(once, again)
    assert np.std(once - other) > 0.1
    node.store.close()


def test_secret_noise_is_normal_and_keyed() -> None:
    def drawn(secret: bytes, round: int = 0, name: str = "u") -> Any:
        noise = Noise(1, "privacy", round, np.array([0, 3]), secret)
        return noise.draw_like(name, torch.zeros(2, 20_001, dtype=torch.float64)).numpy()

    first = drawn(b"a")
    assert np.array_equal(first, drawn(b"a"))
    assert abs(first.mean()) < 0.03
    assert abs(first.std() - 1) < 0.02
    for other in (first[::-1], drawn(b"b"), drawn(b"a", 1), drawn(b"a", 0, "v"), drawn(b"")):
        assert abs(np.corrcoef(first[0], other[0])[0, 1]) < 0.05


def test_a_spent_budget_stops_the_peer_before_it_sends(tmp_path: Path) -> None:
    transforms = Transforms(privacy=qv.UpdatePrivacy(noise=1.0, epsilon_budget=8.0))
    folders, method = make_folders(tmp_path, 2), qv.OSGP(epochs=0)

    async def scenario() -> list[Any]:
        graphs = ONE_PUSH(2)
        nodes = [
            node_on(folder, method, graphs, torch.float64, "async", transforms)
            for folder in folders
        ]
        ended = await asyncio.gather(*(node.run() for node in nodes), return_exceptions=True)
        for node in nodes:
            node.store.close()
            assert node.transactions.accounts.round < ROUNDS
            assert node.lines[-1]["epsilon"] <= 8.0
        return ended

    for problem in asyncio.run(scenario()):
        with pytest.raises(qv.QuiverError, match=r"privacy\.epsilon_budget = 8\. Nothing of this"):
            raise problem
