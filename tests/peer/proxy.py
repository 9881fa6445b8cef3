"""A bad network between two peers: slow, cut in mid-chunk, or swallowing everything."""

from __future__ import annotations

import asyncio
import contextlib


class Proxy:
    """Forwards TCP to a peer. `rate` in bytes a second, `cut_after` bytes, `blackhole` for good."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.rate: float | None = None
        self.cut_after: int | None = None
        self.blackhole = False
        self.passed = 0
        self.cuts = 0
        self.connections = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{port}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            there, back = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        self._writers.add(back)
        budget = [self.cut_after]
        await asyncio.gather(
            self._pump(reader, back, budget, writer), self._pump(there, writer, [None], back)
        )

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        budget: list[int | None],
        other: asyncio.StreamWriter,
    ) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            while data := await reader.read(16384):
                if self.blackhole:
                    continue
                if self.rate is not None:
                    await asyncio.sleep(len(data) / self.rate)
                if budget[0] is not None:
                    data, budget[0] = data[: budget[0]], budget[0] - len(data)
                self.passed += len(data)
                writer.write(data)
                await writer.drain()
                if budget[0] is not None and budget[0] <= 0:
                    self.cuts += 1
                    break
        with contextlib.suppress(OSError, RuntimeError):
            writer.close()
            if budget[0] is not None:
                other.close()
