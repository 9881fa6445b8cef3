"""`quiver peer certs …`: the run's authority, keys and roster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quiverfl.errors import QuiverError

certs = typer.Typer(help="Keys and certificates of a run.", no_args_is_help=True)

Authority = Annotated[Path, typer.Argument(help="The folder of the run's authority.")]


@certs.command("init")
def certs_init(
    authority: Authority,
    run: Annotated[str, typer.Option(help="The run's name.")],
    peer: Annotated[list[str], typer.Option(help="NAME=HOST:PORT or NAME=dials-out, one each.")],
) -> None:
    """Make an authority, a key per peer (in AUTHORITY/NAME) and the roster."""
    from quiverfl.peer.link.identity import (
        AUTHORITY_KEY,
        ROSTER,
        Member,
        Roster,
        create_authority,
        issue_certificate,
    )

    pairs = [_parse_member(text) for text in peer]
    _check_members(run, pairs)
    create_authority(authority, run)
    members = [
        Member(name, address, (issue_certificate(authority, name, authority / name),))
        for name, address in pairs
    ]
    roster = Roster(run, tuple(members))
    roster.write(authority / ROSTER)
    print(f"{len(members)} peers: give each its folder of {authority} and {authority / ROSTER}.")
    print(f"{authority / AUTHORITY_KEY} admits peers to the run: keep it offline.")


@certs.command("issue")
def certs_issue(
    authority: Authority,
    name: Annotated[str, typer.Argument(help="The new peer's name.")],
    address: Annotated[str, typer.Option(help="HOST:PORT of the new peer, or dials-out.")],
) -> None:
    """Make a key for one more peer and add it to the roster."""
    from dataclasses import replace

    from quiverfl.peer.link.identity import ROSTER, Member, Roster, issue_certificate

    roster = Roster.read(authority / ROSTER)
    if name in roster.names:
        raise QuiverError(f"{name!r} is in the roster: quiver peer certs rotate renews its key.")
    name, address = _parse_member(f"{name}={address}")
    key = issue_certificate(authority, name, authority / name)
    member = Member(name, address, (key,))
    replace(roster, members=(*roster.members, member)).write(authority / ROSTER)
    print(f"Copy {authority / ROSTER} to every peer, {authority / name} to {name!r} alone.")


@certs.command("rotate")
def certs_rotate(
    authority: Authority,
    name: Annotated[str, typer.Argument(help="The peer whose key is renewed.")],
    forget_old: Annotated[
        bool, typer.Option(help="Refuse the old key at once: it was stolen.")
    ] = False,
) -> None:
    """Give a peer a new key; running peers take it without a restart."""
    from quiverfl.peer.link.identity import ROSTER, Roster, issue_certificate

    roster = Roster.read(authority / ROSTER)
    roster.member(name)
    key = issue_certificate(authority, name, authority / name)
    roster.with_key(name, key, keep_old=not forget_old).write(authority / ROSTER)
    print(f"First copy {authority / ROSTER} to every peer, then {authority / name} to {name!r}.")


@certs.command("revoke")
def certs_revoke(
    authority: Authority,
    name: Annotated[str, typer.Argument(help="The peer that is let in no more.")],
) -> None:
    """Take all keys of a peer out of the roster; running peers refuse it without a restart."""
    from quiverfl.peer.link.identity import ROSTER, Roster

    Roster.read(authority / ROSTER).without_keys(name).write(authority / ROSTER)
    print(f"Copy {authority / ROSTER} to every peer: from then on they refuse {name!r}.")
    print(f"Then quiver peer evict FOLDER {name} --ban on each writes off what waits for it.")


def _parse_member(text: str) -> tuple[str, str]:
    from quiverfl.peer.link.identity import DIALS_OUT, check_address, check_name

    name, separator, address = text.partition("=")
    if not separator or (":" not in address and address != "dials-out"):
        raise QuiverError(
            f"--peer {text!r}: write NAME=HOST:PORT, or NAME=dials-out if nobody can call it."
        )
    check_name("peer", name)
    if address == "dials-out":
        return name, DIALS_OUT
    check_address(address)
    return name, address


def _check_members(run: str, pairs: list[tuple[str, str]]) -> None:
    """Refuse a run's name, and names and addresses that occur twice, before a key is made."""
    from quiverfl.peer.link.identity import DIALS_OUT, check_name

    check_name("run", run)
    names = [name for name, _ in pairs]
    called = [address for _, address in pairs if address != DIALS_OUT]
    for what, values in (("the name", names), ("the address", called)):
        for value in values:
            if values.count(value) > 1:
                raise QuiverError(f"{what} {value!r} is given twice: each peer has its own.")
