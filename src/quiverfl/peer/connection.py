"""Connections between peers: mutually authenticated, and what can become of them."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import grpc
import grpc.aio

from quiverfl.errors import QuiverError
from quiverfl.peer.identity import Identity
from quiverfl.peer.wire import (
    CHUNK,
)

LARGEST_FRAME = CHUNK + 1024


class RestoredBackup(QuiverError):
    """This peer's store is older than what its neighbours remember of it."""


class Unreachable(Exception):
    """Not now: try again later. Nothing is known about what the other side did."""


class OlderProtocol(Unreachable):
    """The other side does not know this version of the protocol; it may know an older one."""

    def __init__(self, tried: int, refusal: str) -> None:
        super().__init__(refusal)
        self.tried = tried


class Denied(Unreachable):
    """The other side will not have this share: hearing from it is no reason to hurry."""


def pass_on_cancellation() -> NoReturn:
    """gRPC cancels the calls of a closed channel; that is not a request to end this task."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    raise Unreachable("the connection was closed") from None


def open_channel(address: str, name: str, identity: Identity, keepalive: float = 20.0) -> Any:
    """A mutually authenticated connection that accepts only a certificate for this name."""
    credentials = grpc.ssl_channel_credentials(
        identity.authority, identity.key, identity.certificate
    )
    milliseconds = int(keepalive * 1000)
    options = [
        ("grpc.ssl_target_name_override", name),
        ("grpc.max_receive_message_length", LARGEST_FRAME),
        ("grpc.max_send_message_length", LARGEST_FRAME),
        ("grpc.keepalive_time_ms", milliseconds),
        ("grpc.keepalive_timeout_ms", milliseconds),
        ("grpc.http2.ping_timeout_ms", milliseconds),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.aio.secure_channel(address, credentials, options=options)


class Line:
    """A stream that a neighbour has opened to fetch a share over it, as it cannot be called."""

    def __init__(self, context: Any) -> None:
        self._context = context  # grpc.aio.ServicerContext, whose published types are not its own
        self.closed = asyncio.Event()

    async def write(self, frame: bytes) -> None:
        try:
            await self._context.write(frame)
        except Exception as problem:  # gRPC raises several kinds when the other side has gone
            raise Unreachable(f"the line was closed: {problem}") from None

    async def read(self) -> Any:
        try:
            return await self._context.read()
        except Exception as problem:
            raise Unreachable(f"the line was closed: {problem}") from None

    def cancel(self) -> None:
        """It was used, or is of no more use."""
        self.closed.set()
