"""Keeping in touch with one neighbour: the connection to it, greetings, and news of the run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from quiverfl.errors import QuiverError
from quiverfl.peer import identity
from quiverfl.peer.agreement import Agreement, Limits
from quiverfl.peer.connection import (
    OlderProtocol,
    RestoredBackup,
    Unreachable,
    open_channel,
    pass_on_cancellation,
)
from quiverfl.peer.identity import Identity
from quiverfl.peer.metrics import Log, PeerMetrics
from quiverfl.peer.roster import LiveRoster, Member
from quiverfl.peer.wire import (
    NOTICES_LIMIT,
    OLDEST,
    OTHER_PROTOCOL,
    SERVICE,
    Amendment,
    AmendmentList,
    AnyControl,
    Greeting,
    Hello,
    Notice,
    NoticeList,
    WireError,
    decode,
    encode,
)


class Contact:
    """Called when needed; a connection that breaks is opened again at the next call."""

    def __init__(
        self,
        peer: str,
        *,
        agreement: Agreement,
        limits: Limits,
        roster: LiveRoster,
        identity: Callable[[], Identity],
        compose: Callable[[str, int], Hello],
        on_greeting: Callable[[Hello], Awaitable[None]],
        on_refusal: Callable[[str], None],
        metrics: PeerMetrics,
        log: Log,
    ) -> None:
        self.peer = peer
        self._agreement, self._limits, self._roster, self._identity = (
            agreement,
            limits,
            roster,
            identity,
        )
        self._compose, self._on_greeting, self._on_refusal = compose, on_greeting, on_refusal
        self._metrics, self._log = metrics, log
        self._channel: Any = None  # grpc.aio.Channel, whose published types are not its own
        self._protocol = agreement.newest
        self.greeted = False
        self.vacant = False  # nobody listened there when it was last called

    def member(self) -> Member:
        try:
            return self._roster.refresh().member(self.peer)
        except QuiverError as problem:
            raise Unreachable(str(problem)) from None

    def connected(self) -> Any:
        if self._channel is None:
            member = self.member()
            if member.dials_out:
                raise Unreachable(f"{self.peer} only dials out: it calls when it can")
            self._channel = open_channel(
                member.address, self.peer, self._identity(), self._limits.keepalive_seconds
            )
        return self._channel

    async def disconnect(self) -> None:
        """The next call starts over, with a new connection and the keys as they are then."""
        channel, self._channel, self.greeted = self._channel, None, False
        self._protocol = self._agreement.newest  # it may have been upgraded meanwhile
        if channel is not None:
            await channel.close()

    def line(self) -> Any:
        """A stream over which the neighbour sends what it has for this peer."""
        return self.connected().stream_stream(f"/{SERVICE}/Collect")()

    async def hello(self, timeout: float | None = None) -> Hello:
        """Introduce this peer, in a version that both know; what the neighbour says of itself."""
        while True:
            try:
                return await self._hello(timeout)
            except OlderProtocol as problem:
                self._protocol = min(self._protocol, problem.tried - 1)

    async def _hello(self, timeout: float | None) -> Hello:
        hello = self._compose(self.peer, self._protocol)
        timeout = timeout or self._limits.hello_seconds
        call = self.connected().unary_unary(f"/{SERVICE}/Hello")
        try:
            answer = await call(self._metrics.sent(encode(hello)), timeout=timeout)
            self.vacant = False
            return await self._understood(hello, decode(Greeting, answer))
        except grpc.aio.AioRpcError as problem:
            self.vacant = problem.code() is grpc.StatusCode.UNAVAILABLE
            if self.vacant:
                await self.disconnect()  # a slow network may still be connecting: let it
            raise Unreachable(f"{problem.code().name}: {problem.details()}") from None
        except WireError as problem:
            raise Unreachable(f"{self.peer} is not understood: {problem}") from None
        except asyncio.CancelledError:
            pass_on_cancellation()

    async def notices(self) -> list[Notice]:
        """The evictions the neighbour knows of; none if it cannot be asked now."""
        found = await self._ask("Notices", NoticeList)
        return found.notices if found else []

    async def amendments(self) -> list[Amendment]:
        """The changes of the run that the neighbour knows of."""
        found = await self._ask("Amendments", AmendmentList)
        return found.amendments if found else []

    async def _ask(self, method: str, kind: type[AnyControl]) -> AnyControl | None:
        try:
            call = self.connected().unary_unary(f"/{SERVICE}/{method}")
            answer = await call(b"", timeout=self._limits.hello_seconds)
            return decode(kind, answer, NOTICES_LIMIT)
        except (grpc.aio.AioRpcError, WireError, Unreachable):
            return None
        except asyncio.CancelledError:
            with contextlib.suppress(Unreachable):
                pass_on_cancellation()
            return None

    async def _understood(self, hello: Hello, greeting: Greeting) -> Hello:
        if greeting.hello is None:
            if greeting.refusal.startswith(OTHER_PROTOCOL) and hello.protocol > OLDEST:
                raise OlderProtocol(hello.protocol, greeting.refusal)
            self._on_refusal(self.peer)  # the reason may be news that this peer has missed
            raise Unreachable(f"{self.peer} refuses: {greeting.refusal}")
        pem = greeting.certificate.encode()
        try:
            genuine = self._roster.refresh().identify(pem) == self.peer
        except QuiverError as problem:
            raise Unreachable(f"{self.peer} is not itself: {problem}") from None
        if not genuine or not identity.signed_by(
            identity.parse(pem), greeting.signature, signed_text(hello, greeting.hello)
        ):
            raise Unreachable(f"{self.peer} is not itself: its signature does not fit its key")
        difference = self._agreement.difference(greeting.hello)
        if difference:
            raise Unreachable(difference)
        try:
            await self._on_greeting(greeting.hello)
        except RestoredBackup:
            raise
        except QuiverError as problem:
            self._log.alarm("neighbour not accepted", to=self.peer, reason=str(problem))
            raise Unreachable(str(problem)) from None
        self.greeted = True
        return greeting.hello


def signed_text(asked: Hello, answered: Hello) -> bytes:
    """What a greeting's signature covers: both sides' words, with the asker's fresh nonce."""
    return b"quiver greeting\0" + encode(asked) + encode(answered)
