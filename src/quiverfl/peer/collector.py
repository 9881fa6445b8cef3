"""For a peer that nobody can call, behind NAT or a firewall: it calls, and fetches its shares.

It opens a stream to each neighbour; whoever has a share for it sends it over that stream, word for
word as it would push it. So the same checks, signatures and books hold, and no third party is
needed: a neighbour learns nothing but that this peer cannot be called.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from quiverfl.peer.agreement import Limits
from quiverfl.peer.connection import Unreachable
from quiverfl.peer.contact import Contact
from quiverfl.peer.metrics import Log, PeerMetrics
from quiverfl.peer.receiver import Receiver
from quiverfl.peer.wire import Reply, encode

NEWS_SECONDS = 2.0
"""How often a neighbour is greeted while it has nothing to send: nobody can call with news."""


class Collector:
    """Fetches what one neighbour has for this peer."""

    def __init__(
        self, contact: Contact, receiver: Receiver, limits: Limits, metrics: PeerMetrics, log: Log
    ) -> None:
        self._contact, self._receiver, self._limits = contact, receiver, limits
        self._metrics, self._log = metrics, log
        self._chance = random.Random(secrets.randbits(64))

    async def run(self) -> None:
        pause = self._limits.retry_first
        while True:
            try:
                await self._fetch()
                pause = self._limits.retry_first
            except Unreachable as problem:
                self._log("cannot fetch", peer_called=self._contact.peer, reason=str(problem))
                await asyncio.sleep(pause * self._chance.uniform(0.5, 1.0))
                pause = min(2 * pause, self._limits.retry_cap)

    async def _fetch(self) -> None:
        """One share, however long it takes to come."""
        await self._contact.hello()
        call = self._contact.line()
        reading = asyncio.ensure_future(call.read())
        try:
            while not (await asyncio.wait({reading}, timeout=NEWS_SECONDS))[0]:
                await self._contact.hello()
            frames = _frames(reading.result(), call)
            await self._receiver.push(self._contact.peer, frames, lambda r: self._answer(call, r))
            await call.done_writing()
            async with asyncio.timeout(self._limits.hello_seconds):
                await call.read()  # the end, once the other side has heard the last word
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError) as problem:
            text = problem.details() if isinstance(problem, grpc.aio.AioRpcError) else "cut"
            raise Unreachable(f"connection lost: {text}") from None
        except TimeoutError:
            raise Unreachable("no answer") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Unreachable("the connection was closed") from None
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            call.cancel()

    async def _answer(self, call: Any, reply: Reply) -> None:
        await call.write(self._metrics.sent(encode(reply)))


async def _frames(first: Any, call: Any) -> AsyncIterator[bytes]:
    frame = first
    while isinstance(frame, bytes):
        yield frame
        frame = await call.read()
