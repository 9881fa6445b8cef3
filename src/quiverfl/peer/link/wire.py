"""The wire format: small JSON messages checked field by field, and payload chunks with checksums.

Pure functions turn bytes into checked values, or raise a WireError. Nothing is executed, no size or
shape is believed, and the manifest bounds memory. The methods are gRPC's, with bytes as messages:
there is no generated code to trust or to keep.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

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
from quiverfl.peer.accounts.ledger import UNIT, Transfer

PROTOCOL, OLDEST = 3, 3
"""The newest version this peer speaks, and the oldest it still understands."""
CHUNK = 1 << 20
CONTROL_LIMIT = 1 << 14
"""A control message is far smaller; a longer one is refused unread."""
SERVICE = "quiver.Peer"
STATEMENTS = 1024
STATEMENTS_LIMIT = 1 << 19
"""The most statements in a list of them, and the most bytes."""
MOST_JOINS = 64
"""The most members that join by one change."""
VOUCHERS = 24
"""The most vouchers that fit into a control message."""

_HEADER = struct.Struct("<QI")  # offset, crc32 of the data

PEER_NAME = r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$"
Name = Annotated[str, StringConstraints(pattern=PEER_NAME)]
Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Token = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Sentence = Annotated[str, StringConstraints(max_length=1000)]
Count = Annotated[int, Field(ge=0, lt=2**62)]
_SIGNED = r"[0-9a-f]{16} [0-9a-f]{16} [0-9a-f]{66} [0-9a-f]{1,160}"
Proof = Annotated[str, StringConstraints(pattern=f"^({_SIGNED})?$")]
Signature = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{66} [0-9a-f]{1,160})?$")]
"""The signer's key and its signature; empty while a statement is not signed."""


class WireError(QuiverError):
    """The bytes are not what they should be; `kind` names the counter of refusals."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


class _Control(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Clock(_Control):
    """A peer's number of pushes and its store, signed by itself."""

    peer: Name
    store: Token
    pushes: Count
    proof: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{66} [0-9a-f]{1,160}$")]


CLOCKS = 24
"""The most clocks that fit into a control message beside the rest."""
Clocks = Annotated[list[Clock], Field(max_length=CLOCKS)]


class Hello(_Control):
    """Introduces a peer: what it believes is agreed on, and what the link has carried so far."""

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
    amendments: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")] = ""  # their hash


class Greeting(_Control):
    """Answers a Hello: welcome, or why not. It is signed with the key in the roster."""

    hello: Hello | None = None
    refusal: Sentence = ""
    certificate: Annotated[str, StringConstraints(max_length=4000)] = ""
    signature: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{0,200}$")] = ""


class Announcement(_Control):
    """Opens a push: which transfer, how much mass, which bytes."""

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
    """A share that a third peer signed to the one that shows it."""

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
    """Answers `show`: where a sender's mass came from; empty if there is no more."""

    vouchers: Annotated[list[Voucher], Field(max_length=VOUCHERS)]


Word = Literal["proceed", "show", "staged", "applied", "refused", "retry", "denied"]


class Reply(_Control):
    """Answers within a push.

    - proceed: send the body
    - show: first show where so much mass comes from
    - staged: the body is here and waits for the commit
    - applied: acknowledged, durably
    - refused: refused for good, durably; take it back
    - retry: not now; nothing changed
    - denied: never; nothing changed
    """

    word: Word
    reason: Sentence = ""
    proof: Proof = ""  # of applied and refused: signed by the receiver
    rows: Count = 0  # of show: how much was shown before


class Receipt(_Control):
    """Shows a member the last receipt that it has signed: proof that its store has known more."""

    word: Literal["applied", "refused", "none"] = "none"
    seq: Count = 0
    round: Count = 0
    units: Count = 0
    digest: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")] = ""
    proof: Proof = ""

    def transfer(self, sender: str, receiver: str) -> Transfer:
        values = (self.seq, self.round, self.units, self.digest, 0.0, self.proof)
        return Transfer(sender, receiver, *values)


class Join(_Control):
    """Asks for the model, and says which store the newcomer will have."""

    agreement: Hash
    sender: Name
    receiver: Name
    incarnation: Token
    nonce: Hash


class Model(_Control):
    """Opens a pulled model; signed with the key in the roster."""

    round: Count
    nbytes: Count
    digest: Hash
    manifest: Hash
    certificate: Annotated[str, StringConstraints(max_length=4000)] = ""
    signature: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{0,200}$")] = ""


class Dial(_Control):
    """Asks a relay for a line to a member that only dials out."""

    target: Name


class Ring(_Control):
    """Tells a member that attends at a relay who calls or, without a token, who is there."""

    peer: Name | Literal[""] = ""
    token: Token | Literal[""] = ""


class Accept(_Control):
    """Takes a call: what follows on the stream goes to the caller."""

    token: Token


class Vitals(_Control):
    """Answers a probe of another member: enough to compare clocks and versions."""

    time: Annotated[float, Field(allow_inf_nan=False)]
    version: Annotated[str, StringConstraints(max_length=64)]
    protocol: int = PROTOCOL
    oldest: int = OLDEST


class Eviction(NamedTuple):
    """A decision that a store of a peer is out; with `ban` no new store brings it back."""

    about: str
    store: str
    ban: bool


class EvictionNotice(_Control):
    """A member's signed statement that it no longer deals with a store of another."""

    table: ClassVar[str] = "notices"
    method: ClassVar[str] = "Notices"
    by: Name
    about: Name
    store: Token
    ban: bool = False
    proof: Signature = ""

    @property
    def content(self) -> str:
        return encode(self.model_copy(update={"proof": ""})).decode()

    @property
    def decisions(self) -> list[Eviction]:
        """The decisions it supports; a ban includes an eviction."""
        return [Eviction(self.about, self.store, ban) for ban in ((False, True)[: 1 + self.ban])]

    def signed_text(self, agreement: str) -> bytes:
        fields = [agreement, self.by, self.about, self.store, self.ban]
        return b"quiver eviction\0" + json.dumps(fields).encode()


class Terms(_Control):
    """Changes of a run under way, and the round from which they hold."""

    since: Count
    rounds: Annotated[int, Field(ge=1, lt=2**62)] | None = None
    lr: Annotated[float, Field(gt=0, lt=1e6, allow_inf_nan=False)] | None = None
    joins: Annotated[tuple[Name, ...], Field(max_length=MOST_JOINS)] = ()  # as the roster has them
    grant: Annotated[int, Field(ge=1, le=UNIT)] = UNIT  # the units of mass that each of them brings

    @model_serializer(mode="wrap")
    def _write(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what earlier versions do not know where it says nothing."""
        values: dict[str, Any] = write(self)
        if not self.joins:
            del values["joins"], values["grant"]
        return values

    def __lt__(self, other: Terms) -> bool:
        return (self.since, encode(self)) < (other.since, encode(other))

    def __str__(self) -> str:
        parts = [f"rounds = {self.rounds}"] if self.rounds is not None else []
        parts += [f"lr = {self.lr:g}"] if self.lr is not None else []
        if self.joins:
            parts.append(f"{', '.join(self.joins)} joins with mass {self.grant / UNIT:g}")
        return f"from round {self.since}: {', '.join(parts)}"


class Amendment(_Control):
    """A member's signed agreement to a change of the run."""

    table: ClassVar[str] = "amendments"
    method: ClassVar[str] = "Amendments"
    by: Name
    terms: Terms
    proof: Signature = ""

    @property
    def content(self) -> str:
        return f"{self.by} {encode(self.terms).decode()}"

    @property
    def decisions(self) -> list[Terms]:
        return [self.terms]

    def signed_text(self, agreement: str) -> bytes:
        terms = self.terms
        fields: list[Any] = [agreement, self.by, terms.since, terms.rounds, terms.lr]
        fields += [terms.joins, terms.grant] if terms.joins else []
        return b"quiver amendment\0" + json.dumps(fields).encode()


class NoticeList(_Control):
    notices: Annotated[list[EvictionNotice], Field(max_length=STATEMENTS)]


class AmendmentList(_Control):
    amendments: Annotated[list[Amendment], Field(max_length=STATEMENTS)]


Statement = TypeVar("Statement", EvictionNotice, Amendment)
"""Statements that members sign and pass on."""
LISTS: dict[str, type[_Control]] = {"notices": NoticeList, "amendments": AmendmentList}


class Order(_Control):
    """Asks a running peer for something, over its owner's certificate."""

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


def encode_statements(kind: type[Statement], statements: Sequence[Statement]) -> bytes:
    """Write the newest statements of a log."""
    newest = list(statements)[-STATEMENTS:]
    return encode(LISTS[kind.table].model_validate({kind.table: newest}))


def decode_statements(kind: type[Statement], frame: bytes) -> list[Statement]:
    statements: list[Statement] = getattr(
        decode(LISTS[kind.table], frame, STATEMENTS_LIMIT), kind.table
    )
    return statements


def decode_hello(frame: bytes) -> Hello:
    """Read a greeting. Another version of the protocol is refused as such, not by its fields."""
    try:
        return decode(Hello, frame)
    except WireError:
        theirs = _read_protocol(frame)
        if theirs is not None and theirs not in range(OLDEST, PROTOCOL + 1):
            raise WireError("protocol", other_protocol(theirs)) from None
        raise


OTHER_PROTOCOL = "the caller speaks protocol"


def other_protocol(theirs: object, newest: int = PROTOCOL) -> str:
    """Refuse a version. Every version begins this sentence so; a caller then tries an older one."""
    mine = " or ".join(str(version) for version in range(OLDEST, newest + 1))
    return (
        f"{OTHER_PROTOCOL} {str(theirs)[:16]}, this peer protocol {mine}: install "
        "the same version of quiverfl on all peers of a run."
    )


def _read_protocol(frame: bytes) -> object:
    try:
        content = json.loads(frame[:CONTROL_LIMIT])
    except (ValueError, RecursionError):
        return None
    return content.get("protocol") if isinstance(content, dict) else None


def model_text(join: Join, model: Model) -> bytes:
    """The text that a model's signature covers: the request with its nonce, and the answer."""
    return b"quiver model\0" + encode(join) + encode(model.model_copy(update={"signature": ""}))


def split_frames(payload: bytes) -> Iterator[bytes]:
    """Split a payload into chunks, each with its offset and checksum."""
    view = memoryview(payload)
    for start in range(0, len(view), CHUNK):
        yield make_frame(view[start : start + CHUNK], start)


def make_frame(data: bytes | memoryview, start: int) -> bytes:
    """Write one chunk, which belongs at `start` of the payload."""
    return _HEADER.pack(start, zlib.crc32(data)) + data


def count_data_bytes(frame: bytes) -> int:
    """Count the payload bytes in a chunk; a chunk without any is refused when it is added."""
    return max(0, len(frame) - _HEADER.size)


class Assembly:
    """Collects a payload: exactly the announced bytes, in order, each chunk checked."""

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
