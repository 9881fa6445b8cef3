"""What a person may name: peers, runs, addresses; and files that somebody else has written."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from quiverfl.errors import QuiverError
from quiverfl.peer.link.identity import Identity
from quiverfl.peer.link.roster import ROSTER, LiveRoster, Roster

from .swarm import make_folders
from .test_commands import RUN, prepare, quiver

ADDRESS = "127.0.0.1:7400"


@pytest.mark.parametrize(
    ("run", "peers", "words"),
    [
        ("trial", [f"ca.key={ADDRESS}"], "the authority has a file of it"),
        ("trial", [f"ca.pem={ADDRESS}"], "the authority has a file of it"),
        ("trial", [f"roster.toml={ADDRESS}"], "the authority has a file of it"),
        ("trial", [f"abc\n={ADDRESS}"], "cannot be a peer's name"),
        ("trial", [f"../x={ADDRESS}"], "cannot be a peer's name"),
        ("trial", [f"a..b={ADDRESS}"], "cannot be a peer's name"),
        ("trial", [f"a-.b={ADDRESS}"], "cannot be a peer's name"),
        ("trial", [f"10.0.0.1={ADDRESS}"], "certificates tell addresses from names"),
        ("../../x", [f"north={ADDRESS}"], "cannot be a run's name"),
        ("trial\n", [f"north={ADDRESS}"], "cannot be a run's name"),
        ("trial", [f"north={ADDRESS}", "north=127.0.0.1:7401"], "the name 'north' is given twice"),
        ("trial", [f"north={ADDRESS}", f"south={ADDRESS}"], "is given twice"),
        ("trial", ["north=127.0.0.1:99999"], "a port from 1 to 65535"),
        ("trial", ["north=127.0.0.1:0"], "a port from 1 to 65535"),
        ("trial", ["north=:7400"], "write HOST:PORT"),
        ("trial", ["north=fd00::5:7400"], "write HOST:PORT"),
    ],
)
def test_certs_init_refuses_what_could_not_run(
    run: str, peers: list[str], words: str, tmp_path: Path
) -> None:
    named = [word for peer in peers for word in ("--peer", peer)]
    with pytest.raises(QuiverError, match=words):
        quiver("certs", "init", tmp_path / "ca", "--run", run, *named)
    assert list(tmp_path.iterdir()) == []


def test_certs_issue_refuses_the_same(tmp_path: Path) -> None:
    peers = ("--peer", f"north={ADDRESS}", "--peer", "south=[::1]:7400", "--peer", "west=dials-out")
    quiver("certs", "init", tmp_path / "ca", "--run", "trial", *peers)
    before = (tmp_path / "ca" / ROSTER).read_text()
    for name, address in (("ca.key", ADDRESS), ("east", "10.0.0.1:70000"), ("east", "east")):
        with pytest.raises(QuiverError):
            quiver("certs", "issue", tmp_path / "ca", name, "--address", address)
    assert (tmp_path / "ca" / ROSTER).read_text() == before


@pytest.mark.parametrize(
    ("line", "instead", "words"),
    [
        ('name = "dfedpgp"', 'name = "fedavg"', "fedavg"),
        ("clients = 2", "clients = 3", "the roster has 2 peers"),
        ("hidden = [16]", "hiden = [16]", "hiden"),
        ("linger = 20.0", "lingr = 20.0", "did you mean 'linger'"),
    ],
)
def test_init_is_not_ready_for_what_run_refuses(
    line: str, instead: str, words: str, tmp_path: Path
) -> None:
    prepare(tmp_path)
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(RUN.format(rounds=3).replace(line, instead))
    keys, roster = tmp_path / "ca" / "ward-0", tmp_path / "ca" / ROSTER
    common = ("--config", wrong, "--keys", keys, "--roster", roster)
    with pytest.raises(QuiverError, match=words):
        quiver("init", tmp_path / "new", *common)
    assert not (tmp_path / "new").exists()


BOMBS = {
    "nested": "a = " + "[" * 100_000,
    "dotted": "a." * 100_000 + "a = 1",
    "long": "a = '" + "x" * (5 << 20) + "'",
    "bytes": "\udc80",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_roster_that_is_a_bomb_is_refused_quickly(bomb: str, tmp_path: Path) -> None:
    (tmp_path / ROSTER).write_bytes(bomb.encode(errors="surrogateescape"))
    began = time.process_time()
    with pytest.raises(QuiverError, match=ROSTER):
        Roster.read(tmp_path / ROSTER)
    assert time.process_time() - began < 5.0  # tomllib alone takes 40 s for the dotted key


def test_a_member_that_is_missing_in_the_roster_is_revoked(tmp_path: Path) -> None:
    """Its number is its client: the others keep theirs, and a newcomer comes last."""
    folder = make_folders(tmp_path, 4)[0]
    live = LiveRoster(folder / ROSTER)
    before = live.current
    _, first, second, third = before.members
    Roster(before.run, (third, before.members[0], second)).write(folder / ROSTER)
    after = live.refresh()
    assert after.names == before.names
    assert (after.member(first.name).keys, after.member(first.name).former) == ((), first.keys)
    assert [after.member(m.name) for m in (second, third)] == [second, third]
    before.write(folder / ROSTER)
    assert live.refresh() == before


def test_an_address_is_refused_under_its_own_option(tmp_path: Path) -> None:
    quiver("certs", "init", tmp_path / "ca", "--run", "trial", "--peer", f"north={ADDRESS}")
    with pytest.raises(QuiverError, match=r"--address 'east': write HOST:PORT"):
        quiver("certs", "issue", tmp_path / "ca", "east", "--address", "east")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the roster .* does not say run: write it in"),
        (b'run = "trial"\npeers = 5\n', "unknown key peers: leave it out"),
        (b'run = "trial"\npeer = 5\n', "peer = 5: input should be"),
        (b"\xff\xfe", "is not UTF-8: save it as UTF-8"),
    ],
)
def test_a_damaged_roster_is_one_sentence(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / ROSTER
    path.write_bytes(content)
    with pytest.raises(QuiverError, match=words) as caught:
        Roster.read(path)
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_a_roster_as_windows_writes_it(tmp_path: Path) -> None:
    folder = make_folders(tmp_path, 2)[0]
    path = folder / ROSTER
    before = Roster.read(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert Roster.read(path) == before


def test_a_damaged_certificate_or_key_is_named(tmp_path: Path) -> None:
    folder = make_folders(tmp_path, 2)[0]
    whole = Identity.read(folder)
    for name in ("cert.pem", "ca.pem"):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(b"")
        with pytest.raises(QuiverError, match=f"{name}: not a certificate in PEM form"):
            Identity.read(folder)
        (folder / name).write_bytes(before)
    (folder / "key.pem").write_bytes(b"x")
    with pytest.raises(QuiverError, match=r"key\.pem is not a private key in PEM form"):
        Identity.read(folder).sign(b"text")
    assert whole.sign(b"text")


def test_a_certificate_is_not_valid_for_ages(tmp_path: Path) -> None:
    member = tmp_path / "north"
    quiver("certs", "init", tmp_path / "ca", "--run", "trial")
    quiver("certs", "request", member, "--run", "trial", "--address", ADDRESS)
    request = member / "request.pem"
    said = quiver("certs", "approve", tmp_path / "ca", request, "--days", "1e9", code=2)
    assert "--days" in said
