"""Speaking to a running peer as its owner: over its own port, with its own certificate."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc.aio

from quiverfl.errors import QuiverError
from quiverfl.peer.connection import open_channel
from quiverfl.peer.peer_folder import PeerFolder
from quiverfl.peer.wire import SERVICE, Order, encode


class NotRunning(QuiverError):
    """The peer does not answer."""


async def order(folder: PeerFolder, order: Order, timeout: float = 5.0) -> dict[str, Any]:
    """Ask a running peer for something; its answer."""
    host, _, port = folder.own.bind.rpartition(":")
    local = "127.0.0.1" if host in ("0.0.0.0", "[::]", "") else host
    channel = open_channel(f"{local}:{port}", folder.own.name, folder.identity())
    try:
        answer = await channel.unary_unary(f"/{SERVICE}/Order")(encode(order), timeout=timeout)
    except grpc.aio.AioRpcError as problem:
        if problem.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise QuiverError(f"{folder.own.name!r} refused: {problem.details()}") from None
        raise NotRunning(
            f"{folder.own.name!r} does not answer on {folder.own.bind}: it is not running, or "
            f"still starting. quiver peer run {folder.path} continues from its store."
        ) from None
    finally:
        await channel.close()
    result: dict[str, Any] = json.loads(answer)
    if "error" in result:
        raise QuiverError(str(result["error"]))
    return result


def ask(folder: PeerFolder, action: Order, timeout: float = 5.0) -> dict[str, Any]:
    return asyncio.run(order(folder, action, timeout))
