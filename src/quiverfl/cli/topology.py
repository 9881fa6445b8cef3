"""`quiver topologies` lists the graphs, `quiver topology show` measures and draws one."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from quiverfl.errors import QuiverError
from quiverfl.topologies import TOPOLOGIES, Topology, TopologyReport, analyse, make_topology
from quiverfl.topologies.analysis import Spread

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
    rows = [_described(name) for name in TOPOLOGIES]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        options = f"  options: {', '.join(row['options'])}" if row["options"] else ""
        typer.echo(f"{row['name']:<21} {row['matrix']:<18} {', '.join(row['methods'])}{options}")
        typer.echo(f"    {row['description']}")


@app.command()
def show(
    name: Annotated[
        str, typer.Argument(help="As `quiver topologies` lists it, or your own module:function.")
    ],
    clients: Annotated[int, typer.Option(help="How many clients.")] = 100,
    neighbors: Annotated[int | None, typer.Option(help="Neighbours of a client.")] = None,
    sampled: Annotated[int | None, typer.Option(help="Clients a star samples.")] = None,
    probability: Annotated[float | None, typer.Option(help="Of a link (erdos_renyi).")] = None,
    seed: Annotated[int | None, typer.Option(help="Of random graphs.")] = None,
    participation: Annotated[float | None, typer.Option(help="Fraction online.")] = None,
    link_failure: Annotated[
        float | None, typer.Option(help="Probability that a one-way link fails in a round.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="option=value, for any other option.")
    ] = None,
    static: Annotated[bool, typer.Option("--static", help="Keep the first round's draw.")] = False,
    rounds: Annotated[int, typer.Option(help="How many rounds to look at.")] = 50,
    message_bytes: Annotated[
        int, typer.Option(help="Of one message; the default is the paper's ResNet-18 body.")
    ] = PAPER_MESSAGE_BYTES,
    picture: Annotated[
        Path | None, typer.Option(help="Draw a round into this file: .png, .svg or .pdf.")
    ] = None,
    picture_round: Annotated[int, typer.Option(min=1, help="The round to draw.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Stochasticity, connectivity, contraction, spread of μ and cost, over some rounds."""
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
        _draw(topology, picture_round, picture)
    report = analyse(topology, rounds, message_bytes)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        _print(_table(report))
        for reason in report.left_out:
            _print(f"left out: {reason}")
    if picture is not None:
        typer.echo(f"picture: {picture}", err=as_json)


def _option(text: str) -> tuple[str, Any]:
    from quiverfl.config import toml_value

    option, separator, value = text.partition("=")
    if not separator or not value.strip():
        raise QuiverError(f"--set {text!r}: write option=value.")
    return option.strip(), toml_value(value.strip())


def _draw(topology: Topology, round: int, picture: Path) -> None:
    from quiverfl.results.graph_picture import draw_graph

    told = [f"{option} {value}" for option, value in topology.options.items() if value is not False]
    title = ", ".join([topology.name, f"{topology.clients} clients", *told, f"round {round}"])
    draw_graph(topology(round - 1), picture, title=title)


def _described(name: str) -> dict[str, Any]:
    """A line of the list; the matrix is looked at, not looked up."""
    factory = TOPOLOGIES[name]
    options = [option for option in inspect.signature(factory).parameters if option != "clients"]
    example = {option: _EXAMPLE[option] for option in options if option in _EXAMPLE}
    graph = factory(8, **example)(0)
    return {
        "name": name,
        "options": options,
        "matrix": _KINDS[graph.row_stochastic, graph.column_stochastic],
        "methods": ["every method"] if graph.row_stochastic else _with_mass(),
        "description": (inspect.getdoc(factory) or "").split("\n")[0],
    }


def _with_mass() -> list[str]:
    from quiverfl.methods import METHODS

    made = {name: make() for name, make in METHODS.items()}
    return [name for name, m in made.items() if m.mass is not None or m.topology == "isolated"]


def _table(report: TopologyReport) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for figure, value in _lines(report):
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
        ("network", f"{report.messages:,.1f} messages, {_bytes(report.bytes)} a round"),
        (
            "busiest",
            f"{report.busiest_messages:,.1f} messages in and out, {_bytes(report.busiest_bytes)}",
        ),
    ]


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
    Console(highlight=False).print(what)
