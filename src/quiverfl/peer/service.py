"""The gRPC side of a peer: every call is identified by its certificate before it is read."""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from quiverfl.errors import QuiverError
from quiverfl.peer.connection import LARGEST_FRAME, Line
from quiverfl.peer.identity import LiveIdentity
from quiverfl.peer.metrics import Log, PeerMetrics
from quiverfl.peer.roster import LiveRoster
from quiverfl.peer.wire import (
    SERVICE,
    AmendmentList,
    Greeting,
    Hello,
    Join,
    NoticeList,
    Order,
    Reply,
    Vitals,
    WireError,
    decode,
    decode_hello,
    encode,
)

Context: TypeAlias = Any
"""grpc.aio.ServicerContext, whose published types are not its own."""

ANSWER_SECONDS = 60.0
"""For a caller to take the few bytes of an answer."""
HANDSHAKE_SECONDS = 10


class Handler(Protocol):
    """What the server asks of the peer."""

    name: str

    async def greet(self, sender: str, hello: Hello) -> Greeting: ...
    def receive(
        self,
        sender: str,
        frames: AsyncIterator[bytes],
        answer: Callable[[Reply], Awaitable[None]],
    ) -> Awaitable[None]: ...
    def offer(
        self, sender: str, join: Join, send: Callable[[bytes], Awaitable[None]]
    ) -> Awaitable[None]: ...
    def notices(self) -> NoticeList: ...
    def amendments(self) -> AmendmentList: ...
    def collect(self, sender: str, line: Line) -> Awaitable[None]: ...
    async def obey(self, order: Order) -> dict[str, Any]: ...


class PeerService:
    """The methods of the service; messages are bytes, decoded by quiverfl.peer.wire."""

    def __init__(
        self, handler: Handler, roster: LiveRoster, metrics: PeerMetrics, log: Log
    ) -> None:
        self._handler, self._roster, self._metrics, self._log = handler, roster, metrics, log

    @property
    def methods(self) -> Any:
        methods: dict[str, Any] = {
            "Hello": grpc.unary_unary_rpc_method_handler(self._hello),
            "Push": grpc.stream_stream_rpc_method_handler(self._push),
            "Pull": grpc.unary_stream_rpc_method_handler(self._pull),
            "Collect": grpc.stream_stream_rpc_method_handler(self._collect),
            "Notices": grpc.unary_unary_rpc_method_handler(self._notices),
            "Amendments": grpc.unary_unary_rpc_method_handler(self._amendments),
            "Probe": grpc.unary_unary_rpc_method_handler(self._probe),
            "Order": grpc.unary_unary_rpc_method_handler(self._order),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _caller(self, context: Context) -> str:
        """Fail closed: no certificate, not in the roster or another key means no answer."""
        certificates = context.auth_context().get("x509_pem_cert", [])
        try:
            if not certificates:
                raise QuiverError("no certificate.")
            return self._roster.refresh().identify(certificates[0])
        except QuiverError as problem:
            self._metrics.refused("identity")
            self._log.alarm("caller refused", reason=str(problem), address=context.peer())
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(problem))
            raise

    async def _hello(self, frame: bytes, context: Context) -> bytes:
        caller = await self._caller(context)
        try:
            greeting = await self._handler.greet(caller, decode_hello(frame))
        except WireError as problem:
            self._metrics.refused(problem.kind)
            greeting = Greeting(refusal=str(problem)[:1000])
        return self._metrics.sent(encode(greeting))

    async def _push(self, frames: AsyncIterator[bytes], context: Context) -> None:
        caller = await self._caller(context)

        async def answer(reply: Reply) -> None:
            async with asyncio.timeout(ANSWER_SECONDS):
                await context.write(self._metrics.sent(encode(reply)))

        await self._handler.receive(caller, frames, answer)

    async def _pull(self, frame: bytes, context: Context) -> None:
        caller = await self._caller(context)

        async def send(frame: bytes) -> None:
            await context.write(self._metrics.sent(frame))

        try:
            await self._handler.offer(caller, decode(Join, frame), send)
        except TimeoutError:
            self._metrics.refused("slow")
            await context.abort(grpc.StatusCode.ABORTED, "too slow while others wait")
        except WireError as problem:
            self._metrics.refused(problem.kind)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(problem))
        except QuiverError as problem:
            self._metrics.refused("pull")
            self._log.alarm("model refused", caller=caller, reason=str(problem))
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(problem))

    async def _notices(self, _frame: bytes, context: Context) -> bytes:
        await self._caller(context)
        return self._metrics.sent(encode(self._handler.notices()))

    async def _amendments(self, _frame: bytes, context: Context) -> bytes:
        await self._caller(context)
        return self._metrics.sent(encode(self._handler.amendments()))

    async def _probe(self, _frame: bytes, context: Context) -> bytes:
        """For `quiver peer doctor` of another member: what time it is here, and which version."""
        await self._caller(context)
        return self._metrics.sent(encode(Vitals(time=time.time(), version=installed_version())))

    async def _collect(self, _frames: AsyncIterator[bytes], context: Context) -> None:
        caller = await self._caller(context)
        try:
            await self._handler.collect(caller, Line(context))
        except QuiverError as problem:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(problem))

    async def _order(self, frame: bytes, context: Context) -> bytes:
        caller = await self._caller(context)
        if caller != self._handler.name:
            self._metrics.refused("order")
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "only its owner orders a peer")
        try:
            result = await self._handler.obey(decode(Order, frame))
        except QuiverError as problem:
            result = {"error": str(problem)}
        return json.dumps(result).encode()


class Server:
    """A listening peer: its service and the standard health service, over mutual TLS."""

    def __init__(
        self, bind: str, keys: Path, service: PeerService, keepalive: float, connections: int
    ) -> None:
        milliseconds = int(keepalive * 1000)
        options = [
            ("grpc.max_receive_message_length", LARGEST_FRAME),
            ("grpc.max_send_message_length", LARGEST_FRAME),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", milliseconds),
            ("grpc.keepalive_timeout_ms", milliseconds),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
            # A bad link delivers many pings at once; a member's connection is not closed for that.
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.max_concurrent_streams", 512),
            # Whoever has no certificate holds a place for seconds, and never the last descriptor.
            ("grpc.max_allowed_incoming_connections", connections),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
        ]
        self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers((service.methods,))
        self._health = _health_service()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        try:
            self.port = self._server.add_secure_port(bind, _server_credentials(keys))
        except RuntimeError as problem:
            raise QuiverError(
                f"cannot listen on {bind}: the address is in use or not this machine's."
            ) from problem

    async def start(self) -> None:
        await self._server.start()
        await self.healthy(True)

    async def healthy(self, yes: bool) -> None:
        states = health_pb2.HealthCheckResponse.ServingStatus
        state = states.Value("SERVING" if yes else "NOT_SERVING")
        for name in ("", SERVICE):
            await self._health.set(name, state)

    async def stop(self, grace: float) -> None:
        await self.healthy(False)
        await self._server.stop(grace)


@functools.cache
def installed_version() -> str:
    try:
        return importlib.metadata.version("quiverfl")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _health_service() -> Any:
    return getattr(health, "aio").HealthServicer()  # noqa: B009 - not in the published types


def _server_credentials(keys: Path) -> grpc.ServerCredentials:
    """Read again for every new connection: certificates can be rotated while the peer runs."""
    live = LiveIdentity(keys)
    identity = live.refresh()

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(identity.key, identity.certificate)], identity.authority
        )

    def fetch() -> Any:
        nonlocal identity
        before, identity = identity, live.refresh()
        return None if identity is before else configuration()

    return grpc.dynamic_ssl_server_credentials(
        configuration(), fetch, require_client_authentication=True
    )
