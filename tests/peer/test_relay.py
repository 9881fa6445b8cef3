"""Two members that only dial out trade by way of a third, which cannot read what it carries."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.link import relay
from quiverfl.peer.link.identity import Identity
from quiverfl.peer.link.limits import RATES
from quiverfl.peer.link.link import open_channel
from quiverfl.peer.link.relay import LINES, Relay
from quiverfl.peer.link.requests import APPROVED, REQUEST, approve_requests, make_renewal
from quiverfl.peer.link.roster import DIALS_OUT, ROSTER, Member, Roster
from quiverfl.peer.link.wire import SERVICE, Accept, Dial, encode
from quiverfl.peer.node import Node

from .swarm import Options, Swarm, build, free_ports, make_folders
from .test_commands import RUN, quiver, start
from .test_life import finish, until
from .test_operations import SYNC, ended, exact, models
from .test_requests import status, wait

QUICK = {"hello_seconds": 2.0, "retry_first": 0.05, "retry_cap": 0.5, "keepalive_seconds": 2.0}
ENDLESS = Options(size=2000, rounds=1_000_000, linger=10.0, limits=QUICK)


def arrange(folders: list[Path], behind: tuple[str, ...], relays: tuple[str, ...] = ()) -> None:
    """Write into every roster who cannot be called, and who relays."""
    roster = Roster.read(folders[0] / ROSTER)
    members = tuple(
        replace(m, address=DIALS_OUT) if m.name in behind else replace(m, relays=m.name in relays)
        for m in roster.members
    )
    for folder in folders:
        replace(roster, members=members).write(folder / ROSTER)


def traded(node: Node, peer: str) -> int:
    """How many shares this neighbour has acknowledged."""
    link = node.transactions.accounts.link(peer)
    return link.sent - (1 if link.outbox else 0)


def play(
    folders: list[Path],
    scene: Callable[[list[Node], list[asyncio.Task[Any]]], Coroutine[Any, Any, None]],
    make: dict[int, type[Relay]] | None = None,
) -> None:
    """Let nodes run while a scene plays; afterwards the books must balance."""

    async def scenario() -> None:
        nodes = [build(folder, ENDLESS) for folder in folders]
        for number, kind in (make or {}).items():
            nodes[number].service.relay = kind(nodes[number].ctx)
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(node.run()) for node in nodes]
        try:
            await scene(nodes, tasks)
        finally:
            await finish(*nodes, tasks=tasks)

    asyncio.run(scenario())
    exact(folders)


def test_two_by_way_of_a_relay_compute_what_they_would_if_they_were_called(tmp_path: Path) -> None:
    async def run(folders: list[Path]) -> list[Node]:
        nodes = [build(folder, SYNC) for folder in folders]
        assert all(outcome.finished for outcome in await ended(nodes))
        return nodes

    open_to_all, behind = make_folders(tmp_path / "a", 3), make_folders(tmp_path / "b", 3)
    arrange(behind, ("peer-1", "peer-2"), ("peer-0",))
    one, other = asyncio.run(run(open_to_all)), asyncio.run(run(behind))
    exact(behind)
    for mine, theirs in zip(models(one), models(other), strict=True):
        assert np.array_equal(mine, theirs)
    assert traded(other[1], "peer-2") > 0
    assert other[0].metrics.counts["relayed_bytes"] > 10_000


def test_a_relay_stays_until_those_it_serves_have_told_each_other(tmp_path: Path) -> None:
    """It has finished and knows that all have; the two have yet to tell each other."""
    folders = make_folders(tmp_path, 3)
    arrange(folders, ("peer-1", "peer-2"), ("peer-0",))
    told: set[str] = set()

    def tell_late(node: Node, other: str, relay_node: Node) -> None:
        link = node.neighbours.senders[other].link
        greet = link.greet

        async def greet_late(timeout: float | None = None) -> Any:
            if node.finished:
                await until(lambda: {"peer-1", "peer-2"} <= relay_node.neighbours.done)
                await until(lambda: relay_node.finished)
                await asyncio.sleep(4.0)
                answer = await greet(timeout)
                told.add(node.ctx.name)
                return answer
            return await greet(timeout)

        link.greet = greet_late  # type: ignore[method-assign]

    async def scenario() -> None:
        nodes = [build(folder, replace(SYNC, linger=30.0)) for folder in folders]
        tell_late(nodes[1], "peer-2", nodes[0])
        tell_late(nodes[2], "peer-1", nodes[0])
        await ended(nodes, 120.0)

    asyncio.run(scenario())
    assert told  # whoever is told first may have ended before it tells the other


def test_a_relay_and_those_it_serves_are_killed_again_and_again(tmp_path: Path) -> None:
    """Processes, three kills of the relay and two of a member behind it; error 0."""
    swarm = Swarm(tmp_path, 4, replace(ENDLESS, neighbours=3))
    arrange(list(swarm.folders.values()), ("peer-1", "peer-2"), ("peer-0",))
    try:
        swarm.start_all()
        for victim in ("peer-0", "peer-1", "peer-0", "peer-2", "peer-0"):
            reached = {name: len(swarm.history(name)) for name in swarm.folders}
            for name in swarm.folders:
                swarm.wait_for_round(reached[name] + 5, 60, [name])
            swarm.kill(victim)
            flying = swarm.frozen_audit()
            assert flying.passed, flying.problems
            assert flying.units + flying.in_flight == 4 * UNIT
            swarm.start(victim)
        before = sent_between(swarm)
        end = time.monotonic() + 60
        while min(now - then for now, then in zip(sent_between(swarm), before, strict=True)) < 3:
            assert time.monotonic() < end, swarm.log("peer-1")[-2000:]
            time.sleep(0.1)
        swarm.stop_all()
        assert swarm.audit().passed
    finally:
        swarm.close()


def sent_between(swarm: Swarm) -> tuple[int, int]:
    """How many shares the two behind the relay have taken from each other."""
    one, other = (swarm.folders[name] / "store" for name in ("peer-1", "peer-2"))
    return received_from(one, "peer-2"), received_from(other, "peer-1")


def received_from(store: Path, sender: str) -> int:
    with sqlite3.connect(f"file:{store / 'peer.sqlite'}?mode=ro", uri=True) as books:
        return int(
            books.execute("SELECT count(*) FROM received WHERE sender = ?", [sender]).fetchone()[0]
        )


class Spying(Relay):
    """Keeps all that it carries, and may change or swallow it."""

    seen: bytearray
    mood = "honest"

    async def _pass_on(self, member: str, read: Any, write: Any) -> None:
        self.seen = bytearray()

        async def write_something(frame: bytes) -> None:
            self.seen += frame
            if self.mood == "tampers" and len(frame) > 100:
                at = len(frame) // 2
                frame = frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]
            if self.mood != "swallows":
                await write(frame)

        await super()._pass_on(member, read, write_something)


def test_a_relay_reads_nothing(tmp_path: Path) -> None:
    """What the two say to each other is not in what it carried: no word, no number."""
    folders = make_folders(tmp_path, 3)
    arrange(folders, ("peer-1", "peer-2"), ("peer-0",))
    said: list[bytes] = []

    async def scene(nodes: list[Node], tasks: list[asyncio.Task[Any]]) -> None:
        nodes[1].metrics.tap = said.append
        await until(lambda: traded(nodes[1], "peer-2") > 5 and traded(nodes[2], "peer-1") > 5)
        carried = bytes(nodes[0].service.relay.seen)  # type: ignore[attr-defined]
        assert len(carried) > 8000
        assert any(b'"agreement"' in frame for frame in said)
        for word in (b'"agreement"', b"quiver", b"staged", b"/quiver.Peer/Push"):
            assert word not in carried
        bodies = [frame for frame in said if len(frame) > 4000]
        assert bodies
        for body in bodies:
            assert body[100:116] not in carried

    play(folders, scene, {0: Spying})


@pytest.mark.parametrize("mood", ["tampers", "swallows"])
def test_a_relay_that_changes_or_swallows_costs_time_and_no_mass(mood: str, tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 3)
    arrange(folders, ("peer-1", "peer-2"), ("peer-0",))

    def total(nodes: list[Node]) -> int:
        return traded(nodes[1], "peer-2") + traded(nodes[2], "peer-1")

    async def scene(nodes: list[Node], tasks: list[asyncio.Task[Any]]) -> None:
        await until(lambda: total(nodes) > 5)
        Spying.mood = mood
        pairs = (nodes[1], "peer-2"), (nodes[2], "peer-1")
        await until(lambda: any(peer in node._problems() for node, peer in pairs))
        await asyncio.sleep(1.0)
        before, rounds = total(nodes), nodes[1].transactions.accounts.round
        await until(lambda: nodes[1].transactions.accounts.round > rounds + 5)  # it goes on
        assert total(nodes) == before
        Spying.mood = "honest"
        await until(lambda: total(nodes) > before + 5)

    try:
        play(folders, scene, {0: Spying})
    finally:
        Spying.mood = "honest"


class Swallowing(Spying):
    mood = "swallows"


def test_a_relay_that_swallows_is_passed_over_where_there_is_another(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 4)
    arrange(folders, ("peer-1", "peer-2"), ("peer-0", "peer-3"))

    async def scene(nodes: list[Node], tasks: list[asyncio.Task[Any]]) -> None:
        await until(lambda: traded(nodes[1], "peer-2") > 5 and traded(nodes[2], "peer-1") > 5)

    play(folders, scene, {0: Swallowing})


def test_a_member_that_floods_a_relay_has_its_part_and_no_more(
    tmp_path: Path,
) -> None:
    """It opens lines and fills them as fast as it can; two others trade on meanwhile."""
    folders = make_folders(tmp_path, 4)
    arrange(folders, ("peer-1", "peer-2", "peer-3"), ("peer-0",))
    rate = 1 << 20

    async def flood(channel: Any, taken: list[int]) -> None:
        call = channel.stream_stream(f"/{SERVICE}/Dial")()
        try:
            await call.write(encode(Dial(target="peer-1")))
            await call.read()
            while True:
                await call.write(bytes(relay.FRAME))
                taken[0] += relay.FRAME
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            return
        finally:
            call.cancel()

    async def scenario() -> None:
        options = replace(ENDLESS, limits={**QUICK, "relay_rate": rate})
        nodes = [build(folder, options) for folder in folders[:3]]
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: traded(nodes[1], "peer-2") > 2)
        server = nodes[0].service.relay
        address = Roster.read(folders[0] / ROSTER).member("peer-0").address
        channel = open_channel(address, "peer-0", Identity.read(folders[3]))
        taken, began, highest = [0], time.monotonic(), 0
        before = traded(nodes[1], "peer-2"), traded(nodes[2], "peer-1")
        carried = nodes[0].metrics.counts["relayed_bytes"]
        floods: list[asyncio.Task[None]] = []
        while time.monotonic() - began < 6.0:
            floods = [task for task in floods if not task.done()]
            floods += [asyncio.create_task(flood(channel, taken)) for _ in range(20 - len(floods))]
            await asyncio.sleep(0.1)
            highest = max(highest, server.lines)
        seconds = time.monotonic() - began
        for task in floods:
            task.cancel()
        await asyncio.gather(*floods, return_exceptions=True)
        await channel.close()
        carried = nodes[0].metrics.counts["relayed_bytes"] - carried
        after = traded(nodes[1], "peer-2"), traded(nodes[2], "peer-1")
        assert all(now > then + 3 for now, then in zip(after, before, strict=True))
        assert highest <= 2 * LINES + LINES  # of the two honest ones, and of the flood's pair
        assert 0 < carried <= 3 * rate * (seconds + relay.BURST_SECONDS)
        assert nodes[0].metrics.refusals["too often"] + nodes[0].metrics.refusals["replaced"] > 0
        await finish(*nodes, tasks=tasks)

    asyncio.run(scenario())
    exact(folders[:3], complete=False)


def test_what_a_relay_refuses(tmp_path: Path) -> None:
    """Each in one sentence; a stranger and a revoked member are refused as everywhere."""
    folders = make_folders(tmp_path, 4)
    arrange(folders, ("peer-1", "peer-2"), ("peer-0",))

    async def ask(caller: int, called: int, method: str, first: bytes) -> str:
        name = f"peer-{called}"
        address = Roster.read(folders[0] / ROSTER).member(name).address
        channel = open_channel(address, name, Identity.read(folders[caller]))
        try:
            if method == "Attend":
                call = channel.unary_stream(f"/{SERVICE}/{method}")(first)
            else:
                call = channel.stream_stream(f"/{SERVICE}/{method}")()
                await call.write(first)
            async with asyncio.timeout(10):
                return str(await call.read())
        except grpc.aio.AioRpcError as problem:
            return str(problem.details())
        finally:
            await channel.close()

    async def scenario() -> None:
        nodes = [build(folders[number], ENDLESS) for number in (0, 3)]
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: nodes[0].state != "starting" and nodes[1].state != "starting")
        dial = encode(Dial(target="peer-2"))
        for caller, called, method, first, words in [
            (1, 3, "Attend", b"", "'peer-3' relays for nobody: its roster does not say so."),
            (1, 3, "Dial", dial, "'peer-3' relays for nobody"),
            (3, 0, "Dial", dial, "'peer-3' can be called: 'peer-0' does not relay for it."),
            (1, 0, "Dial", dial, "'peer-2' does not call this relay at the moment."),
            (1, 0, "Dial", b"rubbish", "not a Dial"),
            (1, 0, "Accept", encode(Accept(token="0" * 16)), "there is no such call any more."),
        ]:
            assert words in await ask(caller, called, method, first)
        for folder in folders:
            roster = Roster.read(folder / ROSTER)
            roster.without_keys("peer-1").write(folder / ROSTER)
        assert "was revoked" in await ask(1, 0, "Dial", dial)
        await finish(*nodes, tasks=tasks)

    asyncio.run(scenario())
    assert {"Dial", "Accept"} <= set(RATES)


def test_without_an_offer_the_two_stay_apart(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 3)
    arrange(folders, ("peer-1", "peer-2"))

    async def scene(nodes: list[Node], tasks: list[asyncio.Task[Any]]) -> None:
        await until(lambda: traded(nodes[1], "peer-0") > 5)
        assert "peer-2" not in nodes[1].transactions.accounts.links
        for folder in folders:  # and an offer in mid-run is taken up
            roster = Roster.read(folder / ROSTER)
            members = tuple(replace(m, relays=m.name == "peer-0") for m in roster.members)
            replace(roster, members=members).write(folder / ROSTER)
        await until(lambda: traded(nodes[1], "peer-2") > 2)

    play(folders, scene)


def test_a_relay_must_be_one_that_others_can_call(tmp_path: Path) -> None:
    path = tmp_path / ROSTER
    members = (Member("north", "10.1.0.5:7400", ("a" * 64,), relays=True),)
    Roster("trial", members).write(path)
    assert Roster.read(path).members == members
    Roster("trial", (replace(members[0], address=DIALS_OUT),)).write(path)
    with pytest.raises(QuiverError, match="'north' only dials out, so it cannot relay"):
        Roster.read(path)


def test_an_offer_from_request_to_audit(tmp_path: Path) -> None:
    """As documented, with commands and processes alone."""
    authority, names = tmp_path / "authority", ("north", "south", "west")
    quiver("certs", "init", authority, "--run", "trial")
    ports = free_ports(3)
    sites = [tmp_path / "sites" / name for name in names]
    quiver(
        *("certs", "request", sites[0], "--run", "trial", "--relay"),
        *("--address", f"127.0.0.1:{ports[0]}"),
    )
    for site in sites[1:]:
        quiver("certs", "request", site, "--run", "trial", "--address", "dials-out")
    shown = quiver("certs", "approve", authority, *(site / REQUEST for site in sites))
    assert shown.count("relays") == 1
    assert (authority / ROSTER).read_text().count("relay = true") == 1
    text = RUN.format(rounds=6).replace("clients = 2", "clients = 3")
    (tmp_path / "run.toml").write_text(text)
    folders = [tmp_path / name for name in names]
    for site, folder, port in zip(sites, folders, ports, strict=True):
        quiver("certs", "import", site, authority / APPROVED / f"{folder.name}.pem")
        common = ("--config", tmp_path / "run.toml", "--roster", authority / ROSTER)
        quiver("init", folder, "--keys", site, "--bind", f"127.0.0.1:{port}", *common)
    assert "by way of north, which relays" in quiver("doctor", folders[1], code=2)
    processes = [start(folder) for folder in folders]
    try:
        wait(lambda: int(str(status(folders[1]).get("round", 0))) > 2)
    finally:
        codes = [process.wait(120) for process in processes]
    assert codes == [0, 0, 0], (folders[1] / "log").read_text()[-3000:]
    report = json.loads(quiver("audit", *folders, "--json"))
    assert (report["passed"], report["error"]) == (True, 0)
    assert received_from(folders[1] / "store", "west") > 0
    assert received_from(folders[2] / "store", "south") > 0
    # A renewal keeps the offer, and one with --no-relay takes it back.
    for offer, relays in ((None, True), (False, False)):
        make_renewal(folders[0], relays=offer)
        approve_requests(authority, [folders[0] / REQUEST])
        assert Roster.read(authority / ROSTER).member("north").relays is relays
        for file in (REQUEST, "pending-key.pem"):
            (folders[0] / file).unlink()
    with pytest.raises(QuiverError, match="'south' only dials out, so it cannot relay"):
        make_renewal(folders[1], relays=True)


def test_certs_init_takes_relays_by_name(tmp_path: Path) -> None:
    peers = ("--peer", "north=127.0.0.1:7400", "--peer", "south=dials-out")
    for relay_name, words in (("south", "only dials out"), ("east", "is not the name of a --peer")):
        with pytest.raises(QuiverError, match=words):
            quiver("certs", "init", tmp_path, "--run", "trial", *peers, "--relay", relay_name)
    quiver("certs", "init", tmp_path / "ca", "--run", "trial", *peers, "--relay", "north")
    assert Roster.read(tmp_path / "ca" / ROSTER).relays == ["north"]
    with pytest.raises(QuiverError, match="only dials out"):
        quiver("certs", "issue", tmp_path / "ca", "west", "--address", "dials-out", "--relay")
