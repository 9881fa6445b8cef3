"""Commands for the owner of a peer: doctor, status, watch and amend."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from quiverfl.cli.server import make_server
from quiverfl.engine.exchange.fixed_point import UNIT, to_units
from quiverfl.errors import QuiverError
from quiverfl.peer.changes import amend_offline
from quiverfl.peer.control import NotRunning, send_order
from quiverfl.peer.doctor import Finding, examine_peer
from quiverfl.peer.folder import PEER, PeerFolder
from quiverfl.peer.link.wire import Order, Terms
from quiverfl.peer.metrics import MetricsClient, PeerReading, find_main_score, list_waiting
from quiverfl.peer.setup import count_founders, load_peer_config
from quiverfl.support.output_folders import refuse_other_file

COLOURS = {"good": "green", "doubtful": "yellow", "bad": "red"}


def print_findings(folder: Path, timeout: float, as_json: bool) -> bool:
    """Print the doctor's findings. Returns whether all are good."""
    findings = asyncio.run(examine_peer(folder, timeout))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        _print_table(findings)
    return all(finding.level != "bad" for finding in findings)


def _print_table(findings: list[Finding]) -> None:
    """Print a line for each finding, and its remedy below."""
    console, width = (
        Console(emoji=False, highlight=False),
        max(len(finding.about) for finding in findings),
    )
    for finding in findings:
        line = Text(f"{finding.level:9}", style=COLOURS[finding.level])
        line.append(f" {finding.about:{width}}  {finding.text}", style="default")
        console.print(line, soft_wrap=True)
        if finding.remedy:
            console.print(Text(" " * (width + 12) + finding.remedy), soft_wrap=True)


FLAT = ("metrics", "counts")
"""Parts of a status whose entries get lines of their own."""


def format_status(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Write every part of a status as a name and a value for people."""
    for name, value in status.items():
        if name in FLAT:
            yield from format_status(value)
        elif name.endswith("_seconds"):
            yield _format_name(name, "_seconds"), f"{value:.1f} s"
        elif name.endswith("_bytes"):
            yield _format_name(name, "_bytes"), f"{value / 1e6:,.1f} MB"
        else:
            yield _format_name(name), _format_value(value)


def _format_name(name: str, unit: str = "") -> str:
    return name.removesuffix(unit).replace("_", " ")


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_format_value(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "none"
    if isinstance(value, float):
        return f"{value:,.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


PAGE = Path(__file__).with_name("peer_watch.html")


def show_peers(
    peers: list[PeerReading], title: str = "peers", kills: Mapping[str, int] | None = None
) -> Group:
    """Show a line for each peer, and below them the links that wait. A demo counts kills, too."""
    table = Table(title=title, box=SIMPLE_HEAD)
    columns = ["peer", "state", "round", "mass", "score", "sent", "retries", "refusals"]
    for name in [*columns, *(["kills"] if kills is not None else [])]:
        left = name in ("peer", "state")
        table.add_column(name, justify="left" if left else "right")
    for peer in peers:
        extra = [str(kills[peer.name])] if kills is not None else []
        table.add_row(*_make_row(peer), *extra)
    links = [
        Text(f"{name} → {link.neighbour} waits for {link.waiting_seconds:,.0f} s", style="yellow")
        for name, link in list_waiting(peers)
    ]
    unseen = [Text(f"{p.name} {p.problem}", style="red") for p in peers if p.problem]
    total = sum(peer.values.get("mass", 0.0) for peer in peers)
    return Group(table, Text(f"mass that can be seen: {total:.6f}"), *links, *unseen)


def _make_row(peer: PeerReading) -> Iterator[str | Text]:
    yield peer.name
    yield Text("not seen", style="red") if peer.problem else peer.state
    if peer.problem or not peer.values:
        yield from ("", "", "", "", "", "")
        return
    score = find_main_score(peer)
    yield f"{peer.values['round']:.0f} of {peer.values['rounds_planned']:.0f}"
    yield f"{peer.values['mass']:.4f}"
    yield "" if score is None else f"{score:.4f}"
    yield f"{peer.values['sent_bytes'] / 1e6:,.1f} MB"
    yield f"{peer.values['retries']:.0f}"
    yield f"{sum(peer.refusals.values()):.0f}"


def watch_in_terminal(client: MetricsClient, every: float, once: bool) -> None:
    console = Console(emoji=False)
    if once:
        console.print(show_peers(client.read()))
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(show_peers(client.read()), refresh=True)
            time.sleep(every)


def render_page(picture: dict[str, Any] | None, nonce: str) -> str:
    """Render the page. With a picture in it, it shows that moment and requests nothing."""
    text = json.dumps(picture).replace("<", "\\u003c")
    return PAGE.read_text().replace("%NONCE%", nonce).replace("%PICTURE%", text)


def save_page(client: MetricsClient, path: Path) -> None:
    refuse_other_file(path, "--save", PAGE.read_bytes()[:15])
    client.read()
    path.write_text(render_page(client.picture(), secrets.token_hex(16)))


def make_page_server(client: MetricsClient, port: int) -> ThreadingHTTPServer:
    """Serve the page and its picture on loopback; nothing can be changed through it."""

    def answer_page() -> tuple[str, str, dict[str, str]]:
        nonce = secrets.token_hex(16)
        policy = "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'"
        headers = {"Content-Security-Policy": f"{policy}; script-src 'nonce-{nonce}'"}
        return "text/html; charset=utf-8", render_page(None, nonce), headers

    def answer_picture() -> tuple[str, str, dict[str, str]]:
        return "application/json", json.dumps(client.picture()), {}

    return make_server({"/": answer_page, "/picture.json": answer_picture}, port)


def watch_in_browser(client: MetricsClient, every: float, port: int) -> None:
    server = make_page_server(client, port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_address[1]}/ (Ctrl-C ends it)", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            client.read()
            time.sleep(every)
    server.shutdown()


def propose_change(
    folder: PeerFolder,
    since: int,
    rounds: int | None,
    lr: float | None,
    joins: Sequence[str] = (),
    mass: float = 1.0,
) -> Iterator[str]:
    if mass != 1 and not joins:
        raise QuiverError(f"--mass {mass:g}: it is what a newcomer brings; name it with --join.")
    try:
        grant = to_units(mass) if joins else UNIT
        terms = Terms(since=since, rounds=rounds, lr=lr, joins=tuple(joins), grant=grant)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        raise QuiverError(f"--{first['loc'][0]} {first['input']!r}: {first['msg']}.") from problem
    try:
        status = send_order(folder.path, Order(action="amend", terms=terms))
        yield from status["amendments"]
    except NotRunning:
        config = load_peer_config(folder)
        last, founders = config.run.rounds, count_founders(config)
        amend_offline(folder.store, folder.roster, folder.identity(), terms, last, founders)
        yield f"{terms} (signed for {folder.own.name}, which is not running)"
    yield "It holds once every member has signed the same: each runs this command on its own peer."


def find_metrics_address(text: str) -> str:
    """Find the address of a peer's metrics from its folder, HOST:PORT or an address."""
    if text.startswith(("http://", "https://")):
        return text
    path = Path(text)
    if (path / PEER).exists():
        metrics = PeerFolder.read(path).own.metrics
        if not metrics:
            raise QuiverError(
                f'{path / PEER} has metrics = "", so nothing can be seen of this peer: write '
                'metrics = "127.0.0.1:9464" there and start it again.'
            )
        return f"http://{metrics}/metrics"
    if text.rpartition(":")[2].isdigit():
        return f"http://{text}/metrics"
    raise QuiverError(
        f"{text!r} is neither a peer's folder nor HOST:PORT of its metrics, such as 127.0.0.1:9464."
    )
