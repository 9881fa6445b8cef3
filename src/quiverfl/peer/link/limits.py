"""Limits for a member or a stranger: connections, streams, requests, places.

A member counts once, however much it opens. What exceeds its part ends its own oldest, or waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from quiverfl.errors import QuiverError
from quiverfl.peer.context import Limits
from quiverfl.peer.link.wire import WireError

# Requests

LONGEST_WAIT = 2.0
"""Seconds for which a request beyond its member's part is held; one that came later is refused."""


@dataclass(frozen=True)
class Rate:
    """Requests of one kind that a member may make at once, and per second after that."""

    burst: float
    a_second: float


SELDOM = Rate(20, 2)
LINE = Rate(200, 20)
RATES = {"Hello": Rate(100, 30), "Push": Rate(400, 200), "Collect": Rate(400, 200)}
RATES |= {"Dial": LINE, "Accept": LINE}
"""An honest peer pushes once a round to each neighbour, and greets when it connects or asks how far
others are. Lines by a relay are opened once for each neighbour, and again when one breaks. All
other requests are seldom."""


class RequestBudget:
    """Bounds the requests of each member and kind. What comes too fast waits, then is refused."""

    def __init__(self) -> None:
        self._free_at: dict[tuple[str, str], float] = {}

    def reserve(self, member: str, kind: str, now: float) -> float:
        """Return the seconds for which a request must wait, or raise a WireError."""
        rate = RATES.get(kind, SELDOM)
        at = max(self._free_at.get((member, kind), 0.0), now - rate.burst / rate.a_second)
        wait = at + 1 / rate.a_second - now
        if wait > LONGEST_WAIT:
            raise WireError("too often", f"{member!r} asks too often: {kind}.")
        self._free_at[member, kind] = at + 1 / rate.a_second
        return max(0.0, wait)

    async def wait_for_turn(self, member: str, kind: str) -> None:
        if wait := self.reserve(member, kind, time.monotonic()):
            await asyncio.sleep(wait)


# Streams and bodies


class StreamLimit:
    """Limits the open streams of each member; one more ends that member's oldest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[str, list[asyncio.Task[Any]]] = {}
        self._replaced: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def hold(self, member: str) -> AsyncIterator[None]:
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


class AdmissionQueue:
    """Admits bodies on their way: a few at once, one of each member, first come, first served."""

    def __init__(self, places: int, limits: Limits) -> None:
        self._limits = limits
        self._turns = StreamLimit(1)
        self._places = asyncio.Semaphore(places)
        self.waiting = 0

    @asynccontextmanager
    async def place(self, sender: str) -> AsyncIterator[Callable[[int], float]]:
        """Wait for room for a body. Gives a function from bytes received to the seconds left."""
        async with self._turns.hold(sender):
            self.waiting += 1
            try:
                await self._places.acquire()
            finally:
                self.waiting -= 1
            began = time.monotonic()
            try:
                yield lambda received: self._seconds_left(began, received)
            finally:
                self._places.release()

    def _seconds_left(self, began: float, received: int) -> float:
        """A body may take its time unless other requests wait, but it must keep a lowest rate."""
        patience = self._limits.patience if self.waiting else self._limits.idle_seconds
        return began + patience + received / self._limits.slowest - time.monotonic()


# Connections

STRANGERS = 64
"""Connections of callers that have not shown yet who they are; one more ends the oldest."""
CONNECTIONS = 4
"""Connections of one member: it connects once, twice while it reconnects, and once to look."""
SPARE = 64
"""Accepted beyond these until the next sweep."""
SILENT_SECONDS = 10.0
"""Time that a connection may take to identify itself, by handshake and request."""
SWEEP_PAUSE = 0.1
"""The least time between two sweeps of the connections."""
RESERVED_FILES = 96
"""Files that the process has open anyway: libraries, the store, a commit, logs."""


def acceptable_connections(members: int) -> int:
    """Number of connections that a peer accepts, so that it can always open its own files.

    Places are kept for the members' connections, in and out. Strangers share the rest.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        soft = _raise_file_limit(hard)
    own = RESERVED_FILES + 2 * members
    room = soft - own
    wanted = STRANGERS + SPARE + CONNECTIONS * members
    if room < 2 * members + 16:
        raise QuiverError(
            f"this process may open {soft} files, which is too few for a run of {members} peers: "
            f"allow {own + wanted} (ulimit -n, or LimitNOFILE= of its unit)."
        )
    return min(room, wanted)


def _raise_file_limit(hard: int) -> int:
    wanted = 65536 if hard == resource.RLIM_INFINITY else hard
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


Address = tuple[str, int]


def parse_caller(text: str) -> Address | None:
    """Parse gRPC's name of a caller, such as ipv4:10.1.0.5:40312 or ipv6:%5Bfe80::1%5D:40312."""
    kind, _, rest = text.partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    host = host.removeprefix("%5B").removesuffix("%5D").strip("[]").partition("%")[0]
    return host.removeprefix("::ffff:"), int(port)


@dataclass
class _Connection:
    since: float
    member: str = ""  # who has made a request over it; empty for a stranger
    used: float = 0.0


class ConnectionGuard:
    """Bounds the connections of each member, and of callers that are not identified yet.

    gRPC accepts connections and knows no limit but their number, so one member could hold all. The
    guard looks at the process's own sockets whenever one is accepted, and shuts down those that are
    too many or too long silent. gRPC then drops them as if the other side had hung up.
    """

    def __init__(self, port: int, most: int, members: int) -> None:
        self._port = port
        # Where files are short, strangers give way first.
        self._strangers = max(4, min(STRANGERS, most - CONNECTIONS * members))
        self._known: dict[Address, _Connection] = {}
        self._loop = asyncio.get_running_loop()
        self._due: asyncio.TimerHandle | None = None
        self._last = 0.0
        self.closed = 0

    def notice(self) -> None:
        """Look soon: a connection was accepted. May be called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._sweep_within, 0.0)

    def identify(self, caller: str, member: str) -> None:
        """Remember whose connection a request came over."""
        address = parse_caller(caller)
        if address is None:
            return
        now = time.monotonic()
        connection = self._known.setdefault(address, _Connection(now))
        connection.used = now
        if not connection.member:
            connection.member = member
            self._sweep_within(0.0)

    def stop(self) -> None:
        if self._due is not None:
            self._due.cancel()

    def _sweep_within(self, seconds: float) -> None:
        at = max(self._loop.time() + seconds, self._last + SWEEP_PAUSE)
        if self._due is not None:
            if self._due.when() <= at:
                return
            self._due.cancel()
        self._due = self._loop.call_at(at, self._sweep)

    def _sweep(self) -> None:
        self._due, self._last = None, self._loop.time()
        now = time.monotonic()
        sockets = dict(_accepted_sockets(self._port))
        for address in list(self._known):
            if address not in sockets:
                del self._known[address]
        for address in sockets:
            self._known.setdefault(address, _Connection(now))
        for address in self._excess(now):
            self.closed += 1
            del self._known[address]
            _hang_up(sockets[address], self._port, address)
        silent = [c.since for c in self._known.values() if not c.member]
        if silent:
            self._sweep_within(max(0.0, min(silent) + SILENT_SECONDS - now) + SWEEP_PAUSE)

    def _excess(self, now: float) -> list[Address]:
        """List the connections that must go."""
        owners: dict[str, list[Address]] = {}
        for address, connection in self._known.items():
            owners.setdefault(connection.member, []).append(address)
        strangers = sorted(owners.pop("", []), key=lambda a: self._known[a].since)
        late = [a for a in strangers if now - self._known[a].since > SILENT_SECONDS]
        rest = strangers[len(late) :]
        excess = late + rest[: max(0, len(rest) - self._strangers)]
        for addresses in owners.values():
            addresses.sort(key=lambda a: self._known[a].used)
            excess += addresses[: max(0, len(addresses) - CONNECTIONS)]
        return excess


def _accepted_sockets(port: int) -> list[tuple[Address, int]]:
    """List the descriptors of connections to a port of this process, by the caller's address."""
    open_files = []
    for name in os.listdir("/dev/fd"):
        descriptor = int(name)
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                address = _caller_of(descriptor, port)
                if address is not None:
                    open_files.append((address, descriptor))
    return open_files


def _caller_of(descriptor: int, port: int) -> Address | None:
    """Return who is connected over a descriptor, if it belongs to a connection to this port."""
    one = socket.socket(fileno=os.dup(descriptor))
    with one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.getsockname()[1] != port:
            return None
        host, number = one.getpeername()[:2]  # raises on the socket that listens
    return host.partition("%")[0].removeprefix("::ffff:"), number


def _hang_up(descriptor: int, port: int, address: Address) -> None:
    """Shut a connection down, unless the descriptor is of another one by now."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        if one.getsockname()[1] == port and one.getpeername()[1] == address[1]:
            one.shutdown(socket.SHUT_RDWR)
