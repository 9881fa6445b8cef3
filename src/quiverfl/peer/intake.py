"""Fairness between senders: who may deliver at the same time, and how slowly.

A member is one member, however many streams it opens: the newest takes the place of its oldest. And
a body that trickles gives way as soon as somebody else waits for its place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from quiverfl.peer.agreement import Limits
from quiverfl.peer.wire import WireError


class Turns:
    """So many at the same time for each member; one more ends that member's oldest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[str, list[asyncio.Task[Any]]] = {}
        self._replaced: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def of(self, member: str) -> AsyncIterator[None]:
        task = asyncio.current_task()
        assert task is not None
        tasks = self._open.setdefault(member, [])
        if len(tasks) >= self._most:
            oldest = tasks.pop(0)
            self._replaced.add(oldest)
            oldest.cancel()
        tasks.append(task)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._replaced:
                raise
            task.uncancel()
            raise WireError("replaced", "a newer stream of the same sender took over.") from None
        finally:
            self._replaced.discard(task)
            if task in tasks:
                tasks.remove(task)


class Intake:
    """Models on their way: a few at once, one of each member, first come, first served."""

    def __init__(self, places: int, limits: Limits) -> None:
        self._limits = limits
        self._turns = Turns(1)
        self._places = asyncio.Semaphore(places)
        self.waiting = 0

    @asynccontextmanager
    async def place(self, sender: str) -> AsyncIterator[Callable[[int], float]]:
        """Room for a body; gives how many seconds it has left, by the bytes that have come."""
        async with self._turns.of(sender):
            self.waiting += 1
            try:
                await self._places.acquire()
            finally:
                self.waiting -= 1
            began = time.monotonic()
            try:
                yield lambda filled: self._left(began, filled)
            finally:
                self._places.release()

    def _left(self, began: float, filled: int) -> float:
        """A body may take its time, unless others wait; but it must end some day."""
        patience = self._limits.patience if self.waiting else self._limits.idle_seconds
        return began + patience + filled / self._limits.slowest - time.monotonic()
