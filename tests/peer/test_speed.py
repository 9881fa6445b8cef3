"""A ResNet-18 sized share over loopback with TLS, checksums and all."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import grpc.aio
import numpy as np
import pytest

from quiverfl.peer.accounts import signing
from quiverfl.peer.accounts.ledger import UNIT, Transfer
from quiverfl.peer.context import Agreement
from quiverfl.peer.link import wire
from quiverfl.peer.link.identity import Identity
from quiverfl.peer.link.messages import Manifest
from quiverfl.peer.link.roster import ROSTER, Roster
from quiverfl.peer.link.wire import SERVICE, Reply
from quiverfl.support.environment import keep_freed_memory

from .swarm import Options, Swarm
from .test_refusals import Caller

PARAMETERS = 11_168_832


async def _rate(swarm: Swarm, payload: bytes, seqs: range) -> float:
    folder = swarm.folders["peer-1"]
    manifest = Manifest.of({"u": np.zeros(PARAMETERS, dtype=np.float32)})
    agreement = Agreement("test", "peer-1", "c" * 64, manifest)
    address = Roster.read(folder / ROSTER).member("peer-0").address
    caller = Caller(agreement, address, Identity.read(folder))
    for _ in range(120):
        try:
            await caller.hello()
            break
        except grpc.aio.AioRpcError:  # still starting
            await asyncio.sleep(0.5)
    best = 0.0
    for seq in seqs:
        call = caller.channel.stream_stream(f"/{SERVICE}/Push")()
        first = wire.encode(caller.announcement(payload, seq=seq, units=UNIT // 100))
        started = time.perf_counter()
        await call.write(first)
        assert wire.decode(Reply, await call.read()).word == "proceed"
        for frame in wire.split_frames(payload):
            await call.write(frame)
        assert wire.decode(Reply, await call.read()).word == "staged"
        best = max(best, len(payload) / (time.perf_counter() - started) / 1e6)
        assert wire.decode(Reply, await call.read()).word == "applied"
    await caller.channel.close()
    return best


@pytest.mark.slow
def test_a_resnet_passes_at_three_hundred_megabytes_a_second(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, 2, Options(size=PARAMETERS, neighbours=1, rounds=0, linger=300.0))
    payload = np.ones(PARAMETERS, dtype="<f4").tobytes()
    keep_freed_memory()  # as the command does, at both ends
    swarm.start("peer-0")
    try:
        rate = asyncio.run(_rate(swarm, payload, range(1, 9)))
    finally:
        swarm.close()
    seconds, signing_seconds = len(payload) / 1e6 / rate, _signing(swarm.folders["peer-1"])
    print(
        f"{len(payload) / 1e6:.0f} MB at {rate:.0f} MB/s; signatures take "
        f"{1000 * signing_seconds:.2f} ms, {signing_seconds / seconds:.2%} of it"
    )
    assert rate >= 300
    assert signing_seconds <= 0.05 * seconds


def _signing(folder: Path) -> float:
    """Seconds to sign and to check a share and its receipt; the best of several, as the rate is."""
    papers, roster = Identity.read(folder), Roster.read(folder / ROSTER)
    stores, agreed = ("1" * 16, "2" * 16), "c" * 64
    found = []
    for seq in range(1, 31):
        started = time.perf_counter()
        for word, ends in (("share", ("peer-1", "peer-0")), ("applied", ("peer-0", "peer-1"))):
            transfer = Transfer(*ends, seq, 0, UNIT // 100, "d" * 64, 0.0)
            proof = signing.sign_transfer(papers, word, transfer, agreed, stores)
            assert signing.check_signature(
                roster, word, replace(transfer, proof=proof), agreed, *stores
            )
        found.append(time.perf_counter() - started)
    return min(found)
