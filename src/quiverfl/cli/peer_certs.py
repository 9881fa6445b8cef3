"""`quiver peer certs …`: the run's authority, keys and roster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quiverfl.errors import QuiverError
from quiverfl.extras import require

certs = typer.Typer(help="Keys and certificates of a run.", no_args_is_help=True)

Authority = Annotated[Path, typer.Argument(help="The folder of the run's authority.")]


@certs.command("init")
def certs_init(
    authority: Authority,
    run: Annotated[str, typer.Option(help="The run's name.")],
    peer: Annotated[list[str], typer.Option(help="NAME=HOST:PORT or NAME=dials-out, one each.")],
) -> None:
    """Make an authority, a key per peer (in AUTHORITY/NAME) and the roster."""
    require("peer", "quiver peer")
    from quiverfl.peer import identity
    from quiverfl.peer.roster import ROSTER, Member, Roster

    pairs = [_pair(text) for text in peer]
    identity.create_authority(authority, run)
    members = [
        Member(name, address, (identity.issue(authority, name, authority / name),))
        for name, address in pairs
    ]
    roster = Roster(run, tuple(members))
    roster.write(authority / ROSTER)
    print(f"{len(members)} peers: give each its folder of {authority} and {authority / ROSTER}.")
    print(f"{authority / identity.AUTHORITY_KEY} admits peers to the run: keep it offline.")


@certs.command("issue")
def certs_issue(
    authority: Authority,
    name: Annotated[str, typer.Argument(help="The new peer's name.")],
    address: Annotated[str, typer.Option(help="HOST:PORT of the new peer, or dials-out.")],
) -> None:
    """A key for one more peer, added to the roster."""
    require("peer", "quiver peer")
    from dataclasses import replace

    from quiverfl.peer import identity
    from quiverfl.peer.roster import DIALS_OUT, ROSTER, Member, Roster

    roster = Roster.read(authority / ROSTER)
    if name in roster.names:
        raise QuiverError(f"{name!r} is in the roster: quiver peer certs rotate renews its key.")
    key = identity.issue(authority, name, authority / name)
    member = Member(name, DIALS_OUT if address == "dials-out" else address, (key,))
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
    """A new key for a peer; running peers take it without a restart."""
    require("peer", "quiver peer")
    from quiverfl.peer import identity
    from quiverfl.peer.roster import ROSTER, Roster

    roster = Roster.read(authority / ROSTER)
    roster.member(name)
    key = identity.issue(authority, name, authority / name)
    roster.with_key(name, key, keep_old=not forget_old).write(authority / ROSTER)
    print(f"First copy {authority / ROSTER} to every peer, then {authority / name} to {name!r}.")


@certs.command("revoke")
def certs_revoke(
    authority: Authority,
    name: Annotated[str, typer.Argument(help="The peer that is let in no more.")],
) -> None:
    """Take all keys of a peer out of the roster; running peers refuse it without a restart."""
    require("peer", "quiver peer")
    from quiverfl.peer.roster import ROSTER, Roster

    Roster.read(authority / ROSTER).without_keys(name).write(authority / ROSTER)
    print(f"Copy {authority / ROSTER} to every peer: from then on they refuse {name!r}.")
    print(f"Then quiver peer evict FOLDER {name} --ban on each writes off what waits for it.")


def _pair(text: str) -> tuple[str, str]:
    name, separator, address = text.partition("=")
    if address == "dials-out":
        from quiverfl.peer.roster import DIALS_OUT

        return name, DIALS_OUT
    if not separator or ":" not in address:
        raise QuiverError(
            f"--peer {text!r}: write NAME=HOST:PORT, or NAME=dials-out if nobody can call it."
        )
    return name, address
