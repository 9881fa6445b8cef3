"""The gRPC service of a peer: its answers to calls.

Every caller is identified by its certificate before anything it says is read.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from quiverfl.errors import QuiverError
from quiverfl.peer.changes import SignedLog
from quiverfl.peer.context import PeerContext
from quiverfl.peer.link.identity import LiveIdentity
from quiverfl.peer.link.limits import (
    ConnectionGuard,
    RequestBudget,
    StreamLimit,
    acceptable_connections,
)
from quiverfl.peer.link.link import (
    LARGEST_FRAME,
    RestoredBackup,
    ReverseStream,
    greeting_text,
)
from quiverfl.peer.link.models import ModelServer
from quiverfl.peer.link.relay import Relay
from quiverfl.peer.link.wire import (
    SERVICE,
    Greeting,
    Hello,
    Join,
    Reply,
    Vitals,
    WireError,
    decode,
    decode_hello,
    encode,
    encode_statements,
)

if TYPE_CHECKING:
    from quiverfl.peer.node import Node

CallContext: TypeAlias = Any
"""grpc.aio.ServicerContext, whose published types are not its own."""

ANSWER_SECONDS = 60.0
"""Time that a caller may take to read the few bytes of an answer."""
HANDSHAKE_SECONDS = 10
LAST_WORDS = 0.2
"""Time that calls may go on after a stop, such as with receipts of the last commit."""
WATCHERS, WATCH_TICK = 2, 0.1
"""Streams of the health service that a member may hold, and seconds between two checks."""


class Service:
    """The methods that other members call; messages are bytes, decoded by `link.wire`."""

    def __init__(self, ctx: PeerContext, node: Node) -> None:
        self._ctx, self._node = ctx, node
        self._models, self.relay = ModelServer(ctx), Relay(ctx)
        self._budget = RequestBudget()
        self._watchers = StreamLimit(WATCHERS)
        self._written: dict[str, tuple[str, bytes]] = {}  # lists of statements, by table
        self._calls: set[asyncio.Task[Any]] = set()
        self.guard: ConnectionGuard | None = None
        self.healthy = True

    @property
    def methods(self) -> Any:
        neighbours = self._node.neighbours
        evictions = functools.partial(self._list_statements, neighbours.evictions)
        amendments = functools.partial(self._list_statements, neighbours.amendments)
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        methods: dict[str, Any] = {
            "Hello": unary(self._ended_by_stop(self._hello)),
            "Push": stream(self._ended_by_stop(self._push)),
            "Pull": grpc.unary_stream_rpc_method_handler(self._ended_by_stop(self._pull)),
            "Collect": stream(self._ended_by_stop(self._collect)),
            neighbours.evictions.kind.method: unary(self._ended_by_stop(evictions)),
            neighbours.amendments.kind.method: unary(self._ended_by_stop(amendments)),
            "Probe": unary(self._ended_by_stop(self._probe)),
            "LastReceipt": unary(self._ended_by_stop(self._last_receipt)),
            "Attend": grpc.unary_stream_rpc_method_handler(self._ended_by_stop(self._attend)),
            "Dial": stream(self._ended_by_stop(self._dial)),
            "Accept": stream(self._ended_by_stop(self._accept)),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    @property
    def health_methods(self) -> Any:
        """The standard health service, which asks the roster as every other method does."""
        check, watch = map(self._ended_by_stop, (self._check_health, self._watch_health))
        methods: dict[str, Any] = {
            "Check": grpc.unary_unary_rpc_method_handler(check),
            "Watch": grpc.unary_stream_rpc_method_handler(watch),
        }
        return grpc.method_handlers_generic_handler("grpc.health.v1.Health", methods)

    def _ended_by_stop(self, handler: Callable[..., Awaitable[Any]]) -> Any:
        """Let a handler end by itself when the peer stops; gRPC would cut it off with an error."""

        async def handle(request: Any, context: CallContext) -> Any:
            task = asyncio.current_task()
            assert task is not None
            self._calls.add(task)
            try:
                if self.healthy:
                    return await handler(request, context)
            except asyncio.CancelledError:
                if self.healthy:
                    raise
                task.uncancel()
            finally:
                self._calls.discard(task)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the peer stops")

        return handle

    async def end_calls(self) -> None:
        """Refuse new calls; calls under way may send their last answer, and are ended."""
        self.healthy = False
        if self._calls:
            await asyncio.wait(self._calls, timeout=LAST_WORDS)
        for task in self._calls:
            task.cancel()

    async def _admit(self, context: CallContext, kind: str) -> str:
        """Name the caller, and let it wait if it asks too often."""
        member = await self._identify(context)
        if self.guard is not None:
            self.guard.identify(context.peer(), member)
        try:
            await self._budget.wait_for_turn(member, kind)
        except WireError as problem:
            self._ctx.metrics.count_refusal(problem.kind)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(problem))
        return member

    async def _identify(self, context: CallContext) -> str:
        """Name the caller. No certificate, an unknown name or another key means no answer."""
        certificates = context.auth_context().get("x509_pem_cert", [])
        try:
            if not certificates:
                raise QuiverError("no certificate.")
            return self._ctx.roster.refresh().identify(certificates[0])
        except QuiverError as problem:
            self._ctx.metrics.count_refusal("identity")
            self._ctx.log.alarm("caller refused", reason=str(problem), address=context.peer())
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(problem))
            raise

    async def _hello(self, frame: bytes, context: CallContext) -> bytes:
        caller = await self._admit(context, "Hello")
        try:
            greeting = await self._greet(caller, decode_hello(frame))
        except WireError as problem:
            self._ctx.metrics.count_refusal(problem.kind)
            greeting = Greeting(refusal=str(problem)[:1000])
        return self._ctx.metrics.count_sent(encode(greeting))

    async def _greet(self, caller: str, hello: Hello) -> Greeting:
        refusal = await self._check_hello(caller, hello)
        if refusal:
            self._ctx.metrics.count_refusal("hello")
            self._ctx.log.alarm("hello refused", sender=caller, reason=refusal)
            return Greeting(refusal=refusal[:1000])
        answer = self._node.neighbours.answer_hello(hello)
        identity = self._ctx.identity.refresh()
        return Greeting(
            hello=answer,
            certificate=identity.certificate.decode(),
            signature=identity.sign(greeting_text(hello, answer)),
        )

    async def _check_hello(self, caller: str, hello: Hello) -> str:
        """Say why a hello is refused; empty if it is accepted."""
        name = self._ctx.name
        if (caller, name) != (hello.sender, hello.receiver):
            return f"{caller!r} called {name!r}, its words are from {hello.sender!r}."
        difference = self._ctx.agreement.difference(hello)
        if difference:
            return difference
        try:
            await self._node.neighbours.accept_hello(hello)
        except RestoredBackup as problem:
            self._node.fail(problem)
            return str(problem)
        except QuiverError as problem:
            return str(problem)
        return ""

    async def _push(self, frames: AsyncIterator[bytes], context: CallContext) -> None:
        caller = await self._admit(context, "Push")

        async def answer(reply: Reply) -> None:
            async with asyncio.timeout(ANSWER_SECONDS):
                await context.write(self._ctx.metrics.count_sent(encode(reply)))

        await self._node.receiver.push(caller, frames, answer)

    async def _pull(self, frame: bytes, context: CallContext) -> None:
        caller = await self._admit(context, "Pull")

        async def send(frame: bytes) -> None:
            await context.write(self._ctx.metrics.count_sent(frame))

        try:
            await self._models.serve(caller, decode(Join, frame), send)
        except TimeoutError:
            self._ctx.metrics.count_refusal("slow")
            await context.abort(grpc.StatusCode.ABORTED, "too slow while others wait")
        except WireError as problem:
            self._ctx.metrics.count_refusal(problem.kind)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(problem))
        except QuiverError as problem:
            self._ctx.metrics.count_refusal("pull")
            self._ctx.log.alarm("model refused", caller=caller, reason=str(problem))
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(problem))

    async def _collect(self, _frames: AsyncIterator[bytes], context: CallContext) -> None:
        """Serve a neighbour that cannot be called and has opened a stream to fetch its shares."""
        caller = await self._admit(context, "Collect")
        sender = self._node.neighbours.senders.get(caller)
        if sender is None:
            problem = f"{caller!r} has not said hello yet."
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem)
            return
        await sender.serve_reverse_stream(ReverseStream(context))

    async def _attend(self, _frame: bytes, context: CallContext) -> None:
        caller = await self._admit(context, "Attend")
        await self._relay(context, self.relay.attend(caller, context.write))

    async def _dial(self, _frames: AsyncIterator[bytes], context: CallContext) -> None:
        caller = await self._admit(context, "Dial")
        await self._relay(context, self.relay.dial(caller, context))

    async def _accept(self, _frames: AsyncIterator[bytes], context: CallContext) -> None:
        caller = await self._admit(context, "Accept")
        await self._relay(context, self.relay.accept(caller, context))

    async def _relay(self, context: CallContext, work: Awaitable[None]) -> None:
        try:
            await work
        except WireError as problem:
            self._ctx.metrics.count_refusal(problem.kind)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(problem))

    async def _list_statements(
        self, log: SignedLog[Any], _frame: bytes, context: CallContext
    ) -> bytes:
        await self._admit(context, log.kind.method)
        table, own_hash = log.kind.table, log.hash
        if table not in self._written or self._written[table][0] != own_hash:
            body = await asyncio.to_thread(encode_statements, log.kind, log.statements())
            self._written[table] = (own_hash, body)
        return self._ctx.metrics.count_sent(self._written[table][1])

    async def _last_receipt(self, _frame: bytes, context: CallContext) -> bytes:
        """Show a member the last receipt that it has signed, should its store not know it."""
        caller = await self._admit(context, "LastReceipt")
        receipt = await asyncio.to_thread(self._ctx.store.last_receipt, caller)
        return self._ctx.metrics.count_sent(encode(receipt))

    async def _probe(self, _frame: bytes, context: CallContext) -> bytes:
        """Tell `quiver peer doctor` of another member the time and the version here."""
        await self._admit(context, "Probe")
        vitals = Vitals(time=time.time(), version=installed_version())
        return self._ctx.metrics.count_sent(encode(vitals))

    def _write_health(self) -> bytes:
        states = health_pb2.HealthCheckResponse.ServingStatus
        state = states.Value("SERVING" if self.healthy else "NOT_SERVING")
        return bytes(health_pb2.HealthCheckResponse(status=state).SerializeToString())

    async def _check_health(self, _frame: bytes, context: CallContext) -> bytes:
        await self._admit(context, "Health")
        return self._write_health()

    async def _watch_health(self, _frame: bytes, context: CallContext) -> None:
        """Say that the peer serves, and later that it stops."""
        caller = await self._admit(context, "Health")
        try:
            async with self._watchers.hold(caller):
                await context.write(self._write_health())
                while self.healthy:
                    await asyncio.sleep(WATCH_TICK)
                await context.write(self._write_health())
        except WireError as problem:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(problem))


# The server


class Server:
    """Listens for a peer: its service and the standard health service, over mutual TLS."""

    def __init__(self, bind: str, ctx: PeerContext, service: Service) -> None:
        milliseconds = int(ctx.limits.keepalive_seconds * 1000)
        members = len(ctx.roster.current.names)
        connections = acceptable_connections(members)
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
            # The guard makes room; this keeps the last descriptors.
            ("grpc.max_allowed_incoming_connections", connections),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
        ]
        self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers((service.methods, service.health_methods))
        self._service, self._guard = service, None
        try:
            credentials = _load_server_credentials(ctx.identity.folder, self._notice_connection)
            self.port = self._server.add_secure_port(bind, credentials)
        except RuntimeError as problem:
            raise QuiverError(
                f"cannot listen on {bind}: the address is in use or not this machine's."
            ) from problem

        self._guard = service.guard = ConnectionGuard(self.port, connections, members)

        host = bind.rpartition(":")[0].strip("[]")
        self.own_address = ({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), self.port)
        """The address at which this machine itself reaches the server."""

    def _notice_connection(self) -> None:
        if self._guard is not None:
            self._guard.notice()

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace: float) -> None:
        await self._service.end_calls()
        if self._guard is not None:
            self._guard.stop()
        await self._server.stop(grace)


@functools.cache
def installed_version() -> str:
    try:
        return importlib.metadata.version("quiverfl")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _load_server_credentials(folder: Path, notice: Callable[[], None]) -> grpc.ServerCredentials:
    """Load credentials that are read again for every new connection, so keys can be rotated.

    `notice` is called with each, from a thread of gRPC's.
    """
    live = LiveIdentity(folder)
    identity = live.refresh()

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(identity.key, identity.certificate)], identity.authority
        )

    def fetch() -> Any:
        nonlocal identity
        notice()
        before, identity = identity, live.refresh()
        return None if identity is before else configuration()

    return grpc.dynamic_ssl_server_credentials(
        configuration(), fetch, require_client_authentication=True
    )
