"""Compression between peers: coded bytes travel, what is not sent stays, and nothing is lost."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quiverfl as qv
from quiverfl.engine.exchange.build import build_exchange
from quiverfl.engine.settings import RunSettings
from quiverfl.errors import QuiverError
from quiverfl.peer.accounts import ledger
from quiverfl.peer.accounts.audit import audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.accounts.ledger import UNIT, Accounts
from quiverfl.peer.accounts.store import Memory, Store
from quiverfl.peer.accounts.transactions import Transactions, make_first_entry
from quiverfl.peer.link.identity import Identity
from quiverfl.peer.link.messages import Leaves, Manifest, frame_code
from quiverfl.topologies import Topology
from quiverfl.transforms import Transforms
from quiverfl.transforms.codec import MessageCodec, Origin

from .test_methods import ONE_PULL, ONE_PUSH, play_peers, same_as_simulated, simulated
from .test_refusals import SIZE, Caller, address, folders, running

__all__ = ["folders"]

EIGHT, FEW, SOME = qv.Quantize(bits=8), qv.TopK(fraction=0.1), qv.RandomK(fraction=0.1)
STAYS = qv.Quantize(bits=4, feedback="remainder")
CASES = [
    (qv.DFedPGP(shared_epochs=1), ONE_PUSH(3), EIGHT),
    (qv.OSGP(epochs=1), ONE_PUSH(3), FEW),
    (qv.PushDIGing(), ONE_PUSH(3), SOME),
    (qv.DFedAvgM(epochs=1), qv.ring(4), STAYS),
    (qv.DFedPGP(shared_epochs=1), ONE_PULL(3), EIGHT),
]
CODINGS = [MessageCodec(compression, seed=5) for compression in (EIGHT, FEW, SOME, STAYS)]


def message_of(size: int = 100, seed: int = 0) -> Leaves:
    chance = np.random.default_rng(seed)
    return {"u": chance.normal(size=size).astype(np.float32), "y": chance.normal(size=(size // 2))}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "topology", "compression"), CASES)
def test_sync_peers_code_as_their_simulation_does(
    tmp_path: Path, method: Any, topology: Topology, compression: Any
) -> None:
    """Bit for bit, by shares and by copies, with and without a mass; the books balance."""
    transforms = Transforms(compression)
    played = play_peers(tmp_path, method, topology, torch.float32, transforms=transforms)
    same_as_simulated(played, method, topology, torch.float32, transforms)


@pytest.mark.slow
def test_async_peers_lose_nothing_of_what_they_do_not_send(tmp_path: Path) -> None:
    method = qv.OSGP(epochs=1)
    coded = Transforms(FEW)
    played = play_peers(tmp_path, method, ONE_PUSH(3), torch.float64, "async", coded)
    assert played.report.passed, played.report.problems
    assert played.report.units == 3 * UNIT
    whole = played.nodes[0].agreement.manifest.nbytes
    for node in played.nodes:
        entries = read_statement(node.store.folder).entries
        assert sum(entry.units_out > 0 for entry in entries) >= 1
        assert not node.agreement.manifest.allows_size(whole)


@pytest.mark.parametrize("coding", CODINGS, ids=lambda coding: coding.compression.name)
def test_coding_splits_into_what_was_there(tmp_path: Path, coding: MessageCodec) -> None:
    """Own and others' shares add up to the message, and a refused share comes home.

    After a restart the same bytes go out: they are in the commit, beside what was not sent.
    """
    message, origin = message_of(), Origin(3, 7)
    manifest = Manifest.of(message, coding=coding)
    entry = make_first_entry("start", message)
    store = Store.create(tmp_path, Accounts("a", UNIT), Memory(message, {}), entry, "agreed")

    async def scenario() -> None:
        books = Transactions(store, manifest, origin.client)
        shares = await books.push(origin.round, message, {}, {"b": 1, "c": 2}, 1)
        payloads = {share.receiver: store.payload(share.digest) for share in shares}
        assert all(manifest.allows_size(len(payload)) for payload in payloads.values())
        assert len(payloads["b"]) < manifest.nbytes / 2
        found = {to: manifest.unpack(payload, origin) for to, payload in payloads.items()}
        known = coding.transmit(message, origin)
        for name, leaf in message.items():
            np.testing.assert_allclose(found["b"][name], known[name] / 4, rtol=1e-6)
            parts = (books.memory.message[name], found["b"][name], found["c"][name])
            np.testing.assert_allclose(sum(parts), leaf, rtol=1e-6, atol=1e-6)
            assert not np.allclose(parts[0], leaf / 4)  # a mutant that drops the rest
        assert audit([read_statement(tmp_path)]).passed
        again = Transactions(store, manifest, origin.client)
        refund = again.accounts.outbox["c"]
        assert store.payload(refund.digest) == payloads["c"]
        await again.absorb([], [refund], finish=True)
        for name, leaf in message.items():
            whole = again.memory.message[name] + found["b"][name]
            np.testing.assert_allclose(whole, leaf, rtol=1e-6, atol=1e-6)
        assert again.accounts.units == UNIT - ledger.divide_units(UNIT, {"b": 1, "c": 2}, 1)["b"]
        assert audit([read_statement(tmp_path)]).passed

    asyncio.run(scenario())
    store.close()


def test_a_leaving_peer_gives_everything_away_whole(tmp_path: Path) -> None:
    message = message_of()
    manifest = Manifest.of(message, coding=CODINGS[1])
    entry = make_first_entry("start", message)
    store = Store.create(tmp_path, Accounts("a", UNIT), Memory(message, {}), entry, "agreed")

    async def scenario() -> None:
        books = Transactions(store, manifest)
        (share,) = await books.push(0, message, {}, {"b": 1}, 0, whole=True)
        payload = store.payload(share.digest)
        assert manifest.allows_size(len(payload))
        given = manifest.unpack(payload, Origin(0, 0))
        assert all(np.array_equal(given[name], leaf) for name, leaf in message.items())
        assert not any(leaf.any() for leaf in books.memory.message.values())
        assert books.accounts.units == 0

    asyncio.run(scenario())
    store.close()


@pytest.mark.parametrize("coding", CODINGS, ids=lambda coding: coding.compression.name)
def test_mutated_codes_are_messages_or_an_error(coding: MessageCodec) -> None:
    chance, message, origin = random.Random(0), message_of(), Origin(1, 2)
    manifest = Manifest.of(message, coding=coding)
    good = frame_code(coding.encode(message, origin), 0.25)
    refused = 0
    for _ in range(120):
        mutant = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            mutant[chance.randrange(len(mutant))] = chance.choice((0, 127, 128, 254, 255))
        if chance.random() < 0.3:
            del mutant[chance.randrange(len(mutant)) :]
        try:
            found = manifest.unpack(mutant, origin)
        except QuiverError:
            refused += 1
            continue
        assert {name: leaf.shape for name, leaf in found.items()} == {"u": (100,), "y": (50,)}
        assert all(np.isfinite(leaf).all() for leaf in found.values())
    assert refused > 30


@pytest.mark.parametrize("part", [0.0, -0.5, 1.5, float("nan"), float("inf")])
def test_a_part_that_is_none_is_refused(part: float) -> None:
    message, origin = message_of(), Origin(1, 2)
    code = CODINGS[0].encode(message, origin)
    with pytest.raises(QuiverError, match=r"must be in \(0, 1\]"):
        Manifest.of(message, coding=CODINGS[0]).unpack(frame_code(code, part), origin)


def test_a_code_that_is_none_goes_back(folders: list[Path]) -> None:
    """Refused for good, on the record, so that its sender has its mass again."""
    coding = MessageCodec(EIGHT, seed=1)

    async def scenario() -> None:
        async with running(folders[0]) as node:
            manifest = Manifest(node.agreement.manifest.leaves, coding=coding)
            object.__setattr__(node.agreement, "manifest", manifest)
            caller = Caller(node.agreement, address(folders[0]), Identity.read(folders[1]))
            await caller.hello()
            sent = {"u": np.linspace(-1, 1, SIZE, dtype=np.float32)}
            good = frame_code(coding.encode(sent, Origin(1, 0)), 0.25)
            long = await caller.push(payload=good + b"1")
            assert (long.word, long.reason[:5]) == ("denied", "size:")
            reply = await caller.push(payload=good[:-1] + b"\xff")
            assert (reply.word, reply.reason) == ("refused", "not a message")
            assert (await caller.push(payload=good, seq=2)).word == "applied"
            assert node.transactions.accounts.units == UNIT + UNIT // 4
            await caller.channel.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "compression", [FEW, *(pytest.param(one, marks=pytest.mark.slow) for one in (EIGHT, SOME))]
)
def test_the_peers_arithmetic_codes_to_the_same_sum(compression: Any) -> None:
    """One round in both arithmetics, to rounding; then Σu and Σμ over thirty."""
    method, topology = qv.OSGP(), qv.random_push(clients=6, neighbors=2, seed=1)
    chance = torch.Generator().manual_seed(0)
    u = torch.randn(6, 205, generator=chance, dtype=torch.float64)
    mixed = {}
    for arithmetic in ("matrix", "peers"):
        settings = RunSettings(rounds=30, seed=3, dtype=torch.float64, arithmetic=arithmetic)
        exchange = build_exchange(Transforms(compression), method, topology, settings)
        found = {"u": u.clone(), "mu": torch.ones(6, dtype=torch.float64)}
        payload = exchange.coded_sizes(found, np.full(6, 205 * 8 + 8))
        assert (payload == compression.coded_bytes(205, 8) + 8).all()
        exchange.push(0, topology(0), found)
        mixed[arithmetic] = exchange.collect(0)
    for name in ("u", "mu"):
        assert torch.allclose(mixed["matrix"][name], mixed["peers"][name], atol=1e-11)
    found = mixed["peers"]
    for t in range(1, 30):
        exchange.push(t, topology(t), found)
        found = exchange.collect(t)
    assert int((found["mu"] * UNIT).sum()) == 6 * UNIT
    assert torch.allclose(found["u"].sum(dim=0), u.sum(dim=0), atol=1e-11)


def test_replicas_are_not_for_peers() -> None:
    with pytest.raises(QuiverError, match=r'Set compression\.feedback = "remainder"'):
        simulated(
            qv.DFedAvgM(), qv.ring(4), torch.float32, arithmetic="peers", compression=qv.Quantize()
        )
