"""Pages served on loopback, that can be looked at and changed by nobody."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

from quiverfl.errors import QuiverError

Answer: TypeAlias = Callable[[], tuple[str, str, Mapping[str, str]]]
"""Makes the kind of a page, its text, and further headers."""


class Server(ThreadingHTTPServer):
    """A browser that closes its page in the middle of an answer is nothing to report."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def make_server(answers: Mapping[str, Answer], port: int) -> Server:
    """Serve some paths on 127.0.0.1, to GET alone and under this machine's own names alone."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            port = self.connection.getsockname()[1]
            if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
                self.send_error(403)  # a page from elsewhere that has this name point to us
            elif self.path not in answers:
                self.send_error(404)
            else:
                try:
                    self._send(*answers[self.path]())
                except QuiverError as error:
                    self.send_error(500, explain=str(error))

        def _send(self, kind: str, text: str, headers: Mapping[str, str]) -> None:
            body = text.encode()
            self.send_response(200)
            common = {"Content-Type": kind, "Content-Length": str(len(body))}
            common |= {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
            for name, value in (common | dict(headers)).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *values: Any) -> None:
            """Keep requests out of the terminal."""

    try:
        return Server(("127.0.0.1", port), Handler)
    except OSError as problem:
        raise QuiverError(
            f"--port {port}: {problem.strerror}. Give another one, or 0 for any."
        ) from problem
    except OverflowError:
        raise QuiverError(f"--port {port}: ports go from 0 to 65535.") from None
