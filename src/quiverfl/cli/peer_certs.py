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
    peer: Annotated[
        list[str] | None,
        typer.Option(help="NAME=HOST:PORT or NAME=dials-out: make its keys here, for one machine."),
    ] = None,
    relay: Annotated[
        list[str] | None,
        typer.Option(help="NAME of --peer that relays for members that only dial out."),
    ] = None,
) -> None:
    """Make an authority and a roster; with --peer a key per peer, too (in AUTHORITY/NAME)."""
    from quiverfl.peer.link.identity import AUTHORITY_KEY, create_authority, issue_certificate
    from quiverfl.peer.link.roster import ROSTER, Member, Roster

    pairs = [_parse_member(text) for text in peer or ()]
    _check_members(run, pairs, relay or [])
    create_authority(authority, run)
    members = [
        Member(
            name,
            address,
            (issue_certificate(authority, name, authority / name),),
            relays=name in (relay or ()),
        )
        for name, address in pairs
    ]
    roster = Roster(run, tuple(members))
    roster.write(authority / ROSTER)
    if members:
        print(
            f"{len(members)} peers: give each its folder of {authority} and {authority / ROSTER}."
        )
    else:
        print(f"Each peer makes its key: quiver peer certs request NAME --run {run} --address …")
    print(f"{authority / AUTHORITY_KEY} admits peers to the run: keep it offline.")


@certs.command("request")
def certs_request(
    folder: Annotated[Path, typer.Argument(help="Where the keys are to be; or the peer's folder.")],
    run: Annotated[str | None, typer.Option(help="The run's name.")] = None,
    address: Annotated[str | None, typer.Option(help="HOST:PORT, or dials-out.")] = None,
    name: Annotated[
        str | None, typer.Option(help="The peer's name; by default that of the folder.")
    ] = None,
    relay: Annotated[
        bool | None, typer.Option(help="Offer to relay for members that only dial out.")
    ] = None,
) -> None:
    """Make a key at the peer's own machine, and a request that the authority approves.

    In the folder of a peer that has a certificate: make the next key, and ask for its renewal.
    """
    from quiverfl.peer.link.requests import (
        PENDING_KEY,
        REQUEST,
        describe_key,
        make_renewal,
        make_request,
    )

    if run is None and name is None:
        request = make_renewal(folder, address, relay)
    elif run is None or address is None:
        raise QuiverError("a first request needs --run and --address; a renewal neither.")
    else:
        name = name or folder.absolute().name
        request = make_request(folder, name, run, address, bool(relay))
    print(f"{folder / REQUEST}: send it to the authority of {request.run!r}. It holds no secret.")
    print(f"{folder / PENDING_KEY} is the private key: it stays here.")
    print(f"key {describe_key(request.key)} (read it to the authority)")


@certs.command("approve")
def certs_approve(
    authority: Authority,
    requests: Annotated[list[Path], typer.Argument(help="The request.pem of each peer.")],
    days: Annotated[
        float, typer.Option(min=0.01, max=36_500, help="Days that certificates are valid.")
    ] = 365,
    replace_key: Annotated[
        bool, typer.Option(help="Take a key that the peer's old one has not signed: it was lost.")
    ] = False,
    forget_old: Annotated[
        bool, typer.Option(help="Refuse the old key of a renewal at once: it was stolen.")
    ] = False,
) -> None:
    """Sign requests of peers, and enter their keys into the roster: all of them, or none."""
    from quiverfl.peer.link.requests import approve_requests, describe_key
    from quiverfl.peer.link.roster import ROSTER

    for approval in approve_requests(authority, requests, days, replace_key, forget_old):
        request, word = approval.request, "renewed" if approval.was else "new"
        word += ", relays" if request.relays else ""
        print(f"{request.name} at {request.address}, key {describe_key(request.key)} ({word})")
        print(f"  {approval.path}: send it to {request.name!r}.")
    print(f"Compare the keys with the peers' operators; then copy {authority / ROSTER} to all.")


@certs.command("import")
def certs_import(
    folder: Annotated[Path, typer.Argument(help="The folder that the request was made in.")],
    approval: Annotated[Path, typer.Argument(help="The file that the authority has sent.")],
) -> None:
    """Install an approved certificate; a running peer takes it without a restart."""
    from quiverfl.peer.link.requests import import_approval

    print(f"{folder}: the certificate is {import_approval(folder, approval).describe_end()}.")


@certs.command("issue")
def certs_issue(
    authority: Authority,
    name: Annotated[str, typer.Argument(help="The new peer's name.")],
    address: Annotated[str, typer.Option(help="HOST:PORT of the new peer, or dials-out.")],
    relay: Annotated[bool, typer.Option(help="It relays for members that only dial out.")] = False,
) -> None:
    """Make a key for one more peer and add it to the roster."""
    from dataclasses import replace

    from quiverfl.peer.link.identity import issue_certificate
    from quiverfl.peer.link.roster import ROSTER, Member, Roster, check_relay

    roster = Roster.read(authority / ROSTER)
    if name in roster.names:
        raise QuiverError(f"{name!r} is in the roster: quiver peer certs rotate renews its key.")
    if ":" not in address and address != "dials-out":
        raise QuiverError(
            f"--address {address!r}: write HOST:PORT, or dials-out if nobody can call it."
        )
    name, address = _parse_member(f"{name}={address}")
    check_relay(name, address, relay)
    key = issue_certificate(authority, name, authority / name)
    member = Member(name, address, (key,), relays=relay)
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
    from quiverfl.peer.link.identity import issue_certificate
    from quiverfl.peer.link.roster import ROSTER, Roster

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
    from quiverfl.peer.link.roster import ROSTER, Roster

    Roster.read(authority / ROSTER).without_keys(name).write(authority / ROSTER)
    print(f"Copy {authority / ROSTER} to every peer: from then on they refuse {name!r}.")
    print(f"Then quiver peer evict FOLDER {name} --ban on each writes off what waits for it.")


def _parse_member(text: str) -> tuple[str, str]:
    from quiverfl.peer.link.identity import check_address, check_name
    from quiverfl.peer.link.roster import DIALS_OUT

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


def _check_members(run: str, pairs: list[tuple[str, str]], relays: list[str]) -> None:
    """Refuse a run's name, names and addresses that occur twice, and relays that are none."""
    from quiverfl.peer.link.identity import check_name
    from quiverfl.peer.link.roster import DIALS_OUT, check_relay

    check_name("run", run)
    names = [name for name, _ in pairs]
    called = [address for _, address in pairs if address != DIALS_OUT]
    for what, values in (("the name", names), ("the address", called)):
        for value in values:
            if values.count(value) > 1:
                raise QuiverError(f"{what} {value!r} is given twice: each peer has its own.")
    for name in relays:
        if name not in names:
            raise QuiverError(f"--relay {name!r} is not the name of a --peer.")
        check_relay(name, dict(pairs)[name], True)
