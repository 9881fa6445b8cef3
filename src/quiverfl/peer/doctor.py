"""`quiver peer doctor`: checks what keeps a peer from running well, and names the remedy."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import importlib.metadata
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc
import grpc.aio

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.disk import write_durably
from quiverfl.peer.control import NotRunning, make_order
from quiverfl.peer.folder import PeerFolder, choose_step
from quiverfl.peer.link.identity import Identity, parse_certificate
from quiverfl.peer.link.limits import acceptable_connections
from quiverfl.peer.link.link import open_channel
from quiverfl.peer.link.roster import Member
from quiverfl.peer.link.service import installed_version
from quiverfl.peer.link.wire import OLDEST, PROTOCOL, SERVICE, Order, Vitals, WireError, decode

DAYS_LEFT = 30
CLOCK_SECONDS, CLOCK_LIMIT = 60.0, 12 * 3600.0
"""A clock that is off by more than the first is doubtful, by more than the second bad: certificates
are valid from a day before they are made."""
SLOW_WRITE = 1.0
MIN_FREE = 1 << 30

LEAST_FLOOR = 0.1
"""Below it, the paper's step is called doubtful without waiting: more than ten times η."""
Level = Literal["good", "doubtful", "bad"]


@dataclass(frozen=True)
class Finding:
    """The result of one check; a result that is not good has a remedy."""

    about: str
    level: Level
    text: str
    remedy: str = ""


async def examine_peer(path: Path, timeout: float = 5.0) -> list[Finding]:
    """Run all checks that this machine allows, whether the peer runs or not."""
    findings = [_check_versions()]
    try:
        folder = PeerFolder.read(path)
    except QuiverError as problem:
        return [*findings, Finding("folder", "bad", str(problem), "Make it with quiver peer init.")]
    findings += [*_check_certificate(folder), *_check_disk(folder)]
    findings += [_check_open_files(folder), *_describe_step(folder)]
    findings.append(await _check_own_port(folder))
    others = [m for m in folder.roster.members if m.name != folder.own.name]
    with contextlib.suppress(QuiverError):  # without keys no peer can be called
        identity = Identity.read(folder.path)
        own = folder.roster.member(folder.own.name)
        relays = folder.roster.relays
        calls = (_check_neighbour(member, own, identity, timeout, relays) for member in others)
        for results in await asyncio.gather(*calls):
            findings += results
    return findings


def _check_versions() -> Finding:
    versions = f"quiverfl {installed_version()}, grpcio {importlib.metadata.version('grpcio')}"
    return Finding("version", "good", f"{versions}; speaks protocol {OLDEST} to {PROTOCOL}")


def _check_certificate(folder: PeerFolder) -> Iterator[Finding]:
    name = folder.own.name
    renew = (
        f"quiver peer certs request {folder.path}; the authority approves the request, roster.toml "
        "goes to every peer, and quiver peer certs import takes the approval here. No restart is "
        f"needed. Where the authority makes the keys: quiver peer certs rotate AUTHORITY {name}."
    )
    try:
        identity = folder.identity()
    except QuiverError as problem:
        yield Finding("certificate", "bad", str(problem), renew)
        return
    now = datetime.datetime.now(datetime.UTC)
    for about, pem, remedy in [
        ("certificate", identity.certificate, renew),
        (
            "authority",
            identity.authority,
            "Found a new run with quiver peer certs init before then.",
        ),
    ]:
        end = parse_certificate(pem).not_valid_after_utc
        days = (end - now).days
        level: Level = "good" if days >= DAYS_LEFT else "doubtful" if end > now else "bad"
        text = f"valid until {end:%Y-%m-%d}, {days} days"
        yield Finding(about, level, text, "" if level == "good" else remedy)


def _check_disk(folder: PeerFolder) -> Iterator[Finding]:
    disk = folder.store if folder.store.is_dir() else folder.path
    probe = disk / f"doctor-{os.getpid()}"
    began = time.monotonic()
    try:
        write_durably(probe, bytes(1 << 20))
    except QuiverError as problem:
        yield Finding("disk", "bad", str(problem), f"Make {disk} writable, or make room.")
        return
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    seconds = time.monotonic() - began
    free = shutil.disk_usage(disk).free
    sizes = [p.stat().st_size for p in disk.glob("state-*")]
    need = max(MIN_FREE, 8 * max(sizes, default=0))
    text = f"{free / 1e9:.1f} GB free; 1 MiB was durable after {seconds * 1000:.0f} ms"
    if free < need:
        remedy = f"Keep {need / 1e9:.1f} GB free: the model several times over, and the records."
        yield Finding("disk", "doubtful", text, remedy)
    elif seconds > SLOW_WRITE:
        remedy = "Every round commits twice: put the store on a disk that syncs faster."
        yield Finding("disk", "doubtful", text, remedy)
    else:
        yield Finding("disk", "good", text)


def _check_open_files(folder: PeerFolder) -> Finding:
    try:
        count = acceptable_connections(len(folder.roster.members))
    except QuiverError as problem:
        return Finding("open files", "bad", str(problem), "Raise ulimit -n, or LimitNOFILE=.")
    return Finding("open files", "good", f"room for {count} connections")


def _describe_step(folder: PeerFolder) -> Iterator[Finding]:
    """Say which step on z = u/μ is in force, and why; methods without mass have no choice."""
    mode = folder.peers.mode
    choice = choose_step(folder.experiment, mode)
    if choice is None:
        return
    why = "run.toml says so" if choice.named else f"what {mode} peers take unless run.toml names it"
    if choice.step == "debiased":
        text = f"debiased: z = u/μ moves by η, however little mass is here ({why})"
        yield Finding("step", "good", text)
    elif choice.floor is not None and (mode == "sync" or choice.floor >= LEAST_FLOOR):
        text = f"the paper's, bounded: z = u/μ moves by η/max(μ, {choice.floor:g}) ({why})"
        yield Finding("step", "good", text)
    elif choice.floor is not None:
        text = (
            f"the paper's, bounded loosely: z = u/μ moves by η/max(μ, {choice.floor:g}) ({why}); "
            f"without waiting, fast peers may step by {1 / choice.floor:,.0f} times η"
        )
        remedy = 'For the next run set step = "debiased" or step_floor = 1 on every peer.'
        yield Finding("step", "doubtful", text, remedy)
    elif mode == "sync":
        yield Finding("step", "good", f"the paper's: z = u/μ moves by η/μ ({why})")
    else:
        text = (
            f"the paper's: z = u/μ moves by η/μ ({why}); without waiting, mass gathers at slow "
            "peers, and fast ones step by many times η"
        )
        remedy = (
            "For the next run leave step out of [method] in run.toml, on every peer: async peers "
            "then take the debiased step. A run that has begun keeps its step."
        )
        yield Finding("step", "doubtful", text, remedy)


async def _check_own_port(folder: PeerFolder) -> Finding:
    bind = folder.own.bind
    try:
        status = await make_order(folder.path, Order(action="status"))
    except NotRunning:
        return _check_free_port(bind)
    except QuiverError as problem:
        return Finding("own port", "bad", str(problem), "See the certificate above.")
    text = f"runs on {bind}: {status['state']}, round {status['round']} of {status['rounds']}"
    waiting = status.get("problems", {})
    if not waiting:
        return Finding("own port", "good", text)
    reasons = "; ".join(f"{peer}: {reason}" for peer, reason in waiting.items())
    return Finding("own port", "doubtful", f"{text}; shares wait: {reasons}", "See them below.")


def _check_free_port(bind: str) -> Finding:
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((host, int(port)))
    except OSError as problem:
        remedy = "End what listens there, or set bind in peer.toml to an address of this machine."
        return Finding("own port", "bad", f"cannot listen on {bind}: {problem.strerror}", remedy)
    return Finding("own port", "good", f"not running; {bind} is free")


async def _check_neighbour(
    member: Member, own: Member, identity: Identity, timeout: float, relays: Sequence[str] = ()
) -> list[Finding]:
    about = f"peer {member.name}"
    if member.dials_out:
        if own.dials_out:
            by = f"{' or '.join(relays)}, which relays" if relays else "the others"
            text = f"only dials out, as this peer does: their shares go by way of {by}"
            return [Finding(about, "good", text)]
        return [Finding(about, "good", "only dials out: it calls this peer")]
    unreachable = await _check_tcp(about, member, timeout)
    if unreachable is not None:
        return [unreachable]
    channel = open_channel(member.address, member.name, identity)
    try:
        before = time.time()
        answer = await channel.unary_unary(f"/{SERVICE}/Probe")(b"", timeout=timeout)
        after = time.time()
        vitals = decode(Vitals, answer)
    except grpc.aio.AioRpcError as problem:
        return [_explain_refusal(about, member, problem)]
    except WireError as problem:
        remedy = f"Ask the operator of {member.name} which version of quiverfl runs there."
        return [Finding(about, "bad", f"is not understood: {problem}", remedy)]
    finally:
        await channel.close()
    return [
        _check_version(about, member, vitals, after - before),
        _check_clock(about, vitals, before, after),
    ]


async def _check_tcp(about: str, member: Member, timeout: float) -> Finding | None:
    host, _, port = member.address.rpartition(":")
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except socket.gaierror:
        remedy = f"Correct the address of {member.name} in roster.toml, on every peer, or the DNS."
        return Finding(about, "bad", f"{host} is not a known host", remedy)
    except ConnectionRefusedError:
        remedy = f"Start it: quiver peer run FOLDER on {member.name}'s machine."
        return Finding(about, "bad", f"nothing listens on {member.address}", remedy)
    except (TimeoutError, OSError) as problem:
        reason = getattr(problem, "strerror", None) or "no answer"
        remedy = (
            f"Let TCP port {port} through the firewalls between here and {member.name}; if nobody "
            'can call it, its address in roster.toml is "dials-out:0".'
        )
        return Finding(about, "bad", f"cannot connect to {member.address}: {reason}", remedy)
    writer.close()
    return None


def _explain_refusal(about: str, member: Member, problem: Any) -> Finding:
    code, details = problem.code(), str(problem.details())
    if code is grpc.StatusCode.PERMISSION_DENIED:
        remedy = f"Copy the newest roster.toml to {member.name}, and this peer's keys from there."
        return Finding(about, "bad", f"refuses this peer: {details}", remedy)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        text = "runs an older quiverfl, which cannot be asked for its clock and version"
        remedy = "It works beside this one; upgrade it when it suits, one peer after the other."
        return Finding(about, "doubtful", text, remedy)
    remedy = (
        f"Its certificate may have expired, be of another authority or for another name: run "
        f"quiver peer doctor on {member.name}'s machine."
    )
    return Finding(about, "bad", f"listens, but no secure connection: {details[:200]}", remedy)


def _check_version(about: str, member: Member, vitals: Vitals, seconds: float) -> Finding:
    text = f"answers in {seconds * 1000:.0f} ms; quiverfl {vitals.version}"
    if vitals.oldest > PROTOCOL or vitals.protocol < OLDEST:
        text += f", protocol {vitals.oldest} to {vitals.protocol}"
        remedy = f"Install versions of quiverfl that share one here and on {member.name}."
        return Finding(about, "bad", text, remedy)
    return Finding(about, "good", f"{text}, protocol {min(PROTOCOL, vitals.protocol)} together")


def _check_clock(about: str, vitals: Vitals, before: float, after: float) -> Finding:
    off = vitals.time - (before + after) / 2
    text = f"its clock is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} this one"
    if abs(off) < CLOCK_SECONDS + (after - before):
        return Finding(f"{about} clock", "good", text)
    level: Level = "bad" if abs(off) > CLOCK_LIMIT else "doubtful"
    remedy = "Let both machines keep time (chrony, systemd-timesyncd): certificates depend on it."
    return Finding(f"{about} clock", level, text, remedy)
