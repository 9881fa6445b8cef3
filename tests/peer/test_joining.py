"""Who gets the model, what it costs the peer that gives it, and whom a newcomer believes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.context import Agreement
from quiverfl.peer.control import make_order
from quiverfl.peer.link import wire
from quiverfl.peer.link.identity import Identity
from quiverfl.peer.link.joining import Offer, choose_offer, join_store
from quiverfl.peer.link.link import open_channel
from quiverfl.peer.link.messages import Manifest
from quiverfl.peer.link.roster import ROSTER, Roster
from quiverfl.peer.link.wire import SERVICE, Join, Model, Order

from .swarm import Options, Quadratic, Swarm, make_folders
from .test_fairness import greeted
from .test_refusals import SIZE, address, running


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return make_folders(tmp_path, 3)


def pull(folder: Path, agreed: Agreement, token: str, channel: Any, **changes: Any) -> Any:
    join = Join(
        **{
            "agreement": agreed.hash,
            "sender": folder.name,
            "receiver": "peer-0",
            "incarnation": token,
            "nonce": "0" * 64,
            **changes,
        }
    )
    return channel.unary_stream(f"/{SERVICE}/Pull")(wire.encode(join), wait_for_ready=True)


async def refusal(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    return str(caught.value.details())


def test_only_who_may_join_gets_the_model(folders: list[Path]) -> None:
    async def scenario() -> None:
        async with running(folders[0]) as node:
            caller = await greeted(folders[0], node)  # peer-1, on store 1111…
            channel, old, new = caller.channel, "1" * 16, "2" * 16

            def ask(token: str, **changes: Any) -> Any:
                return pull(folders[1], node.agreement, token, channel, **changes)

            assert "in the run already" in await refusal(ask(old))
            assert "in the run already" in await refusal(ask(new))
            assert "another run" in await refusal(ask(new, agreement="0" * 64))
            handler = node.control
            await handler.handle_order(Order(action="evict", peer="peer-1"))
            assert "old store stays outside" in await refusal(ask(old))
            assert "in another's name" in await refusal(ask(new, sender="peer-2"))
            header = wire.decode(Model, await ask(new).read())  # it comes back with a new store
            assert header.nbytes == 4 * SIZE
            await handler.handle_order(Order(action="evict", peer="peer-1", ban=True))
            for token in (old, new, "3" * 16):
                assert "was banned" in await refusal(ask(token))
            assert "was banned" in (await caller.hello(incarnation=new)).refusal
            await channel.close()

    asyncio.run(scenario())


def test_a_newcomer_believes_the_key_in_its_roster(folders: list[Path]) -> None:
    """A member with a certificate of the authority, but not the key the roster has."""

    async def scenario() -> None:
        async with running(folders[0]) as node:
            learner = Quadratic(1, SIZE)
            agreement = replace(node.agreement, name="peer-1")
            roster = Roster.read(folders[1] / ROSTER)
            others = tuple(m for m in roster.members if m.name != "peer-2")
            forged = tuple(
                replace(m, keys=("f" * 64,)) if m.name == "peer-0" else m for m in others
            )
            with pytest.raises(QuiverError, match="key of 'peer-0' is not the one in the roster"):
                await join_store(
                    folders[1] / "store",
                    learner,
                    agreement,
                    replace(roster, members=forged),
                    folders[1],
                )
            assert not (folders[1] / "store").exists()
            store = await join_store(
                folders[1] / "store",
                learner,
                agreement,
                replace(roster, members=others),
                folders[1],
            )
            assert store.accounts().units == UNIT
            mine = node.transactions.memory.message["u"] / np.float32(node.transactions.mass)
            assert np.array_equal(store.memory().message["u"], mine)
            store.close()

    asyncio.run(scenario())


def test_many_pulls_cost_no_memory_and_one_file(tmp_path: Path) -> None:
    """Newcomers that ask and do not read; the peer goes on answering its owner."""
    size = 4_000_000
    swarm = Swarm(tmp_path, 5, Options(size=size, neighbours=1, rounds=0, linger=300.0))
    swarm.start("peer-0")
    agreement = Agreement(
        "test", "peer-0", "c" * 64, Manifest.of({"u": np.zeros(size, dtype=np.float32)})
    )
    process = psutil.Process(swarm.processes["peer-0"].pid)

    async def scenario() -> None:
        folder = swarm.folders["peer-0"]
        channels = {
            name: open_channel(address(folder), "peer-0", Identity.read(swarm.folders[name]))
            for name in swarm.folders
        }
        await _served(pull(swarm.folders["peer-1"], agreement, "1" * 16, channels["peer-1"]))
        before = process.memory_info().rss
        calls = [
            pull(swarm.folders[name], agreement, f"{n:016x}", channels[name])
            for n in range(10)
            for name in list(swarm.folders)[1:]
        ]
        await asyncio.sleep(2.0)
        assert len(list((folder / "store").glob("offer-*"))) == 1
        assert process.memory_info().rss - before < 4 * size  # less than one model
        began = time.monotonic()
        await make_order(folder, Order(action="status"))
        assert time.monotonic() - began < 1.0
        for call in calls:
            call.cancel()
        await _served(pull(swarm.folders["peer-2"], agreement, "2" * 16, channels["peer-2"]))
        for channel in channels.values():
            await channel.close()

    try:
        asyncio.run(scenario())
    finally:
        swarm.close()


async def _served(call: Any) -> None:
    """The whole model comes, once the peer has started."""
    async with asyncio.timeout(60):
        header = wire.decode(Model, await call.read())
        assembly = wire.Assembly(header.nbytes, header.digest)
        while not assembly.complete:
            assembly.add(await call.read())
        assembly.payload()


# Whom a newcomer believes


@settings(max_examples=60, deadline=None)
@given(
    honest=st.lists(st.tuples(st.integers(50, 60), st.floats(-1, 1)), min_size=2, max_size=4),
    lies=st.lists(st.tuples(st.integers(0, 2**61), st.floats(-1e18, 1e18)), max_size=1),
    seed=st.integers(0, 100),
)
def test_a_minority_moves_neither_round_nor_model(
    honest: list[tuple[int, float]], lies: list[tuple[int, float]], seed: int
) -> None:
    told = [*honest, *lies]
    random.Random(seed).shuffle(told)
    offers = [Offer(str(n), r, {"u": np.full(9, x, np.float32)}) for n, (r, x) in enumerate(told)]
    round, message = choose_offer(offers)
    assert min(r for r, _ in honest) <= round <= max(r for r, _ in honest)
    # A lie may be chosen only where it is no farther from an honest model than they from another.
    values = [float(np.float32(x)) for _, x in honest]
    spread = max(values) - min(values)
    assert min(abs(float(message["u"][0]) - value) for value in values) <= spread + 1e-6


def lie(node: Any, kind: str) -> None:
    models = node.service._models
    honest = models._header
    if kind == "round":
        models._header = lambda snapshot, join: honest(replace(snapshot, round=2**61), join)
    if kind == "numbers":
        huge = {"u": np.full(SIZE, 3e38, dtype=np.float32)}
        node.transactions.memory = replace(node.transactions.memory, message=huge)
    if kind == "model":
        other = {"u": np.full(SIZE, 1e6, dtype=np.float32)}
        node.transactions.memory = replace(node.transactions.memory, message=other)


@pytest.mark.parametrize("kind", ["round", "numbers", "model"])
def test_one_member_decides_nothing_for_a_newcomer(tmp_path: Path, kind: str) -> None:
    """The first of the roster lies; the newcomer has what the others have."""
    folders = make_folders(tmp_path, 5)
    newcomer = folders[-1]

    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            nodes = [await stack.enter_async_context(running(folder)) for folder in folders[:4]]
            lie(nodes[0], kind)
            learner, roster = Quadratic(4, SIZE), Roster.read(newcomer / ROSTER)
            agreement = replace(nodes[1].agreement, name="peer-4")
            store = await join_store(newcomer / "store", learner, agreement, roster, newcomer)
            assert store.accounts().round == 0
            honest = nodes[1].transactions.memory.message["u"]
            assert np.array_equal(store.memory().message["u"], honest)
            store.close()

    asyncio.run(scenario())


def test_a_newcomer_needs_three_where_there_are_so_many(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 5)
    newcomer = folders[-1]

    async def scenario() -> None:
        async with running(folders[0]) as node:
            learner, roster = Quadratic(4, SIZE), Roster.read(newcomer / ROSTER)
            agreement = replace(node.agreement, name="peer-4")
            place = newcomer / "store"
            with pytest.raises(QuiverError, match=r"1 of 4 members have offered .* 3 are needed"):
                await join_store(place, learner, agreement, roster, newcomer)
            assert not place.exists()
            store = await join_store(place, learner, agreement, roster, newcomer, believe=True)
            store.close()

    asyncio.run(scenario())
