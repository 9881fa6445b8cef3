"""What travels: small JSON messages checked field by field, and payload chunks with checksums.

Pure functions from bytes to checked values. Whatever comes in, the answer is a value or a
WireError; nothing is executed, no size or shape is believed, memory is bounded by the manifest.
The methods are gRPC's, with bytes as messages: there is no generated code to trust or to keep.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    ValidationError,
    model_serializer,
)

from quiverfl.errors import QuiverError
from quiverfl.peer.ledger import Transfer

PROTOCOL, OLDEST = 3, 2
"""The newest version this peer speaks, and the oldest it still understands."""
CHUNK = 1 << 20
CONTROL_LIMIT = 1 << 14
"""A control message is far smaller; a longer one is refused unread."""
SERVICE = "quiver.Peer"
NOTICES = 1024
NOTICES_LIMIT = 1 << 19
VOUCHERS = 24
"""At most this many fit into a control message."""

_HEADER = struct.Struct("<QI")  # offset, crc32 of the data

PEER_NAME = r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$"
Name = Annotated[str, StringConstraints(pattern=PEER_NAME)]
Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Token = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Sentence = Annotated[str, StringConstraints(max_length=1000)]
Count = Annotated[int, Field(ge=0, lt=2**62)]
_SIGNED = r"[0-9a-f]{16} [0-9a-f]{16} [0-9a-f]{66} [0-9a-f]{1,160}"
Proof = Annotated[str, StringConstraints(pattern=f"^({_SIGNED})?$")]


class WireError(QuiverError):
    """Bytes that are not what they should be; `kind` is what the counter of refusals is named."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


class _Control(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Clock(_Control):
    """How often a peer has pushed, on which store, in its own hand."""

    peer: Name
    store: Token
    pushes: Count
    proof: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{66} [0-9a-f]{1,160}$")]


CLOCKS = 24
"""At most this many fit into a control message beside the rest."""
Clocks = Annotated[list[Clock], Field(max_length=CLOCKS)]


class Hello(_Control):
    """Who I am, what I believe we have agreed on, and what our link has carried so far."""

    protocol: int
    run: Name
    configuration: Hash
    manifest: Hash
    sender: Name
    receiver: Name
    incarnation: Token
    towards: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{16})?$")] = ""  # your store
    nonce: Hash
    sent: Count  # seq of my last transfer to you
    acknowledged: Count  # how many of them you have taken
    received: Count  # seq of the last transfer I took from you
    round: Count  # the one I am in
    clocks: Clocks = []  # what I have heard of others, and of you
    notices: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")] = ""  # their hash
    leaving: bool = False
    finished: bool = False
    amendments: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")] = ""  # from 3 on

    @model_serializer(mode="wrap")
    def _as_spoken(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Whoever speaks an older version knows nothing of newer fields."""
        said: dict[str, Any] = whole(self)
        if self.protocol < 3:
            said.pop("amendments")
        return said


class Greeting(_Control):
    """The answer to Hello: welcome, or why not; signed with the key the roster knows."""

    hello: Hello | None = None
    refusal: Sentence = ""
    certificate: Annotated[str, StringConstraints(max_length=4000)] = ""
    signature: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{0,200}$")] = ""


class Announcement(_Control):
    """The first frame of a push: which transfer, how much mass, which bytes."""

    agreement: Hash
    sender: Name
    receiver: Name
    incarnation: Token
    seq: Annotated[int, Field(ge=1, lt=2**62)]
    round: Count
    units: Count  # 0 for a copy, which carries no mass
    nbytes: Count
    digest: Hash
    proof: Proof = ""  # this share, signed by its sender
    clocks: Clocks = []  # of its sender, and what it has heard of others


class Voucher(_Control):
    """A share that somebody else signed to whoever shows it."""

    sender: Name
    seq: Annotated[int, Field(ge=1, lt=2**62)]
    round: Count
    units: Annotated[int, Field(ge=1, lt=2**62)]
    digest: Hash
    proof: Annotated[str, StringConstraints(pattern=f"^{_SIGNED}$")]

    def transfer(self, receiver: str) -> Transfer:
        values = (self.seq, self.round, self.units, self.digest, 0.0, self.proof)
        return Transfer(self.sender, receiver, *values)


class Evidence(_Control):
    """The answer to `show`: where a sender's mass has come from; empty if there is no more."""

    vouchers: Annotated[list[Voucher], Field(max_length=VOUCHERS)]


Word = Literal["proceed", "show", "staged", "applied", "refused", "retry", "denied"]


class Reply(_Control):
    """An answer within a push.

    proceed: send the body · show: first show where so much mass comes from · staged: it is here,
    wait · applied: the ack, durable · refused: the nack, durable, take it back · retry: not now,
    nothing changed · denied: never, nothing changed.
    """

    word: Word
    reason: Sentence = ""
    proof: Proof = ""  # of applied and refused: signed by the receiver
    rows: Count = 0  # of show: how much was shown before


class Join(_Control):
    """Whoever joins asks for the model, and says which store it will come with."""

    agreement: Hash
    sender: Name
    receiver: Name
    incarnation: Token
    nonce: Hash


class Model(_Control):
    """The first frame of a pulled model, signed with the key the roster knows."""

    round: Count
    nbytes: Count
    digest: Hash
    manifest: Hash
    certificate: Annotated[str, StringConstraints(max_length=4000)] = ""
    signature: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{0,200}$")] = ""


class Notice(_Control):
    """A member deals no more with one store of another, in its own hand."""

    by: Name
    about: Name
    store: Token
    ban: bool = False
    proof: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{66} [0-9a-f]{1,160})?$")] = ""


class NoticeList(_Control):
    notices: Annotated[list[Notice], Field(max_length=NOTICES)]


class Vitals(_Control):
    """What a peer tells a doctor of another member: enough to compare clocks and versions."""

    time: Annotated[float, Field(allow_inf_nan=False)]
    version: Annotated[str, StringConstraints(max_length=64)]
    protocol: int = PROTOCOL
    oldest: int = OLDEST


class Terms(_Control):
    """What a run is changed to, and from which round on."""

    since: Count
    rounds: Annotated[int, Field(ge=1, lt=2**62)] | None = None
    lr: Annotated[float, Field(gt=0, lt=1e6, allow_inf_nan=False)] | None = None


class Amendment(_Control):
    """A member agrees to a change of the run, in its own hand."""

    by: Name
    terms: Terms
    proof: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{66} [0-9a-f]{1,160})?$")] = ""


class AmendmentList(_Control):
    amendments: Annotated[list[Amendment], Field(max_length=NOTICES)]


class Order(_Control):
    """What the owner of a peer asks of it, over its own certificate."""

    action: Literal["status", "leave", "evict", "stop", "amend"]
    peer: Name | None = None
    ban: bool = False
    terms: Terms | None = None


AnyControl = TypeVar("AnyControl", bound=_Control)


def encode(message: _Control) -> bytes:
    return message.model_dump_json().encode()


def decode(kind: type[AnyControl], frame: bytes, limit: int = CONTROL_LIMIT) -> AnyControl:
    if len(frame) > limit:
        raise WireError("oversize", f"a control message of {len(frame)} bytes is too long.")
    try:
        return kind.model_validate_json(frame)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise WireError(
            "malformed", f"not a {kind.__name__}: {where} {first['msg']}"[:300]
        ) from None


def decode_hello(frame: bytes) -> Hello:
    """A greeting; one in another version of the protocol is refused by that, not by its fields."""
    try:
        return decode(Hello, frame)
    except WireError:
        theirs = _protocol(frame)
        if theirs is not None and theirs not in range(OLDEST, PROTOCOL + 1):
            raise WireError("protocol", other_protocol(theirs)) from None
        raise


OTHER_PROTOCOL = "the caller speaks protocol"


def other_protocol(theirs: object, newest: int = PROTOCOL) -> str:
    """Every version has begun this sentence so: a caller may then try an older one."""
    mine = " or ".join(str(version) for version in range(OLDEST, newest + 1))
    return (
        f"{OTHER_PROTOCOL} {str(theirs)[:16]}, this peer protocol {mine}: install "
        "the same version of quiverfl on all peers of a run."
    )


def _protocol(frame: bytes) -> object:
    try:
        content = json.loads(frame[:CONTROL_LIMIT])
    except (ValueError, RecursionError):
        return None
    return content.get("protocol") if isinstance(content, dict) else None


def model_text(join: Join, model: Model) -> bytes:
    """What a model's signature covers: the question with its fresh nonce, and the answer."""
    return b"quiver model\0" + encode(join) + encode(model.model_copy(update={"signature": ""}))


def frames(payload: bytes) -> Iterator[bytes]:
    """The payload in chunks, each with its place and checksum."""
    view = memoryview(payload)
    for start in range(0, len(view), CHUNK):
        yield framed(view[start : start + CHUNK], start)


def framed(data: bytes | memoryview, start: int) -> bytes:
    """One chunk, which belongs at `start` of the payload."""
    return _HEADER.pack(start, zlib.crc32(data)) + data


def data_bytes(frame: bytes) -> int:
    """Of the payload in a chunk; a chunk without any is refused when it is added."""
    return max(0, len(frame) - _HEADER.size)


class Assembly:
    """A payload as it comes in: exactly the announced bytes, in order, each chunk checked."""

    def __init__(self, nbytes: int, digest: str) -> None:
        self._buffer = bytearray(nbytes)
        self._filled = 0
        self._digest = digest
        self._hash = hashlib.sha256()

    @property
    def complete(self) -> bool:
        return self._filled == len(self._buffer)

    def add(self, frame: bytes) -> None:
        if len(frame) <= _HEADER.size:
            raise WireError("truncated", f"a chunk of {len(frame)} bytes holds no data.")
        offset, checksum = _HEADER.unpack_from(frame)
        data = memoryview(frame)[_HEADER.size :]
        if len(data) > CHUNK or self._filled + len(data) > len(self._buffer):
            raise WireError("oversize", "more bytes than the manifest has.")
        if offset != self._filled:
            raise WireError("reordered", f"a chunk for {offset}, expected {self._filled}.")
        if zlib.crc32(data) != checksum:
            raise WireError("checksum", f"the chunk at {offset} arrived damaged.")
        self._buffer[offset : offset + len(data)] = data
        self._hash.update(data)
        self._filled += len(data)

    def payload(self) -> bytearray:
        if not self.complete:
            raise WireError("truncated", f"{self._filled} of {len(self._buffer)} bytes came.")
        if self._hash.hexdigest() != self._digest:
            raise WireError("checksum", "the payload is not the one that was announced.")
        return self._buffer
