"""`quiver peer …`: real peers. A command imports gRPC and keys only when it needs them."""

from __future__ import annotations

import asyncio
import errno
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quiverfl.cli.peer_certs import certs
from quiverfl.errors import QuiverError
from quiverfl.support.environment import require_package

if TYPE_CHECKING:
    from quiverfl.peer.api import Peer
    from quiverfl.peer.folder import Outcome, PeerFolder


app = typer.Typer(help="Run as a peer between real machines.", no_args_is_help=True)
app.add_typer(certs, name="certs")


@app.callback()
def check_extra() -> None:
    require_package("peer", "quiver peer")


Folder = Annotated[Path, typer.Argument(help="The peer's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]

EXIT_STORE, EXIT_RESTORED, EXIT_UNDELIVERED, EXIT_INCOMPLETE = 4, 5, 6, 7
"""Exit codes beside 0 done, 2 something to fix, 3 diverged. 4: the disk failed. 5: a backup was
restored. 6: shares could not be delivered before the peer ended, and wait in its outbox. 7: an
audit without the store of every peer."""


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
    """Make a peer's folder from configuration, roster, keys and its own settings."""
    from quiverfl.peer.folder import PEER, OwnData, OwnSettings, PeerFolder, make_folder
    from quiverfl.peer.link.identity import check_address
    from quiverfl.peer.link.roster import Roster
    from quiverfl.peer.metrics import check_metrics_address
    from quiverfl.peer.setup import build_learner, check_run_file

    check_metrics_address(metrics)
    if bind is not None:
        check_address(f"0.0.0.0{bind}" if bind.startswith(":") else bind, "--bind ")
    if data_path is not None and not data_path.expanduser().exists():
        raise QuiverError(f"--data-path {data_path}: there is no such file or folder.")
    name = name or keys.name
    member = Roster.read(roster).member(name)
    address = "127.0.0.1:7400" if member.dials_out else member.address  # for its owner alone
    path = None if data_path is None else str(data_path.expanduser().absolute())
    options = dict(_parse_option(text) for text in data_option or ())
    own = OwnSettings(
        name=name,
        bind=bind or address,
        metrics=metrics,
        data=None if data is None else OwnData(name=data, path=path, options=options),
    )
    check_run_file(PeerFolder.combine(folder, own, config, roster))
    made = make_folder(folder, config, roster, keys, own)
    try:
        made.identity()
        build_learner(made)
    except QuiverError:
        (folder / PEER).unlink()  # so that init can be repeated
        raise
    print(f"{folder} is ready: quiver peer run {folder}")


@app.command("run")
def run(
    folder: Folder,
    join: Annotated[
        bool, typer.Option(help="Enter a run under way with a neighbour's model and a mass of 1.")
    ] = False,
    trust_store: Annotated[
        bool,
        typer.Option(
            help="Continue although neighbours remember a newer store; join by one member's word."
        ),
    ] = False,
) -> None:
    """Run this peer until the run is over. SIGTERM ends it cleanly; run it again to continue."""
    from quiverfl.peer.accounts.disk import StoreError
    from quiverfl.peer.api import Peer
    from quiverfl.peer.link.link import RestoredBackup
    from quiverfl.peer.metrics import log_to_stderr

    log_to_stderr()
    try:
        peer = Peer.open(folder, join=join, trust_store=trust_store)
        outcome = asyncio.run(_run_until_signal(peer))
    except StoreError as problem:
        _exit(EXIT_STORE, str(problem))
    except RestoredBackup as problem:
        _exit(EXIT_RESTORED, str(problem))
    except (QuiverError, OSError) as problem:
        if not _is_about_disk(problem):
            raise
        _exit(EXIT_STORE, f"{problem} Make room or make it writable, then start again.")
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
    """Show what a running peer is doing."""
    from quiverfl.cli.peer_owner import format_status
    from quiverfl.peer.control import send_order
    from quiverfl.peer.link.wire import Order

    status = send_order(_read_folder(folder).path, Order(action="status"))
    if json_:
        print(json.dumps(status))
        return
    table = Table(show_header=False)
    for key, value in format_status(status):
        table.add_row(key, Text(value))
    Console(emoji=False).print(table)


@app.command("leave")
def leave(folder: Folder) -> None:
    """Let a running peer give all its mass away and end; its model is kept in its store."""
    from quiverfl.peer.control import send_order
    from quiverfl.peer.link.wire import Order

    send_order(_read_folder(folder).path, Order(action="leave"))
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
    from quiverfl.peer.accounts.ledger import UNIT
    from quiverfl.peer.accounts.transactions import evict_offline
    from quiverfl.peer.control import NotRunning, send_order
    from quiverfl.peer.link.wire import Order

    opened = _read_folder(folder)
    try:
        result = send_order(opened.path, Order(action="evict", peer=peer, ban=ban))
    except NotRunning:
        opened.roster.member(peer)
        result = {"written_off": evict_offline(opened.store, peer, ban) / UNIT}
    word = "banned" if ban else "evicted"
    print(f"{peer} is {word} here; written off: {result['written_off']:.6f}")


@app.command("amend")
def amend(
    folder: Folder,
    since: Annotated[int, typer.Option(min=0, help="The round from which on it holds.")],
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds in all.")] = None,
    lr: Annotated[float | None, typer.Option(help="The learning rate.")] = None,
    join: Annotated[
        list[str] | None, typer.Option(help="A member that joins: the next of the roster.")
    ] = None,
    mass: Annotated[
        float, typer.Option(min=2**-48, max=1.0, help="What each of them brings.")
    ] = 1.0,
) -> None:
    """Agree to a change of the run. It holds once every member has agreed to the same."""
    from quiverfl.cli.peer_owner import propose_change

    lines = propose_change(_read_folder(folder), since, rounds, lr, join or (), mass)
    print("\n".join(lines))


@app.command("doctor")
def doctor(
    folder: Folder,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for a peer.")] = 5.0,
    json_: AsJson = False,
) -> None:
    """Check what keeps a peer from running well: clock, certificate, reachability, disk."""
    from quiverfl.cli.peer_owner import print_findings

    if not print_findings(folder, timeout, json_):
        raise typer.Exit(2)


@app.command("watch")
def watch(
    sources: Annotated[
        list[str], typer.Argument(help="Peers' folders, or HOST:PORT of their metrics.")
    ],
    page: Annotated[bool, typer.Option(help="Show a page in the browser.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: any.")] = 8464,
    save: Annotated[Path | None, typer.Option(help="Write a page of now, and end.")] = None,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between readings.")] = 2.0,
    once: Annotated[bool, typer.Option(help="Print one table, and end.")] = False,
) -> None:
    """Watch peers through their metrics: rounds, mass, accuracy, links that wait. Read-only."""
    from quiverfl.cli.peer_owner import (
        find_metrics_address,
        save_page,
        watch_in_browser,
        watch_in_terminal,
    )
    from quiverfl.peer.metrics import MetricsClient

    client = MetricsClient([find_metrics_address(text) for text in sources])
    if save is not None:
        save_page(client, save)
    elif page:
        watch_in_browser(client, every, port)
    else:
        watch_in_terminal(client, every, once)


@app.command("replay")
def replay(
    folders: Annotated[list[Path], typer.Argument(help="The folders of all peers of a run.")],
    json_: AsJson = False,
) -> None:
    """Play recorded async peers again in the simulation, to the same bits.

    The stores have the times of all pushes and merges. The exit code is 1 if a model differs.
    """
    from quiverfl.peer.replay import replay as replay_peers

    replay = replay_peers(folders)
    metric = next(iter(replay.metrics))
    scores = replay.metrics[metric].tolist()
    rows = list(zip(replay.names, replay.rounds, replay.same, scores, strict=True))
    if json_:
        keys = ("peer", "rounds", "same", metric)
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows]))
    else:
        for name, rounds, same, score in rows:
            words = "same bits" if same else "DIFFERENT"
            print(f"{name}: {rounds} rounds, {words}, {metric} {score:.4f}")
    if not all(replay.same):
        raise typer.Exit(1)


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
    from quiverfl.peer.accounts.audit import audit as audit_statements
    from quiverfl.peer.accounts.disk import read_statement
    from quiverfl.peer.accounts.signing import signature_check
    from quiverfl.peer.folder import STORE
    from quiverfl.peer.link.roster import ROSTER, Roster

    stores = [path / STORE if (path / STORE).is_dir() else path for path in folders]
    beside = [place / ROSTER for path in folders for place in (path, path.absolute().parent)]
    rosters = [roster] if roster else [path for path in beside if path.exists()]
    is_genuine = signature_check(Roster.read(rosters[0])) if rosters else None
    report = audit_statements(
        [read_statement(store) for store in stores], live=live, is_genuine=is_genuine
    )
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
    for line in export_model(_read_folder(folder), out):
        print(line)


@app.command("demo")
def demo(
    config: Annotated[
        Path | None,
        typer.Argument(help="A configuration; without one, DFedPGP on digits.", show_default=False),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Set section.key=value; wins over the file.")
    ] = None,
    peers: Annotated[int, typer.Option(min=2, max=64, help="How many processes.")] = 8,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rounds of each: 20, or the configuration's, unless given.",
            show_default=False,
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="sync or async: async, or what [peers] says, unless given.", show_default=False
        ),
    ] = None,
    kills: Annotated[int, typer.Option(min=0, help="How many to kill and restart at random.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder to write to; must be new.")] = Path(
        "runs/peer-demo"
    ),
) -> None:
    """Run a swarm on this machine: certificates, processes, a live table, an audit, a report."""
    from quiverfl.cli.peer_demo import run_demo
    from quiverfl.peer.demo import make_swarm
    from quiverfl.runs.config_files import load_config, read_peers_section

    if mode not in (None, "sync", "async"):
        raise QuiverError(f"--mode {mode}: it is sync or async.")
    chosen, section = None, {}
    if config is not None or set_:
        path = Path("quickstart") if config is None else config
        chosen, section = load_config(path, set_ or ()), read_peers_section(path)
    rounds = rounds or (None if chosen else 20)
    if not run_demo(out, make_swarm(out, peers, rounds, mode, chosen, section), kills):
        raise typer.Exit(1)


async def _run_until_signal(peer: Peer) -> Outcome:
    """Run a peer; SIGTERM and Ctrl-C end it in good order."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, peer.stop)
    return await peer.run()


def _read_folder(folder: Path) -> PeerFolder:
    from quiverfl.peer.folder import PeerFolder

    return PeerFolder.read(folder)


def _parse_option(text: str) -> tuple[str, Any]:
    from quiverfl.runs.config_files import parse_setting

    if not text.partition("=")[2].strip():
        raise QuiverError(f"--data-option {text!r}: write KEY=VALUE.")
    return parse_setting(text)


DISK_ERRORS = {errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO}


def _is_about_disk(problem: BaseException | None) -> bool:
    """Whether a problem comes from a disk that is full, read-only or broken."""
    while problem is not None:
        if isinstance(problem, OSError) and problem.errno in DISK_ERRORS:
            return True
        problem = problem.__cause__
    return False


def _exit(code: int, sentence: str) -> None:
    Console(emoji=False, stderr=True, highlight=False).print(
        f"[red]error:[/red] {sentence}", soft_wrap=True
    )
    raise typer.Exit(code)


def export_model(folder: PeerFolder, out: Path) -> Iterator[str]:
    """Write `out` and a .json that describes it. Yields the lines to print about them."""
    from torch import from_numpy

    from quiverfl.peer.setup import load_peer_config, load_peer_dataset, restore_learner
    from quiverfl.runs.experiment import make_task
    from quiverfl.runs.export import write_model

    config = load_peer_config(folder)
    dataset = load_peer_dataset(folder, config)
    trained = {name: from_numpy(leaf) for name, leaf in restore_learner(folder).model().items()}
    tensors = {**make_task(config, dataset).skeleton.state_dict(), **trained}  # frozen parts too
    yield from write_model(tensors, config, dataset, {"peer": folder.own.name}, out)
