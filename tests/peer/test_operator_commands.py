"""`quiver peer amend`, `doctor`, `watch` and `certs revoke` as a person types them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from quiverfl.errors import QuiverError
from quiverfl.peer.folder import PeerFolder
from quiverfl.peer.link.roster import DIALS_OUT, Roster
from quiverfl.peer.setup import assemble

from .test_commands import prepare, quiver


async def finished(folders: list[Path]) -> list[int]:
    nodes = [await assemble(PeerFolder.read(folder)) for folder in folders]
    await asyncio.wait_for(asyncio.gather(*(node.run() for node in nodes)), 120)
    for node in nodes:
        node.store.close()
    return [node.transactions.accounts.round for node in nodes]


def test_a_run_that_is_over_is_taken_up_again(tmp_path: Path) -> None:
    folders = prepare(tmp_path, rounds=1)
    assert asyncio.run(finished(folders)) == [1, 1]
    with pytest.raises(QuiverError, match="round 0 has begun here"):
        quiver("amend", folders[0], "--since", 0, "--rounds", 3)
    with pytest.raises(QuiverError, match="ends after 1 rounds"):
        quiver("amend", folders[0], "--since", 2, "--rounds", 3)
    with pytest.raises(QuiverError, match="nothing is to change"):
        quiver("amend", folders[0], "--since", 1)
    with pytest.raises(QuiverError, match=r"--mass 0\.5: .* name it with --join"):
        quiver("amend", folders[0], "--since", 1, "--rounds", 2, "--mass", 0.5)
    with pytest.raises(QuiverError, match="--lr"):
        quiver("amend", folders[0], "--since", 1, "--lr", -1)
    for folder in folders:
        said = quiver("amend", folder, "--since", 1, "--rounds", 2, "--lr", 0.01)
        assert "from round 1: rounds = 2, lr = 0.01 (signed for ward-" in said
    assert asyncio.run(finished(folders)) == [2, 2]
    assert "passed" in quiver("audit", *folders)


def test_the_doctor_is_asked(tmp_path: Path) -> None:
    folders = prepare(tmp_path)
    findings = json.loads(quiver("doctor", folders[0], "--json", "--timeout", 2, code=2))
    levels = {finding["about"]: finding["level"] for finding in findings}
    assert levels["certificate"] == "good"
    assert levels["peer ward-1"] == "bad"
    assert "quiver peer run" in quiver("doctor", folders[0], "--timeout", 2, code=2)
    assert "not a peer's folder" in quiver("doctor", tmp_path, code=2)


def test_a_peer_without_metrics_cannot_be_watched(tmp_path: Path) -> None:
    folders = prepare(tmp_path)
    with pytest.raises(QuiverError, match=r'metrics = "127\.0\.0\.1:9464"'):
        quiver("watch", folders[0], "--once")
    assert "cannot be seen" in quiver("watch", "127.0.0.1:9", "--once")


def test_a_member_is_revoked_or_only_dials_out(tmp_path: Path) -> None:
    prepare(tmp_path)
    authority = tmp_path / "ca"
    key = Roster.read(authority / "roster.toml").member("ward-1").keys
    quiver("certs", "revoke", authority, "ward-1")
    revoked = Roster.read(authority / "roster.toml").member("ward-1")
    assert (revoked.keys, revoked.former) == ((), key)
    with pytest.raises(QuiverError, match="was revoked"):
        Roster.read(authority / "roster.toml").identify(
            (authority / "ward-1" / "cert.pem").read_bytes()
        )
    quiver("certs", "issue", authority, "ward-2", "--address", "dials-out")
    assert Roster.read(authority / "roster.toml").member("ward-2").address == DIALS_OUT
    folder, run = tmp_path / "hidden", tmp_path / "run.toml"
    run.write_text(run.read_text().replace("clients = 2", "clients = 3"))
    quiver(
        *("init", folder, "--config", run, "--keys", authority / "ward-2"),
        *("--roster", authority / "roster.toml"),
    )
    assert PeerFolder.read(folder).own.bind == "127.0.0.1:7400"
