"""`quiver peer watch`: a table in the terminal, or one local page. Read-only, both."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from quiverfl.errors import QuiverError
from quiverfl.peer.watching import SeenPeer, Watch, main_score, waiting

PAGE = Path(__file__).with_name("peer_watch.html")


def table_of(peers: list[SeenPeer]) -> Group:
    """The peers line by line, and below them the links that wait."""
    table = Table(title="peers")
    for name in ("peer", "state", "round", "mass", "score", "sent", "retries", "refusals"):
        left = name in ("peer", "state")
        table.add_column(name, justify="left" if left else "right")
    for peer in peers:
        table.add_row(*_row(peer))
    links = [
        Text(f"{name} → {link.neighbour} waits for {link.waiting_seconds:,.0f} s", style="yellow")
        for name, link in waiting(peers)
    ]
    unseen = [Text(f"{p.name} {p.problem}", style="red") for p in peers if p.problem]
    total = sum(peer.values.get("mass", 0.0) for peer in peers)
    return Group(table, Text(f"mass that can be seen: {total:.6f}"), *links, *unseen)


def _row(peer: SeenPeer) -> Iterator[str | Text]:
    if peer.problem:
        yield from (peer.name, Text("not seen", style="red"))
        return
    score = main_score(peer)
    yield from (peer.name, peer.state)
    yield f"{peer.values['round']:.0f} of {peer.values['rounds_planned']:.0f}"
    yield f"{peer.values['mass']:.4f}"
    yield "" if score is None else f"{score:.4f}"
    yield f"{peer.values['sent_bytes'] / 1e6:,.1f} MB"
    yield f"{peer.values['retries']:.0f}"
    yield f"{sum(peer.refusals.values()):.0f}"


def watch_in_terminal(watch: Watch, every: float, once: bool) -> None:
    console = Console()
    if once:
        console.print(table_of(watch.look()))
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(table_of(watch.look()), refresh=True)
            time.sleep(every)


def page(picture: dict[str, Any] | None, nonce: str) -> str:
    """The page; with a picture in it, it shows that moment and asks for nothing."""
    text = json.dumps(picture).replace("<", "\\u003c")
    return PAGE.read_text().replace("%NONCE%", nonce).replace("%PICTURE%", text)


def save_page(watch: Watch, path: Path) -> None:
    watch.look()
    path.write_text(page(watch.picture(), secrets.token_hex(16)))


def page_server(watch: Watch, port: int) -> ThreadingHTTPServer:
    """Serves the page and its picture on loopback; nothing can be changed through it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            here = self.connection.getsockname()[1]
            if self.headers.get("Host") not in (f"127.0.0.1:{here}", f"localhost:{here}"):
                self.send_error(403)  # a page from elsewhere that has this name point to us
            elif self.path == "/":
                nonce = secrets.token_hex(16)
                self._answer(page(None, nonce), "text/html; charset=utf-8", nonce)
            elif self.path == "/picture.json":
                self._answer(json.dumps(watch.picture()), "application/json")
            else:
                self.send_error(404)

        def _answer(self, text: str, kind: str, nonce: str = "") -> None:
            body = text.encode()
            policy = "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'"
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Content-Security-Policy", f"{policy}; script-src 'nonce-{nonce}'")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *values: Any) -> None:
            """The terminal is for people."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as problem:
        raise QuiverError(
            f"--port {port}: {problem.strerror}. Give another one, or 0 for any."
        ) from problem


def watch_in_browser(watch: Watch, every: float, port: int) -> None:
    server = page_server(watch, port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_address[1]}/ (Ctrl-C ends it)", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            watch.look()
            time.sleep(every)
    server.shutdown()
