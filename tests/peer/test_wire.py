"""The decoder: a value or a WireError, whatever comes in."""

from __future__ import annotations

import hashlib
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiverfl.errors import QuiverError
from quiverfl.peer.link import wire
from quiverfl.peer.link.messages import Manifest
from quiverfl.peer.link.wire import (
    Accept,
    Announcement,
    Assembly,
    Dial,
    Greeting,
    Hello,
    Order,
    Reply,
    Ring,
    WireError,
)

HASH = "a" * 64
ANNOUNCEMENT = Announcement(
    agreement=HASH,
    sender="ward-1",
    receiver="ward-2",
    incarnation="0" * 16,
    seq=1,
    round=0,
    units=2**47,
    nbytes=10,
    digest=HASH,
)
HELLO = Hello(
    protocol=1,
    run="trial",
    configuration=HASH,
    manifest=HASH,
    sender="a",
    receiver="b",
    incarnation="0" * 16,
    nonce=HASH,
    sent=3,
    acknowledged=2,
    received=0,
    round=0,
)
MESSAGES = [
    ANNOUNCEMENT,
    HELLO,
    Greeting(hello=HELLO, signature="ab"),
    Reply(word="applied"),
    Order(action="evict", peer="b"),
    Dial(target="ward-1"),
    Ring(peer="ward-2", token="0" * 16),
    Accept(token="0" * 16),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_survives_the_wire(message) -> None:
    assert wire.decode(type(message), wire.encode(message)) == message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq", 0),
        ("seq", 1.0),
        ("seq", "1"),
        ("seq", 2**70),
        ("units", -1),
        ("units", True),
        ("nbytes", -1),
        ("sender", "A B"),
        ("sender", "../x"),
        ("digest", "zz"),
        ("extra", 1),
    ],
)
def test_every_field_is_checked(field: str, value: object) -> None:
    import json

    content = {**ANNOUNCEMENT.model_dump(), field: value}
    with pytest.raises(WireError):
        wire.decode(Announcement, json.dumps(content).encode())


def test_a_long_control_message_is_refused_unread() -> None:
    with pytest.raises(WireError, match="too long"):
        wire.decode(Announcement, b" " * (wire.CONTROL_LIMIT + 1))


def _assembled(payload: bytes, frames: list[bytes], digest: str = "") -> bytes:
    assembly = Assembly(len(payload), digest or hashlib.sha256(payload).hexdigest())
    for frame in frames:
        assembly.add(frame)
    return bytes(assembly.payload())


@given(st.binary(max_size=5000))
def test_a_payload_survives_the_wire(payload: bytes) -> None:
    assert _assembled(payload, list(wire.split_frames(payload))) == payload


def test_a_payload_of_several_chunks() -> None:
    payload = bytes(np.arange(300_000, dtype="<f8").tobytes())
    frames = list(wire.split_frames(payload))
    assert len(frames) == 3
    assert _assembled(payload, frames) == payload
    for wrong, kind in [
        (frames[:2], "truncated"),
        ([frames[1], frames[0], frames[2]], "reordered"),
        ([*frames, frames[0]], "oversize"),
        ([frames[0], frames[0]], "reordered"),
        ([frames[0][:-1] + b"x", *frames[1:]], "checksum"),
        ([b""], "truncated"),
    ]:
        with pytest.raises(WireError) as caught:
            _assembled(payload, wrong)
        assert caught.value.kind == kind
    with pytest.raises(WireError, match="announced"):
        _assembled(payload, frames, digest="0" * 64)


def test_the_manifest_decides_shapes_and_sizes() -> None:
    message = {"u": np.arange(6, dtype=np.float32).reshape(2, 3)}
    manifest = Manifest.of(message)
    payload = manifest.pack(message)
    assert np.array_equal(manifest.unpack(payload)["u"], message["u"])
    with pytest.raises(QuiverError, match="the manifest says 24"):
        manifest.unpack(payload + b"\0")
    with pytest.raises(QuiverError, match="does not fit"):
        manifest.pack({**message, "v": np.zeros(1)})  # a personal part cannot leave
    other = Manifest.of({"u": np.zeros((3, 2), dtype=np.float32)})
    assert other.hash != manifest.hash


def _fuzz(count: int, seed: int) -> None:
    """Mutated messages and chunks; tallies that both the good and the bad path are taken."""
    chance = random.Random(seed)
    samples = [(type(m), wire.encode(m)) for m in MESSAGES]
    payload = bytes(range(256)) * 8
    chunk = next(iter(wire.split_frames(payload)))
    assembly = Assembly(len(payload), HASH)
    refused = 0
    for number in range(count):
        kind, frame = samples[number % len(samples)]
        mutant = _mutated(frame, chance)
        try:
            wire.decode(kind, mutant)
        except WireError:
            refused += 1
        if number % 4 == 0:
            try:
                assembly.add(_mutated(chunk, chance))
            except WireError:
                refused += 1
            if assembly.complete:
                assembly = Assembly(len(payload), HASH)
    assert refused > count // 2


def _mutated(frame: bytes, chance: random.Random) -> bytes:
    mutant = bytearray(frame)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(mutant) + 1)
        choice = chance.random()
        if choice < 0.5 and place < len(mutant):
            mutant[place] = chance.randrange(256)
        elif choice < 0.7:
            del mutant[place : place + chance.randint(1, 20)]
        elif choice < 0.9:
            mutant[place:place] = chance.randbytes(chance.randint(1, 20))
        else:
            mutant = mutant[:place]
    return bytes(mutant)


def test_twenty_thousand_fuzzed_messages_neither_crash_nor_grow() -> None:
    _fuzz(2_000, seed=0)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    _fuzz(20_000, seed=1)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert after - before < 1 << 20


@pytest.mark.slow
def test_a_million_fuzzed_messages_neither_crash_nor_grow() -> None:
    import resource

    _fuzz(50_000, seed=2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _fuzz(1_000_000, seed=3)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB
