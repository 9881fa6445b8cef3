"""The alerts and the dashboard name metrics that a peer really exports."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

from quiverfl.peer.metrics import serve_metrics

from .swarm import Options, build, free_ports, make_folders

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "quiver-alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "quiver-peers.json"
PROMTOOL = shutil.which("promtool")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a peer's endpoint says after two rounds with another."""
    folders = make_folders(tmp_path_factory.mktemp("run"), 2)
    port = free_ports(1)[0]

    async def scenario() -> str:
        options = Options(size=20, rounds=2, mode="sync", seconds=0.0, neighbours=1, linger=5.0)
        nodes = [build(folder, options) for folder in folders]
        await asyncio.wait_for(asyncio.gather(*(node.run() for node in nodes)), 60)
        nodes[0].metrics.count_refusal("gap")
        server = serve_metrics(f"127.0.0.1:{port}", nodes[0].metrics, nodes[0].samples)
        address = f"http://127.0.0.1:{port}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(address, timeout=5).read())
        server.shutdown()
        for node in nodes:
            node.store.close()
        return str(text.decode())

    return asyncio.run(scenario())


def named(text: str) -> set[str]:
    return set(re.findall(r"\bquiver_[a-z_]+", text))


@pytest.mark.parametrize("file", [ALERTS, DASHBOARD], ids=lambda path: path.name)
def test_every_metric_that_is_named_is_exported(file: Path, exported: str) -> None:
    there = {line.split("{")[0].split(" ")[0] for line in exported.splitlines() if line[:1] != "#"}
    wanted = named(file.read_text())
    assert len(wanted) > 8
    assert wanted <= there, wanted - there


@pytest.mark.parametrize("file", [ALERTS, DASHBOARD], ids=lambda path: path.name)
def test_every_label_that_is_named_is_exported(file: Path, exported: str) -> None:
    text = file.read_text()
    wanted = set(re.findall(r"\$labels\.(\w+)", text) + re.findall(r"\{\{(\w+)\}\}", text))
    for labels in re.findall(r"\b(?:by|on) ?\(([\w, ]+)\)", text):
        wanted |= set(re.findall(r"\w+", labels))
    by_prometheus = {"instance", "job"}
    assert {"instance", "neighbour", "reason"} <= wanted
    assert wanted - by_prometheus <= set(re.findall(r'[{,](\w+)="', exported))


def test_the_values_are_the_peers_own(exported: str) -> None:
    assert 'quiver_peer_info{name="peer-0",run="test"} 1.0' in exported
    assert "quiver_round 2.0" in exported
    assert 'quiver_link_waiting_seconds{neighbour="peer-1"} 0.0' in exported
    given, taken = (
        float(re.findall(rf'quiver_link_{word}{{neighbour="peer-1"}} (\S+)', exported)[0])
        for word in ("given", "taken")
    )
    assert given == taken == 1.0  # a half in each of two rounds, both ways
    left = float(re.findall(r"(?m)^quiver_certificate_seconds (\S+)", exported)[0])
    assert 364 * 86400 < left < 366 * 86400
    assert float(re.findall(r"(?m)^quiver_store_bytes (\S+)", exported)[0]) > 10_000


def test_the_dashboard_is_whole() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    for panel in panels:
        assert panel["targets"], panel["title"]
        assert all(named(target["expr"]) for target in panel["targets"])


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_prometheus_accepts_rules_and_metrics(exported: str) -> None:
    for arguments in (["check", "rules", ALERTS.name], ["test", "rules", "quiver-alerts-test.yml"]):
        done = subprocess.run(
            [str(PROMTOOL), *arguments], cwd=ALERTS.parent, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    metrics = subprocess.run(
        [str(PROMTOOL), "check", "metrics"], input=exported, capture_output=True, text=True
    )
    assert metrics.returncode == 0, metrics.stdout + metrics.stderr
