"""A sender is believed what it started with and what it can show; the rest is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quiverfl.peer.accounts import signing
from quiverfl.peer.accounts.audit import audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.accounts.ledger import UNIT, Transfer
from quiverfl.peer.link.identity import Identity
from quiverfl.peer.link.roster import ROSTER, Roster
from quiverfl.peer.link.wire import Voucher

from .swarm import build, make_folders
from .test_life import ENDLESS, finish, until
from .test_refusals import Caller, address, running

HALF = UNIT // 2


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return make_folders(tmp_path, 3)


def voucher(
    caller: Caller, papers: Identity, seq: int = 1, units: int = HALF, store: str = "1" * 16
) -> Voucher:
    """A share of peer-2 to peer-1, as peer-1 shows it; signed by whoever has these papers."""
    transfer = Transfer("peer-2", "peer-1", seq, 0, units, f"{seq:064x}", 0.0)
    agreed = caller.agreement.hash
    proof = signing.sign_transfer(papers, "share", transfer, agreed, ("2" * 16, store))
    return Voucher(
        sender="peer-2", seq=seq, round=0, units=units, digest=transfer.digest, proof=proof
    )


def test_mass_out_of_nothing_is_refused(folders: list[Path]) -> None:
    async def scenario() -> None:
        async with running(folders[0]) as node:
            caller = Caller(node.agreement, address(folders[0]), Identity.read(folders[1]))
            await caller.hello()
            assert (await caller.push(seq=1, units=HALF)).word == "applied"
            assert (await caller.push(seq=2, units=HALF)).word == "applied"
            for seq, units in ((3, 1), (4, UNIT)):  # it started with 1, and has given 1 away
                reply = await caller.push(seq=seq, units=units)
                assert (reply.word, reply.reason) == ("refused", "mass it cannot show")
            assert node.transactions.accounts.units == 2 * UNIT
            assert node.metrics.refusals["mass it cannot show"] == 2
            await caller.channel.close()

    asyncio.run(scenario())


def test_what_others_signed_to_it_counts_once(folders: list[Path]) -> None:
    other = Identity.read(folders[2])

    async def scenario() -> None:
        async with running(folders[0]) as node:
            caller = Caller(node.agreement, address(folders[0]), Identity.read(folders[1]))
            await caller.hello()
            assert (await caller.push(seq=1, units=UNIT)).word == "applied"
            own = Identity.read(folders[1])
            caller.vouchers = [
                voucher(caller, own),  # signed by itself
                voucher(caller, other, store="3" * 16),  # to another store of its
                voucher(caller, other).model_copy(update={"units": UNIT}),  # not what was signed
            ]
            assert (await caller.push(seq=2, units=HALF)).word == "refused"
            caller.vouchers += [voucher(caller, other)] * 5
            assert (await caller.push(seq=3, units=HALF)).word == "applied"
            assert (await caller.push(seq=4, units=1)).word == "refused"
            caller.vouchers += [voucher(caller, other, seq=n) for n in range(2, 40)]
            assert (await caller.push(seq=5, units=3 * UNIT)).word == "applied"
            await caller.channel.close()

    asyncio.run(scenario())


def test_what_was_shown_is_known_after_a_restart(folders: list[Path]) -> None:
    other = Identity.read(folders[2])

    async def scenario(seq: int, vouchers: int) -> str:
        async with running(folders[0]) as node:
            caller = Caller(node.agreement, address(folders[0]), Identity.read(folders[1]))
            await caller.hello(sent=seq - 1, acknowledged=seq - 1)
            caller.vouchers = [voucher(caller, other, seq=n + 1) for n in range(vouchers)]
            reply = await caller.push(seq=seq, units=UNIT)
            await caller.channel.close()
            return reply.word

    assert asyncio.run(scenario(1, 0)) == "applied"
    assert asyncio.run(scenario(2, 2)) == "applied"
    assert asyncio.run(scenario(3, 2)) == "refused"  # the two are spent
    assert asyncio.run(scenario(4, 4)) == "applied"


def test_honest_peers_can_always_show_what_they_give(folders: list[Path]) -> None:
    async def scenario() -> list[Any]:
        # On a ring nothing comes straight back, so each must show where its mass came from.
        options = replace(ENDLESS, size=20, seconds=0.0, ring=True, settings={"max_debt": 1e9})
        nodes = [build(folder, options) for folder in folders]
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: all(node.metrics.counts["transfers"] > 40 for node in nodes), 40)
        await finish(*nodes, tasks=tasks)
        return nodes

    nodes = asyncio.run(scenario())
    assert not any(node.metrics.refusals["mass it cannot show"] for node in nodes)
    asked = [node.receiver._proofs.proven_by(peer).rows for node in nodes for peer in node.names]
    assert sum(asked) > 10
    roster = Roster.read(folders[0] / ROSTER)
    statements = [read_statement(folder / "store") for folder in folders]
    report = audit(statements, is_genuine=signing.signature_check(roster))
    assert report.passed, report.problems
    assert report.units + report.in_flight == 3 * UNIT
