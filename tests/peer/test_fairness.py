"""A member that is slow, endless or silent costs the others next to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from quiverfl.peer.accounts.audit import audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.link import wire
from quiverfl.peer.link.identity import Identity
from quiverfl.peer.link.wire import SERVICE, Reply

from .swarm import Options, build, make_folders
from .test_life import finish, until
from .test_refusals import PAYLOAD, Caller, address, running


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return make_folders(tmp_path, 3)


async def trickle(caller: Caller, digest: str, pause: float) -> list[Reply]:
    """A body byte by byte, for ever; what the peer says of it until it hangs up."""
    call = caller.channel.stream_stream(f"/{SERVICE}/Push")()
    await call.write(wire.encode(caller.announcement(PAYLOAD, digest=digest)))
    said: list[Reply] = []
    reading = asyncio.create_task(_answers(call, said))
    for at in range(len(PAYLOAD)):
        if reading.done():
            break
        head = wire._HEADER.pack(at, wire.zlib.crc32(PAYLOAD[at : at + 1]))
        try:
            await call.write(head + PAYLOAD[at : at + 1])
        except Exception:  # the peer has hung up
            break
        await asyncio.sleep(pause)
    await asyncio.wait({reading}, timeout=5)
    call.cancel()
    return said


async def _answers(call: Any, said: list[Reply]) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):  # cut off
        while isinstance(frame := await call.read(), bytes):
            said.append(wire.decode(Reply, frame))


async def greeted(folder: Path, node: Any, name: str = "peer-1") -> Caller:
    caller = Caller(node.agreement, address(folder), Identity.read(folder.parent / name))
    caller.name = name
    await caller.hello()
    return caller


def test_slow_streams_of_one_member_do_not_lock_the_others_out(folders: list[Path]) -> None:
    async def scenario() -> None:
        async with running(folders[0]) as node:
            slow = await greeted(folders[0], node)
            streams = [asyncio.create_task(trickle(slow, f"{n:064d}", pause=1.0)) for n in range(6)]
            await until(lambda: node.metrics.refusals["replaced"] >= 5, 10)
            other = await greeted(folders[0], node, "peer-2")
            began = time.monotonic()
            assert (await other.push()).word == "applied"
            assert time.monotonic() - began < 2.0
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            await slow.channel.close()
            await other.channel.close()

    asyncio.run(scenario())


def test_a_trickle_gives_way_when_somebody_waits(folders: list[Path]) -> None:
    """One place in all, held by a slow member; without anybody else it may go on."""

    async def scenario() -> None:
        limits = {"bodies": 1, "patience": 0.5}
        async with running(folders[0], limits=limits) as node:
            slow = await greeted(folders[0], node)
            stream = asyncio.create_task(trickle(slow, "0" * 64, pause=0.1))
            await asyncio.sleep(1.5)
            assert not stream.done()
            other = await greeted(folders[0], node, "peer-2")
            began = time.monotonic()
            assert (await other.push()).word == "applied"
            assert time.monotonic() - began < 3.0
            said = await asyncio.wait_for(stream, 10)
            assert [reply.word for reply in said] == ["proceed", "retry"]
            assert "too slow" in said[1].reason
            await slow.channel.close()
            await other.channel.close()

    asyncio.run(scenario())


def test_a_stream_that_never_ends_is_ended(folders: list[Path]) -> None:
    """Bytes keep coming, so it is never idle; but at this pace it would take hours."""

    async def scenario() -> None:
        limits = {"idle_seconds": 1.0, "slowest": 1 << 14}
        async with running(folders[0], limits=limits) as node:
            slow = await greeted(folders[0], node)
            said = await asyncio.wait_for(trickle(slow, "0" * 64, pause=0.2), 10)
            assert said[-1].word == "retry"
            assert node.metrics.refusals["slow"] == 1
            await slow.channel.close()

    asyncio.run(scenario())


def test_silent_streams_are_counted_by_member(folders: list[Path]) -> None:
    """Announced by nothing: a hundred of them hold eight places of their own member."""

    async def scenario() -> None:
        async with running(folders[0]) as node:
            silent = await greeted(folders[0], node)
            calls = [silent.channel.stream_stream(f"/{SERVICE}/Push")() for _ in range(100)]
            await until(lambda: node.metrics.refusals["replaced"] == 92, 10)
            other = await greeted(folders[0], node, "peer-2")
            assert (await other.push()).word == "applied"
            for call in calls:
                call.cancel()
            await silent.channel.close()
            await other.channel.close()

    asyncio.run(scenario())


def test_a_member_that_never_acknowledges_costs_one_deadline(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sync: it takes shares, sends its own, and keeps its answer to itself."""

    async def scenario() -> None:
        options = Options(size=20, rounds=12, mode="sync", seconds=0.0, deadline=1.5, linger=1.0)
        nodes = [build(folder, options) for folder in folders]
        monkeypatch.setattr(nodes[2].receiver, "conclude", _forgetful(nodes[2].receiver))
        began = time.monotonic()
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: all(n.transactions.accounts.round == 12 for n in nodes[:2]), 20)
        assert time.monotonic() - began < 8.0  # 12 deadlines are 18 s
        await finish(*nodes, tasks=tasks)

    asyncio.run(scenario())
    report = audit([read_statement(folder / "store") for folder in folders])
    assert report.passed, report.problems
    assert report.units + report.in_flight == 3 * UNIT


def _forgetful(receiver: Any) -> Any:
    def committed(transfers: list[Any]) -> None:
        for transfer in transfers:
            receiver.staged.pop(transfer.sender, None)

    return committed
