"""The doctor finds what was broken, and names a remedy for it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quiverfl.peer import doctor
from quiverfl.peer.demo import make_swarm
from quiverfl.peer.doctor import Finding, examine_peer
from quiverfl.peer.folder import PeerFolder
from quiverfl.peer.link import identity
from quiverfl.peer.link.identity import Identity
from quiverfl.peer.link.roster import DIALS_OUT, ROSTER, Member, Roster
from quiverfl.peer.link.wire import Vitals

from .swarm import make_folders
from .test_refusals import running


def of(found: list[Finding], about: str) -> Finding:
    return next(finding for finding in found if finding.about == about)


@pytest.fixture
def swarm(tmp_path: Path) -> dict[str, PeerFolder]:
    return make_swarm(tmp_path / "swarm", 2, rounds=1, mode="sync")


def first(swarm: dict[str, PeerFolder]) -> PeerFolder:
    return next(iter(swarm.values()))


def change_roster(swarm: dict[str, PeerFolder], change: Callable[[Roster], Roster]) -> None:
    path = first(swarm).path / ROSTER
    change(Roster.read(path)).write(path)


def moved(name: str, address: str) -> Callable[[Roster], Roster]:
    return lambda roster: replace(
        roster,
        members=tuple(replace(m, address=address) if m.name == name else m for m in roster.members),
    )


def test_a_folder_that_is_fine_and_a_neighbour_that_is_down(swarm: dict[str, PeerFolder]) -> None:
    found = asyncio.run(examine_peer(first(swarm).path, 2.0))
    for about in ("version", "certificate", "authority", "disk", "open files", "own port"):
        assert of(found, about).level == "good", of(found, about)
    other = list(swarm)[1]
    down = of(found, f"peer {other}")
    assert (down.level, "nothing listens" in down.text) == ("bad", True)
    assert "quiver peer run" in down.remedy
    assert all(finding.remedy for finding in found if finding.level != "good")


def test_who_cannot_be_reached_and_why(swarm: dict[str, PeerFolder]) -> None:
    here, other = first(swarm), list(swarm)[1]

    def seen(address: str) -> Finding:
        change_roster(swarm, moved(other, address))
        return of(asyncio.run(examine_peer(here.path, 1.0)), f"peer {other}")

    assert "not a known host" in seen("no-such-host.invalid:7400").text
    assert "only dials out" in seen(DIALS_OUT).text
    with socket.socket() as deaf:  # listens, and says nothing
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        found = seen(f"127.0.0.1:{deaf.getsockname()[1]}")
        assert (found.level, "no secure connection" in found.text) == ("bad", True)
        assert "quiver peer doctor" in found.remedy


def test_a_running_peer_tells_a_member_its_clock_and_version(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 3)
    roster = Roster.read(folders[0] / ROSTER)
    identity.issue_certificate(tmp_path / "authority", "peer-1", tmp_path / "other-key")

    async def scenario() -> None:
        there, me = roster.member("peer-0"), roster.member("peer-1")
        async with running(folders[0]):
            good, clock = await doctor._check_neighbour(there, me, Identity.read(folders[1]), 5.0)
            assert (good.level, clock.level) == ("good", "good"), (good, clock)
            assert "protocol 3 together" in good.text
            stranger = Identity.read(tmp_path / "other-key")
            refused = (await doctor._check_neighbour(there, me, stranger, 5.0))[0]
            assert (refused.level, "refuses this peer" in refused.text) == ("bad", True)
            assert "roster.toml" in refused.remedy

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("off", "level"), [(0.5, "good"), (-30.0, "good"), (300.0, "doubtful"), (-86400.0, "bad")]
)
def test_a_clock_that_is_off(off: float, level: str) -> None:
    found = doctor._check_clock("peer west", Vitals(time=1000.0 + off, version="1"), 999.9, 1000.1)
    assert found.level == level
    assert ("chrony" in found.remedy) == (level != "good")
    assert ("ahead" in found.text) == (off > 0)


def test_versions_that_cannot_talk() -> None:
    member = Member("west", "127.0.0.1:1", ())
    newer = Vitals(time=0.0, version="9", protocol=9, oldest=8)
    found = doctor._check_version("peer west", member, newer, 0.1)
    assert (found.level, "protocol 8 to 9" in found.text) == ("bad", True)
    assert "Install" in found.remedy


def test_a_certificate_that_runs_out(swarm: dict[str, PeerFolder]) -> None:
    here = first(swarm)
    authority = here.path.parent / "authority"
    for days, level in [(10, "doubtful"), (-0.5, "bad")]:
        key = identity.issue_certificate(authority, here.own.name, here.path, days)
        change_roster(swarm, lambda roster, key=key: roster.with_key(here.own.name, key))
        found = next(doctor._check_certificate(PeerFolder.read(here.path)))
        assert (found.level, "certs rotate" in found.remedy) == (level, True), found
