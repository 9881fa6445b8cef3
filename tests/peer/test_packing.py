"""Sparse messages on the wire: as small as the method says, and a value or an error otherwise."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import quiverfl as qv
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.shard import Shard
from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.learner import ShardLearner
from quiverfl.peer.link.identity import Identity
from quiverfl.peer.link.messages import EVEN, LIKE, OWN, WHOLE, Manifest, pack_sparse, unpack_sparse
from small import TRAINING, tiny_data, tiny_task

from .test_refusals import PAYLOAD, SIZE, Caller, address, folders, running

__all__ = ["folders"]

NUMBERS = st.one_of(st.just(0.0), st.just(0.5), st.floats(width=32, allow_nan=False))
LEAVES = st.lists(arrays(np.float32, st.integers(0, 40), elements=NUMBERS), max_size=5)


@given(LEAVES)
def test_what_is_packed_comes_out_again(leaves: list[np.ndarray]) -> None:
    payload = pack_sparse(leaves)
    assert len(payload) <= sum(leaf.nbytes + 1 for leaf in leaves)
    found = unpack_sparse(payload, [(leaf.dtype, len(leaf)) for leaf in leaves])
    assert all(np.array_equal(a, b) for a, b in zip(leaves, found, strict=True))


def test_a_mask_and_what_it_keeps() -> None:
    """Places once, for both; the mask's own number once; an empty leaf, a whole one."""
    mask, kept = np.zeros(64, dtype="<f4"), np.zeros(64, dtype="<f4")
    mask[[1, 4, 5]] = 0.25
    kept[[1, 5]] = 3, -2  # one that is kept is zero
    other = np.arange(1, 4, dtype="<f8")
    payload = pack_sparse([mask, kept, other, other[:0]])
    expected = bytes([OWN | EVEN, 0b00110010]) + bytes(7) + np.float32(0.25).tobytes()
    expected += bytes([LIKE, 0, 0]) + np.array([3, 0, -2], dtype="<f4").tobytes()
    expected += bytes([WHOLE]) + other.tobytes() + bytes([WHOLE])
    assert payload == expected


def test_a_dispfl_message_takes_what_its_method_says() -> None:
    """Shares of it too: a scaled mask is still one number and its places."""
    method, task = qv.DisPFL(epochs=1, density=0.5), tiny_task()
    data = tiny_data().select([2])
    shard = Shard(task, data, method, TRAINING, RunSettings(rounds=3), clients=[2])
    learner = ShardLearner(shard, task, method)
    assert learner.manifest.sparse
    learner.train(0, True, 1.0, False)
    promised = int(shard.payload(shard.outbox())[0])
    message = {name: leaf / np.float32(3) for name, leaf in learner.message().items()}
    payload = learner.manifest.pack(message)
    assert promised < learner.manifest.nbytes / 2
    assert len(payload) <= promised + 20  # a byte and a number or a place for every leaf
    again = learner.manifest.unpack(payload)
    assert all(np.array_equal(again[name], leaf) for name, leaf in message.items())
    assert learner.manifest.hash != Manifest.of(message, learner.manifest.parameters).hash


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "ends 1 bytes early"),
        (bytes([3, 0]), "format 3, which does not exist"),
        (bytes([WHOLE, 0, 0]), "ends 14 bytes early"),
        (bytes([WHOLE | EVEN, 0, 0, 0, 0]), "fewer than two places"),
        (bytes([OWN, 0b10000]), "beyond the end"),
        (bytes([OWN | EVEN, 0b1, 0, 0, 0, 0]), "fewer than two places"),
        (bytes([LIKE, 0, 0]), "like 0, which does not exist"),
        (bytes([OWN, 0, 9]), "1 bytes too many"),
    ],
)
def test_bytes_that_are_no_message_are_refused(payload: bytes, reason: str) -> None:
    with pytest.raises(QuiverError, match=reason):
        unpack_sparse(payload, [(np.dtype("<f4"), 4)])


def test_mutated_payloads_are_arrays_or_an_error() -> None:
    chance = random.Random(0)
    mask = np.zeros(64, dtype="<f4")
    mask[::3] = 0.5
    payload = pack_sparse([mask, mask * np.arange(64, dtype="<f4"), np.ones(3, dtype="<f8")])
    kinds = [(np.dtype("<f4"), 64), (np.dtype("<f4"), 64), (np.dtype("<f8"), 3)]
    refused = 0
    for _ in range(5000):
        mutant = bytearray(payload)
        for _ in range(chance.randint(1, 3)):
            mutant[chance.randrange(len(mutant))] = chance.randrange(256)
        cut = mutant[: chance.randrange(len(mutant) + 1)] if chance.random() < 0.3 else mutant
        try:
            assert [len(leaf) for leaf in unpack_sparse(cut, kinds)] == [64, 64, 3]
        except QuiverError:
            refused += 1
    assert refused > 1000


def test_a_share_that_is_no_message_goes_back(folders: list[Path]) -> None:
    """Refused for good, on the record, so that its sender has its mass again."""

    async def scenario() -> None:
        async with running(folders[0]) as node:
            manifest = Manifest(node.agreement.manifest.leaves, sparse=True)
            object.__setattr__(node.agreement, "manifest", manifest)
            caller = Caller(node.agreement, address(folders[0]), Identity.read(folders[1]))
            await caller.hello()
            long = await caller.push(payload=PAYLOAD + b"12")
            assert (long.word, long.reason[:5]) == ("denied", "size:")
            reply = await caller.push(payload=b"\x07 no message")
            assert (reply.word, reply.reason) == ("refused", "not a message")
            few = np.zeros(SIZE, dtype="<f4")
            few[7] = 2.5
            good = pack_sparse([few])
            assert len(good) < len(PAYLOAD)
            assert (await caller.push(payload=good, seq=2)).word == "applied"
            assert node.transactions.accounts.units == UNIT + UNIT // 4
            await caller.channel.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("copies", [False, True])
def test_shares_bring_mass_and_copies_none(folders: list[Path], copies: bool) -> None:
    async def scenario() -> None:
        async with running(folders[0], settings={"copies": copies}) as node:
            caller = Caller(node.agreement, address(folders[0]), Identity.read(folders[1]))
            await caller.hello()
            wrong = await caller.push(units=UNIT // 4 if copies else 0)
            assert (wrong.word, wrong.reason[:5]) == ("denied", "mass:")
            right = await caller.push(units=0 if copies else UNIT // 4)
            assert right.word == "applied"
            assert node.transactions.accounts.units == UNIT + (0 if copies else UNIT // 4)
            await caller.channel.close()

    asyncio.run(scenario())
