"""`quiver topologies` lists the graphs, `quiver topology show` measures and draws one."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from quiverfl.errors import QuiverError
from quiverfl.results.pictures import recorded_graphs
from quiverfl.results.run_files import is_run, read_run
from quiverfl.topologies import (
    TOPOLOGIES,
    Topology,
    TopologyReport,
    analyze_topology,
    make_topology,
)
from quiverfl.topologies.analysis import (
    CONNECTIVITY_WINDOW,
    Spread,
    check_connectivity,
    draw_first_graphs,
    measure_spread,
    unite_graphs,
)
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.reports import ReportSpec
from quiverfl.topologies.topology import count_downloads, count_uploads

app = typer.Typer(no_args_is_help=True, help="Measure and draw a topology.")

PAPER_MESSAGE_BYTES = 4 * 11_168_832
"""The shared part of the paper's ResNet-18 in float32."""

_EXAMPLE = {"neighbors": 3, "sampled": 3, "probability": 0.5}
_KINDS = {
    (True, True): "doubly stochastic",
    (True, False): "row-stochastic",
    (False, True): "column-stochastic",
    (False, False): "neither",
}


def topologies(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the topologies: their matrix, their options, and which methods can run on them.

    Rows that sum to 1 suit every method. Where only columns do, a method must carry the mass by
    which it divides.
    """
    rows = [_describe_generator(name) for name in TOPOLOGIES]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        options = f"  options: {', '.join(row['options'])}" if row["options"] else ""
        print(f"{row['name']:<21} {row['matrix']:<18} {', '.join(row['methods'])}{options}")
        print(f"    {row['description']}")


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(
            help="A name from `quiver topologies`, or your own module:function; or the folder of "
            "a run whose topology is adaptive."
        ),
    ],
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 100,
    neighbors: Annotated[int | None, typer.Option(help="Neighbours of a client.")] = None,
    sampled: Annotated[int | None, typer.Option(help="Clients a star samples.")] = None,
    probability: Annotated[
        float | None, typer.Option(help="Probability of a link (erdos_renyi).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of random graphs.")] = None,
    participation: Annotated[float | None, typer.Option(help="Fraction online.")] = None,
    link_failure: Annotated[
        float | None, typer.Option(help="Probability that a one-way link fails in a round.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="option=value, for any other option.")
    ] = None,
    static: Annotated[bool, typer.Option("--static", help="Keep the first round's draw.")] = False,
    rounds: Annotated[int, typer.Option(help="Number of rounds to measure.")] = 50,
    window: Annotated[
        int | None,
        typer.Option(min=1, help="Say whether any so many consecutive rounds are connected."),
    ] = None,
    message_bytes: Annotated[
        int,
        typer.Option(
            min=1, help="Bytes of one message; the default is the paper's ResNet-18 body."
        ),
    ] = PAPER_MESSAGE_BYTES,
    picture: Annotated[
        Path | None, typer.Option(help="Draw a round into this file: .png, .svg or .pdf.")
    ] = None,
    picture_round: Annotated[
        int | None, typer.Option(min=1, help="With --picture: the round to draw, 1 unless given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Stochasticity, connectivity, contraction, spread of μ and cost, over some rounds.

    The graphs of an adaptive topology depend on the run. Given the folder of one, this shows those
    it recorded. Given its name, it shows those of clients that always tell the same.
    """
    if picture_round is not None and picture is None:
        raise QuiverError(f"--picture-round {picture_round}: it goes with --picture FILE.")
    drawn = picture_round or 1
    if is_run(Path(name)):
        _show_recorded(Path(name), window or CONNECTIVITY_WINDOW, picture, drawn, as_json)
        return
    given: dict[str, Any] = {
        "neighbors": neighbors,
        "sampled": sampled,
        "probability": probability,
        "seed": seed,
        "participation": participation,
        "link_failure": link_failure,
        "static": static or None,
    }
    options = {option: value for option, value in given.items() if value is not None}
    options |= dict(map(_option, set_ or ()))
    topology = make_topology(name, clients, **options)
    if picture is not None:
        _draw(topology, drawn, picture)
    report = analyze_topology(topology, rounds, message_bytes)
    watched = None
    if window is not None or topology.reports is not None:
        watched = check_connectivity(
            draw_first_graphs(topology, rounds), window or CONNECTIVITY_WINDOW
        )
    if as_json:
        watching = {} if watched is None else {"watch": asdict(watched)}
        print(json.dumps({**report.as_dict(), **watching}, indent=2))
    else:
        _print(
            _table(
                _lines(report) + ([] if watched is None else [("over time", watched.describe())])
            )
        )
        if topology.reports is not None:
            _print(_describe_reports(topology.reports))
        for reason in report.left_out:
            _print(f"left out: {reason}")
    if picture is not None:
        print(f"picture: {picture}", file=sys.stderr if as_json else sys.stdout)


@app.command()
def time(
    devices: Annotated[
        Path | None,
        typer.Option(help="A TOML file with [devices] and [network]; the default is a 10× spread."),
    ] = None,
    clients: Annotated[int, typer.Option(min=3, help="Number of clients.")] = 20,
    neighbors: Annotated[int, typer.Option(min=1, help="Neighbours of a client.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")] = 40,
    steps: Annotated[int, typer.Option(min=1, help="Local steps of a round.")] = 24,
    message_bytes: Annotated[int, typer.Option(min=1, help="Bytes of one message.")] = 244_000,
    seed: Annotated[int, typer.Option(help="Seed of devices and graphs.")] = 0,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the first rounds into this file: .png, .svg or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Who waits for whom: seconds of a round under each kind of exchange, without training.

    The same devices, local steps and bytes with a server, a barrier, an undirected exchange, a push
    in step and a push without waiting.
    """
    from quiverfl.clock.settings import (
        DeviceSettings,
        NetworkSettings,
        make_devices,
        read_sections,
    )
    from quiverfl.clock.waiting import compare_waiting, draw_waiting
    from quiverfl.results.pictures import choose_format
    from quiverfl.runs.config_files import read_toml

    if picture is not None:
        choose_format(picture)
    if neighbors >= clients:
        raise QuiverError(f"--neighbors {neighbors}: there are {clients} clients; give fewer.")
    sections = (
        DeviceSettings(step=0.5, spread=10.0),
        NetworkSettings(up=1.25e6, spread=10.0, latency=0.05),
    )
    if devices is not None:
        tree = read_toml(devices, f"{devices}: no such file.")
        sections = read_sections(tree, str(devices))
    made = make_devices(*sections, clients, seed)
    waiting = compare_waiting(made, neighbors, rounds, steps, message_bytes, seed)
    if picture is not None:
        draw_waiting(waiting, picture, 6 * waiting["push"].seconds)
    if as_json:
        named = ("title", "seconds", "waiting", "slowest")
        rows = {kind: {k: getattr(one, k) for k in named} for kind, one in waiting.items()}
        print(json.dumps(rows, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("exchange", "seconds a round", "slowest client", "waits"):
        table.add_column(heading, justify="left" if heading == "exchange" else "right")
    for one in waiting.values():
        table.add_row(one.title, f"{one.seconds:.1f}", f"{one.slowest:.1f}", f"{one.waiting:.0%}")
    _print(table)
    if picture is not None:
        print(f"picture: {picture}")


def _describe_reports(spec: ReportSpec) -> str:
    contents = [name for name in ("loss", "norm") if getattr(spec, name)]
    contents += [f"sketch of {spec.sketch} numbers"] if spec.sketch else []
    contents += [f"sketch of the model of {spec.model} numbers"] if spec.model else []
    return (
        f"Clients report: {', '.join(contents)} ({spec.bytes} bytes with every message). Shown "
        "for clients that always report the same; `quiver topology show FOLDER` has the graphs "
        "of a run."
    )


def _show_recorded(
    folder: Path, window: int, picture: Path | None, picture_round: int, as_json: bool
) -> None:
    """The graphs that a run wrote down."""
    run = read_run(folder)
    graphs = recorded_graphs(run)
    if not graphs:
        raise QuiverError(
            f"{folder} recorded no graphs: those of {run.topology} do not depend on the run; "
            f"`quiver topology show {run.topology}` with its options shows them."
        )
    if picture is not None:
        if picture_round > len(graphs):
            raise QuiverError(f"--picture-round {picture_round}: {len(graphs)} were recorded.")
        _draw_to(graphs[picture_round - 1], picture, f"{run.topology}, round {picture_round}")
    watched = check_connectivity(graphs, window)
    used = unite_graphs(graphs).nnz - run.clients
    possible = run.clients * (run.clients - 1)
    if as_json:
        recorded = {"topology": run.topology, "clients": run.clients, "links_used": used}
        print(json.dumps({**recorded, "watch": asdict(watched)}, indent=2))
        return
    _print(
        _table(
            [
                ("topology", f"{run.topology}, {run.clients} clients, as recorded"),
                ("rounds recorded", str(len(graphs))),
                (
                    "messages sent",
                    _spread(measure_spread([count_uploads(graph) for graph in graphs])),
                ),
                (
                    "messages received",
                    _spread(measure_spread([count_downloads(graph) for graph in graphs])),
                ),
                ("links used", f"{used:,} of {possible:,} possible"),
                ("over time", watched.describe()),
            ]
        )
    )


def _option(text: str) -> tuple[str, Any]:
    from quiverfl.runs.config_files import parse_toml_value

    option, separator, value = text.partition("=")
    if not separator or not value.strip():
        raise QuiverError(f"--set {text!r}: write option=value.")
    return option.strip(), parse_toml_value(value.strip())


def _draw_to(graph: Graph, picture: Path, title: str) -> None:
    from quiverfl.results.pictures import draw_graph

    draw_graph(graph, picture, title=title)


def _draw(topology: Topology, round: int, picture: Path) -> None:
    options = topology.options.items()
    listed = [f"{option} {value}" for option, value in options if value is not False]
    title = ", ".join([topology.name, f"{topology.clients} clients", *listed, f"round {round}"])
    _draw_to(draw_first_graphs(topology, round)[-1], picture, title)


def _describe_generator(name: str) -> dict[str, Any]:
    """A line of the list; the matrix is looked at, not looked up."""
    factory = TOPOLOGIES[name]
    options = [option for option in inspect.signature(factory).parameters if option != "clients"]
    example = {option: _EXAMPLE[option] for option in options if option in _EXAMPLE}
    topology = factory(8, **example)
    graph = topology(0)
    return {
        "name": name,
        "options": options,
        "matrix": _KINDS[graph.row_stochastic, graph.column_stochastic],
        "methods": ["every method"] if graph.row_stochastic else _with_mass(topology),
        "description": (inspect.getdoc(factory) or "").split("\n")[0],
    }


def _with_mass(topology: Topology) -> list[str]:
    """Methods that carry mass, and those that send nothing where nothing must be told."""
    from quiverfl.methods import METHODS

    made = {name: make() for name, make in METHODS.items()}
    silent = topology.reports is None
    return [
        name
        for name, method in made.items()
        if method.mass is not None or (silent and method.topology == "isolated")
    ]


def _table(lines: list[tuple[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for figure, value in lines:
        table.add_row(figure, value)
    return table


def _lines(report: TopologyReport) -> list[tuple[str, str]]:
    options = [
        f"{option} {value}" for option, value in report.options.items() if value is not False
    ]
    kind = _KINDS[report.row_stochastic, report.column_stochastic]
    shape = "symmetric" if report.symmetric else "directed"
    change = "the same in every round" if report.fixed else "changes from round to round"
    return [
        ("topology", ", ".join([report.name, f"{report.clients} clients", *options])),
        ("rounds looked at", str(report.rounds)),
        ("matrix", f"{kind}, {shape}, {change}"),
        ("mean over clients", _mean(report)),
        ("train in a round", f"{report.active:g} clients"),
        ("messages sent", _spread(report.sent)),
        ("messages received", _spread(report.received)),
        ("strongly connected", _window(report)),
        ("diameter", _diameter(report)),
        ("contraction", _contraction(report)),
        ("spectral gap", _number(report.spectral_gap)),
        ("μ", f"{report.mu_low:.4g} to {report.mu_high:.4g}, δ = {report.delta:.4g}"),
        ("spread of μ", f"standard deviation {report.mu_deviation:.4f} over clients"),
        ("skewness", _skewness(report)),
        ("network", f"{report.messages:,.1f} messages, {_bytes(report.bytes)} a round"),
        (
            "busiest",
            f"{report.busiest_messages:,.1f} messages in and out, {_bytes(report.busiest_bytes)}",
        ),
    ]


def _skewness(report: TopologyReport) -> str:
    if report.skewness is None:
        return "unbounded: some clients weigh nothing in the long run"
    return f"{report.skewness:.4g} = ln(largest / smallest long-run weight)"


def _mean(report: TopologyReport) -> str:
    if report.column_stochastic:
        return "conserved"
    return "not conserved: DFedPGP's theorem does not cover this graph"


def _spread(spread: Spread) -> str:
    return f"{spread.low:g} to {spread.high:g} a client and round, mean {spread.mean:.4g}"


def _window(report: TopologyReport) -> str:
    if report.window is None:
        return "never in these rounds" if not _left_out(report, "window") else "–"
    if report.window == 1:
        return "in every round (B = 1)"
    return f"any {report.window} consecutive rounds together (B = {report.window})"


def _diameter(report: TopologyReport) -> str:
    if _left_out(report, "diameter"):
        return "–"
    first = (
        "none, the first round is not connected"
        if report.diameter is None
        else str(report.diameter)
    )
    if report.window is None or report.window == 1:
        return first
    return f"{first}; {report.window_diameter} for {report.window} rounds together"


def _contraction(report: TopologyReport) -> str:
    if report.rate is None or report.constant is None:
        return "–"
    return f"distance ≤ C·q^t with q = {report.rate:.4f}, C = {report.constant:.3g}"


def _left_out(report: TopologyReport, figure: str) -> bool:
    return any(figure in reason.split(":")[0] for reason in report.left_out)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:,.4g} TB"


def _print(what: Table | str) -> None:
    Console(emoji=False, highlight=False).print(what)
