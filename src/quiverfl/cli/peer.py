"""`quiver peer …`: real peers. Imports gRPC and keys only when a command needs them."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quiverfl.cli.peer_certs import certs
from quiverfl.cli.peer_status import status_rows
from quiverfl.errors import QuiverError
from quiverfl.extras import require

if TYPE_CHECKING:
    from quiverfl.peer.peer import Peer
    from quiverfl.peer.peer_folder import PeerFolder
    from quiverfl.peer.peer_settings import Outcome

app = typer.Typer(help="Run as a peer between real machines.", no_args_is_help=True)
app.add_typer(certs, name="certs")

Folder = Annotated[Path, typer.Argument(help="The peer's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]

EXIT_STORE, EXIT_RESTORED, EXIT_UNDELIVERED, EXIT_INCOMPLETE = 4, 5, 6, 7
"""Beside 0 done, 2 something to fix, 3 diverged: the disk; a restored backup; shares that could
not be delivered before the peer ended, safe in its outbox; an audit without every peer's store."""


@app.command("init")
def init(
    folder: Folder,
    config: Annotated[Path, typer.Option(help="The run's configuration, the same for all.")],
    keys: Annotated[Path, typer.Option(help="The folder with ca.pem, cert.pem and key.pem.")],
    roster: Annotated[Path, typer.Option(help="The run's roster.toml.")],
    name: Annotated[
        str | None, typer.Option(help="This peer's name; by default that of the keys' folder.")
    ] = None,
    bind: Annotated[str | None, typer.Option(help="HOST:PORT to listen on.")] = None,
    metrics: Annotated[str, typer.Option(help="127.0.0.1:PORT for Prometheus.")] = "",
    data: Annotated[str | None, typer.Option(help="Own data: a source or module:function.")] = None,
    data_path: Annotated[
        Path | None, typer.Option(help="The file or folder of a source of your own.")
    ] = None,
    data_option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for the source, such as label=diagnosis.")
    ] = None,
) -> None:
    """Make a peer's folder: configuration, roster, keys, and what is its own."""
    require("peer", "quiver peer")
    from quiverfl.peer.peer_folder import OwnData, OwnSettings, make_folder
    from quiverfl.peer.roster import Roster

    if bind is not None and not (":" in bind and bind.rpartition(":")[2].isdigit()):
        raise QuiverError(f"--bind {bind!r}: write HOST:PORT, such as 0.0.0.0:7400.")
    if data_path is not None and not data_path.expanduser().exists():
        raise QuiverError(f"--data-path {data_path}: there is no such file or folder.")
    name = name or keys.name
    member = Roster.read(roster).member(name)
    address = "127.0.0.1:7400" if member.dials_out else member.address  # for its owner alone
    place = None if data_path is None else str(data_path.expanduser().absolute())
    options = dict(_option(text) for text in data_option or ())
    own = OwnSettings(
        name=name,
        bind=bind or address,
        metrics=metrics,
        data=None if data is None else OwnData(name=data, path=place, options=options),
    )
    made = make_folder(folder, config, roster, keys, own)
    made.identity()
    print(f"{folder} is ready: quiver peer run {folder}")


@app.command("run")
def run(
    folder: Folder,
    join: Annotated[
        bool, typer.Option(help="Enter a run under way: a neighbour's model, a mass of 1.")
    ] = False,
    trust_store: Annotated[
        bool, typer.Option(help="Continue although neighbours remember a newer store.")
    ] = False,
) -> None:
    """Run this peer until the run is over. SIGTERM ends it cleanly; run it again to continue."""
    require("peer", "quiver peer")
    from quiverfl.peer.connection import RestoredBackup
    from quiverfl.peer.files import StoreError
    from quiverfl.peer.metrics import log_to_stderr
    from quiverfl.peer.peer import Peer

    log_to_stderr()
    try:
        peer = Peer.open(folder, join=join, trust_store=trust_store)
        outcome = asyncio.run(_until_told(peer))
    except StoreError as problem:
        _exit(EXIT_STORE, str(problem))
    except RestoredBackup as problem:
        _exit(EXIT_RESTORED, str(problem))
    print(json.dumps(vars(outcome)))
    if outcome.undelivered and not outcome.stopped:
        reasons = "; ".join(f"{peer}: {reason}" for peer, reason in outcome.problems.items())
        _exit(
            EXIT_UNDELIVERED,
            f"{outcome.undelivered} shares could not be delivered and wait in the outbox; run it "
            f"again when the neighbours can be reached. {reasons}",
        )


@app.command("status")
def status(folder: Folder, json_: AsJson = False) -> None:
    """What a running peer is doing."""
    require("peer", "quiver peer")
    from quiverfl.peer.control import ask
    from quiverfl.peer.wire import Order

    found = ask(_read(folder), Order(action="status"))
    if json_:
        print(json.dumps(found))
        return
    table = Table(show_header=False)
    for key, value in status_rows(found):
        table.add_row(key, Text(value))
    Console().print(table)


@app.command("leave")
def leave(folder: Folder) -> None:
    """Let a running peer give all its mass away and end; its model is kept in its store."""
    require("peer", "quiver peer")
    from quiverfl.peer.control import ask
    from quiverfl.peer.wire import Order

    ask(_read(folder), Order(action="leave"))
    print("leaving: the peer ends when its neighbours have taken everything.")


@app.command("evict")
def evict(
    folder: Folder,
    peer: Annotated[str, typer.Argument(help="The peer to stop dealing with.")],
    ban: Annotated[
        bool, typer.Option(help="For good: it is not let in again, not even with a new store.")
    ] = False,
) -> None:
    """Stop dealing with a peer that is lost. Do it on every remaining peer."""
    require("peer", "quiver peer")
    from quiverfl.peer.control import NotRunning, ask
    from quiverfl.peer.ledger import UNIT
    from quiverfl.peer.transactions import evict_at_rest
    from quiverfl.peer.wire import Order

    opened = _read(folder)
    try:
        found = ask(opened, Order(action="evict", peer=peer, ban=ban))
    except NotRunning:
        opened.roster.member(peer)
        found = {"written_off": evict_at_rest(opened.store, peer, ban) / UNIT}
    word = "banned" if ban else "evicted"
    print(f"{peer} is {word} here; written off: {found['written_off']:.6f}")


@app.command("amend")
def amend(
    folder: Folder,
    since: Annotated[int, typer.Option(min=0, help="The round from which on it holds.")],
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds in all.")] = None,
    lr: Annotated[float | None, typer.Option(help="The learning rate.")] = None,
) -> None:
    """Agree to a change of the run. It holds once every member has agreed to the same."""
    require("peer", "quiver peer")
    from quiverfl.cli.peer_amend import agree

    print("\n".join(agree(_read(folder), since, rounds, lr)))


@app.command("doctor")
def doctor(
    folder: Folder,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for a peer.")] = 5.0,
    json_: AsJson = False,
) -> None:
    """Look for what keeps a peer from running well: clock, certificate, reachability, disk."""
    require("peer", "quiver peer")
    from quiverfl.cli.peer_doctor import consult

    if not consult(folder, timeout, json_):
        raise typer.Exit(2)


@app.command("watch")
def watch(
    sources: Annotated[
        list[str], typer.Argument(help="Peers' folders, or HOST:PORT of their metrics.")
    ],
    page: Annotated[bool, typer.Option(help="A page for the browser, on this machine.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the page; 0 for any.")] = 8464,
    save: Annotated[Path | None, typer.Option(help="Write one picture as a page, and end.")] = None,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between looks.")] = 2.0,
    once: Annotated[bool, typer.Option(help="Print one table, and end.")] = False,
) -> None:
    """Watch peers from their metrics: rounds, mass, accuracy, links that wait. Read-only."""
    require("peer", "quiver peer")
    from quiverfl.cli.peer_watch import save_page, watch_in_browser, watch_in_terminal
    from quiverfl.peer.watching import Watch, source_of

    watched = Watch([source_of(text) for text in sources])
    if save is not None:
        save_page(watched, save)
    elif page:
        watch_in_browser(watched, every, port)
    else:
        watch_in_terminal(watched, every, once)


@app.command("audit")
def audit(
    folders: Annotated[list[Path], typer.Argument(help="Peers' folders, or their stores.")],
    live: Annotated[
        bool,
        typer.Option(
            help="The peers are running: their records are read one after the other, so a receiver "
            "may know of a share that its sender's older records do not have."
        ),
    ] = False,
    roster: Annotated[
        Path | None,
        typer.Option(help="The run's roster.toml, to check signatures; else that of a folder."),
    ] = None,
    json_: AsJson = False,
) -> None:
    """Prove that no mass was lost or counted twice.

    The exit code is 1 if it was, 7 if a store is missing.
    """
    require("peer", "quiver peer")
    from quiverfl.peer.audit import audit as audited
    from quiverfl.peer.peer_folder import STORE
    from quiverfl.peer.roster import ROSTER, Roster
    from quiverfl.peer.schema import read_statement
    from quiverfl.peer.signing import checked_by

    stores = [path / STORE if (path / STORE).is_dir() else path for path in folders]
    rosters = [roster] if roster else [p / ROSTER for p in folders if (p / ROSTER).exists()]
    genuine = checked_by(Roster.read(rosters[0])) if rosters else None
    report = audited([read_statement(store) for store in stores], live=live, genuine=genuine)
    if json_:
        print(json.dumps(report.values()))
    else:
        print("\n".join(report.lines()))
    if not report.passed:
        raise typer.Exit(1)
    if not report.complete:
        raise typer.Exit(EXIT_INCOMPLETE)


@app.command("export")
def export(
    folder: Folder,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("model.safetensors"),
) -> None:
    """Write the personal model as safetensors, and how to load it."""
    require("peer", "quiver peer")
    from quiverfl.cli.peer_export import export_model

    for line in export_model(_read(folder), out):
        print(line)


@app.command("demo")
def demo(
    peers: Annotated[int, typer.Option(min=2, max=64, help="How many processes.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each.")] = 20,
    mode: Annotated[str, typer.Option(help="sync or async.")] = "async",
    kills: Annotated[int, typer.Option(min=0, help="How many to kill and restart at random.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder to write to; must be new.")] = Path(
        "runs/peer-demo"
    ),
) -> None:
    """A swarm on this machine: certificates, processes, a live table, an audit, a report."""
    require("peer", "quiver peer")
    from quiverfl.cli.peer_demo import run_demo

    if mode not in ("sync", "async"):
        raise QuiverError(f"--mode {mode}: it is sync or async.")
    if not run_demo(out, peers, rounds, mode, kills):
        raise typer.Exit(1)


async def _until_told(peer: Peer) -> Outcome:
    """Run it; SIGTERM and Ctrl-C end it in good order."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, peer.stop)
    return await peer.run()


def _read(folder: Path) -> PeerFolder:
    from quiverfl.peer.peer_folder import PeerFolder

    return PeerFolder.read(folder)


def _option(text: str) -> tuple[str, Any]:
    from quiverfl.config import setting

    if not text.partition("=")[2].strip():
        raise QuiverError(f"--data-option {text!r}: write KEY=VALUE.")
    return setting(text)


def _exit(code: int, sentence: str) -> None:
    Console(stderr=True, highlight=False).print(f"[red]error:[/red] {sentence}", soft_wrap=True)
    raise typer.Exit(code)
