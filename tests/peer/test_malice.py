"""One malicious member among honest peers: they finish, and their mass stays theirs.

docs/explanation/threat-model.md says what each way comes to, and where the records cannot tell who
it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quiverfl.peer.accounts import signing
from quiverfl.peer.accounts.audit import AuditReport, audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.folder import Outcome
from quiverfl.peer.link.messages import check_numbers
from quiverfl.peer.link.roster import ROSTER, Roster
from quiverfl.peer.node import Node

from .malice import TOLD_BY_THE_BOOKS, WAYS, Way
from .swarm import Options, build, make_folders


def beside(way: Way, folders: Sequence[Path], options: Options) -> list[tuple[Node, Outcome]]:
    """Honest peers on all folders but the last, which the malicious member has."""

    async def scenario() -> list[tuple[Node, Outcome]]:
        nodes = [build(folder, options) for folder in folders[:-1]]

        def progress() -> int:
            return min(node.transactions.accounts.round for node in nodes)

        villain = asyncio.create_task(way(folders[-1], options, progress))
        runs = asyncio.gather(*(node.run() for node in nodes))
        done, _ = await asyncio.wait({villain, runs}, timeout=400, return_when="FIRST_COMPLETED")
        assert villain not in done, villain.exception()
        assert runs in done, [(n.state, n.transactions.accounts.round) for n in nodes]
        villain.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await villain
        for node in nodes:
            node.store.close()
        return list(zip(nodes, await runs, strict=True))

    return asyncio.run(scenario())


def audited(folders: Sequence[Path]) -> AuditReport:
    roster = Roster.read(folders[0] / ROSTER)
    books = [read_statement(folder / "store") for folder in folders]
    return audit(books, is_genuine=signing.signature_check(roster))


def check(name: str, folders: Sequence[Path], options: Options) -> None:
    started = time.monotonic()
    ended = beside(WAYS[name], folders, options)
    culprit = folders[-1].name
    for node, outcome in ended:
        assert node.transactions.accounts.round == options.rounds
        assert not outcome.stopped
        assert set(node.transactions.accounts.outbox) <= {culprit}
        assert not check_numbers(node.transactions.memory.message)
    alone = audited(folders[:-1])  # theirs alone: what came from it and went to it is signed
    assert alone.passed, alone.problems
    assert (alone.error, alone.culprits) == (0, [])
    assert set(alone.missing) <= {culprit}
    everybody = audited(folders)
    assert set(everybody.culprits) <= {culprit}, everybody.problems
    assert everybody.culprits or name not in TOLD_BY_THE_BOOKS
    mass = sum(node.transactions.accounts.units for node, _ in ended) / UNIT
    spread = max(_distance(ended[0][0], node) for node, _ in ended)
    refusals: dict[str, int] = {}
    for node, _ in ended:
        for reason, count in node.metrics.refusals.items():
            refusals[reason] = refusals.get(reason, 0) + count
    print(
        f"{name}: {time.monotonic() - started:.0f} s, mass of the honest {mass:.3f}, "
        f"furthest apart {spread:.1e}, refusals {refusals}"
    )


def _distance(one: Node, other: Node) -> float:
    models = [n.transactions.memory.message["u"] / n.transactions.mass for n in (one, other)]
    return float(np.abs(models[0] - models[1]).max())


ROUNDS = Options(size=20, rounds=100, seconds=0.0, deadline=2.0, linger=6.0)
ASYNC = replace(ROUNDS, mode="async", settings={"round_interval": 0.05})
SYNC = replace(ROUNDS, mode="sync")


@pytest.mark.slow
@pytest.mark.parametrize("options", [SYNC, ASYNC], ids=["sync", "async"])
@pytest.mark.parametrize("name", WAYS)
def test_eight_honest_peers_finish_beside_a_malicious_one(
    name: str, options: Options, tmp_path: Path
) -> None:
    check(name, make_folders(tmp_path, 9), options)


@pytest.mark.parametrize(
    "name", ["minting", "equivocating", "not a number", "wrong shape", "forged signature"]
)
def test_two_honest_peers_finish_beside_a_malicious_one(name: str, tmp_path: Path) -> None:
    quick = replace(SYNC, rounds=6, deadline=0.5, linger=0.5)
    check(name, make_folders(tmp_path, 3), quick)
