"""Requests of a peer's owner, over a Unix socket in the peer's folder.

No other user can open that folder, and the network shares no limit with it: the owner is answered
whatever others do to the port. A request is one line of JSON, and so is the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.link.wire import CONTROL_LIMIT, Order, decode, encode

if TYPE_CHECKING:
    from quiverfl.peer.node import Node

SOCKET = "control"
OWNER_SECONDS = 10.0
"""Time that the owner's request may take to arrive."""


class Control:
    """Answers the owner of a running peer."""

    def __init__(self, node: Node) -> None:
        self._node, self._path = node, node.ctx.identity.folder / SOCKET
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        try:
            self._path.unlink(missing_ok=True)  # of a process that was killed
            with _short_path(self._path) as path, socket.socket(socket.AF_UNIX) as one:
                one.bind(path)
                self._path.chmod(0o600)
                self._server = await asyncio.start_unix_server(
                    self._answer, sock=one.dup(), limit=CONTROL_LIMIT
                )
        except OSError as problem:  # the peer works without its owner's commands
            self._node.log.alarm("no orders are taken", path=str(self._path), reason=str(problem))

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(OWNER_SECONDS):
                line = await reader.readline()
            result = await self.handle_order(decode(Order, line))
        except QuiverError as problem:
            result = {"error": str(problem)}
        except (TimeoutError, ValueError, OSError):  # silent, too long, gone
            result = {"error": "an order is one line of JSON."}
        with contextlib.suppress(OSError):
            writer.write(json.dumps(result).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def handle_order(self, order: Order) -> dict[str, Any]:
        """Do what the owner asks. Returns the status, or what was evicted."""
        node = self._node
        if order.action != "status":
            node.log("order", action=order.action, about=order.peer)
        if order.action == "stop":
            node.stop()
        elif order.action == "leave":
            node.leave()
        elif order.action == "evict":
            if order.peer is None or order.peer not in node.neighbours.senders:
                raise QuiverError(f"evict {order.peer!r}: name another member of the roster.")
            lost = await node.neighbours.evict(order.peer, order.ban)
            return {"evicted": order.peer, "written_off": lost / UNIT}
        elif order.action == "amend":
            if order.terms is None:
                raise QuiverError("amend: say what is to change, and from which round on.")
            await node.propose(order.terms)
        return node.status()


class NotRunning(QuiverError):
    """The peer does not answer."""


async def make_order(folder: Path, order: Order, timeout: float = 5.0) -> dict[str, Any]:
    """Ask the peer that runs in a folder for something. Returns its answer."""
    try:
        async with asyncio.timeout(timeout):
            with _short_path(folder / SOCKET) as path:
                reader, writer = await asyncio.open_unix_connection(path)
            writer.write(encode(order) + b"\n")
            answer = await reader.read()
            writer.close()
        result: dict[str, Any] = json.loads(answer)
    except PermissionError:
        raise QuiverError(f"{folder / SOCKET} belongs to another user: ask as it.") from None
    except (OSError, TimeoutError, ValueError):
        raise NotRunning(
            f"the peer in {folder} does not answer: it is not running, or still starting. "
            f"quiver peer run {folder} continues from its store."
        ) from None
    if "error" in result:
        raise QuiverError(str(result["error"]))
    return result


def send_order(folder: Path, order: Order, timeout: float = 5.0) -> dict[str, Any]:
    """Make an order from code that is not asynchronous."""
    return asyncio.run(make_order(folder, order, timeout))


LONGEST_PATH = 100
"""Bytes: systems take a little more in the name of a Unix socket."""


@contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """Name a socket so that the system takes it, however long the path of its folder is."""
    text = str(path.absolute())
    if len(os.fsencode(text)) <= LONGEST_PATH or not Path("/proc/self/fd").exists():
        yield text
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
