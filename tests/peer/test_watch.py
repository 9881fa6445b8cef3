"""Watching peers: their own numbers, in the terminal and on a page that can change nothing."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from quiverfl.cli.peer_owner import find_metrics_address, make_page_server, save_page, show_peers
from quiverfl.errors import QuiverError
from quiverfl.peer.metrics import (
    MetricsClient,
    PeerMetrics,
    Sample,
    list_waiting,
    read_metrics,
    serve_metrics,
)

from .swarm import free_ports

NASTY = "<script>alert(1)</script>"


@contextmanager
def endpoint(name: str, mass: float, waits: float = 0.0) -> Iterator[str]:
    metrics = PeerMetrics()
    metrics.add("sent_bytes", 2_000_000)
    metrics.count_refusal(NASTY)
    samples = [
        Sample("peer_info", 1.0, (name, "trial")),
        Sample("state", 1.0, ("training",)),
        Sample("round", 7.0),
        Sample("rounds_planned", 20.0),
        Sample("mass", mass),
        Sample("score", 0.75, ("accuracy",)),
        Sample("link_given", 1.5, ("west",)),
        Sample("link_taken", 1.25, ("west",)),
        Sample("link_waiting_seconds", waits, ("west",)),
    ]
    address = f"127.0.0.1:{free_ports(1)[0]}"
    server = serve_metrics(address, metrics, lambda: samples)
    try:
        yield address
    finally:
        server.shutdown()
        server.server_close()


def test_a_peer_is_seen_as_its_metrics_say(tmp_path: Path) -> None:
    with endpoint("north", 0.5, waits=42.0) as north, endpoint("south", 1.5) as south:
        watch = MetricsClient([find_metrics_address(north), find_metrics_address(south)])
        peers = watch.read()
        assert [p.name for p in peers] == ["north", "south"]
        assert peers[0].values["mass"] == 0.5
        assert peers[0].scores == {"accuracy": 0.75}
        assert peers[0].refusals == {NASTY: 1.0}
        link = peers[0].links[0]
        assert (link.neighbour, link.given, link.taken) == ("west", 1.5, 1.25)
        assert [(name, one.waiting_seconds) for name, one in list_waiting(peers)] == [
            ("north", 42.0)
        ]
        text = _printed(show_peers(peers))
        assert "7 of 20" in text
        assert "mass that can be seen: 2.000000" in text
        assert "north → west waits for 42 s" in text
    gone = watch.read()  # both have ended: they keep their names, and what was seen is kept
    assert [p.name for p in gone] == ["north", "south"]
    assert all("cannot be seen" in p.problem for p in gone)
    assert "cannot be seen" in _printed(show_peers(gone))
    assert len(watch.picture()["past"]["north"]) == 1


def _printed(what: object) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(what)
    return console.export_text()


def test_the_page_is_read_only_local_and_takes_nothing_for_markup(tmp_path: Path) -> None:
    with endpoint("north", 0.5) as north:
        watch = MetricsClient([find_metrics_address(north)])
        watch.read()
        server = make_page_server(watch, 0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"127.0.0.1:{server.server_address[1]}"
        try:
            with urllib.request.urlopen(f"http://{here}/", timeout=5) as answer:
                policy, page = answer.headers["Content-Security-Policy"], answer.read().decode()
            nonce = policy.partition("'nonce-")[2].partition("'")[0]
            assert f'<script nonce="{nonce}">' in page
            assert "default-src 'none'" in policy
            assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
            with urllib.request.urlopen(f"http://{here}/picture.json", timeout=5) as answer:
                picture = json.load(answer)
            assert picture["peers"][0]["name"] == "north"
            for request, code in [
                (urllib.request.Request(f"http://{here}/", headers={"Host": "evil.test"}), 403),
                (urllib.request.Request(f"http://{here}/etc/passwd"), 404),
                (urllib.request.Request(f"http://{here}/", data=b"x", method="POST"), 501),
            ]:
                with pytest.raises(urllib.error.HTTPError) as refused:
                    urllib.request.urlopen(request, timeout=5)
                assert refused.value.code == code
        finally:
            server.shutdown()
            server.server_close()
        save_page(watch, tmp_path / "still.html")
    still = (tmp_path / "still.html").read_text()
    assert NASTY not in still
    assert "\\u003cscript>alert(1)" in still


def test_what_is_no_peer_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(QuiverError, match=r"neither a peer's folder nor HOST:PORT"):
        find_metrics_address(str(tmp_path))
    assert "cannot be seen" in read_metrics(f"http://127.0.0.1:{free_ports(1)[0]}/metrics").problem
