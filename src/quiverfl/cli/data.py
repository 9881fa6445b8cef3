"""`quiver data` lists and fetches data sets; `quiver partition show` looks at a partition."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from quiverfl.data.dataset import IDS, Dataset, Inputs
from quiverfl.data.examples import iterate_pieces
from quiverfl.data.partition import Partition, check_partition, make_partition, partition_options
from quiverfl.data.sources import SOURCES, data_root, load_dataset, official_folder
from quiverfl.data.sources.cache import FOLDER
from quiverfl.data.sources.fetch import ProgressReport, fetch
from quiverfl.errors import QuiverError
from quiverfl.trees import tree_leaves
from quiverfl.types import Integers

app = typer.Typer(invoke_without_command=True, help="List and fetch data sets.")
partition_app = typer.Typer(no_args_is_help=True, help="Look at a partition.")

Root = Annotated[
    Path | None,
    typer.Option(help="Folder of the data sets: $QUIVER_DATA or the folder data unless given."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

SHADES = " ░▒▓█"
SHOWN_CLIENTS = 20
SHOWN_CLASSES = 50
TOLD = ("npz", "table")
"""Sources with an option that says what the inputs are."""


@app.callback()
def data(context: typer.Context, root: Root = None, as_json: AsJson = False) -> None:
    """List the data sets: where they are expected, whether they are there and cached."""
    if context.invoked_subcommand is not None:
        context.obj = root
        return
    top = data_root(root)
    rows = [_describe_source(name, top) for name in SOURCES]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row['name']:<14} {row['state']:<14} {row['where']}")
        print(f"    {row['about']}")
    print('Your own code: data.name = "module:function", a function that returns a Dataset.')


@app.command("fetch")
def fetch_command(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A data set that `quiver data` calls missing.")],
    root: Root = None,
) -> None:
    """Download an official data set, verify its checksum and unpack it."""
    source = SOURCES.lookup(name)
    if not source.downloads:
        raise QuiverError(
            f"{name} has nothing to fetch: "
            + ("it comes with Quiver." if source.origin == "embedded" else "it is your own data.")
        )
    top = data_root(root or context.obj)
    with _progress() as report:
        made = fetch(source.downloads, top, report)
    place = official_folder(name, top)
    if not made:
        load_dataset(name, top)  # what lies there may be damaged: then this says so
    print(f"{name}: {'ready' if made else 'already there'} in {place}")


@partition_app.command("show")
def show(
    data: Annotated[str, typer.Option(help="A name `quiver data` lists, or module:function.")],
    partition_name: Annotated[
        str,
        typer.Option(
            "--partition", help="dirichlet, dirichlet_by_class, pathological, iid or natural."
        ),
    ] = "dirichlet",
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    alpha: Annotated[
        float | None, typer.Option(help="Concentration of a Dirichlet partition.")
    ] = None,
    classes_per_client: Annotated[
        int | None, typer.Option(help="Classes per client (pathological).")
    ] = None,
    min_samples: Annotated[
        int | None, typer.Option(help="Fewest samples per client (dirichlet_by_class).")
    ] = None,
    samples_per_client: Annotated[int | None, typer.Option(help="Take fewer than all.")] = None,
    test_per_client: Annotated[int | None, typer.Option(help="Size of a test set.")] = None,
    validation: Annotated[
        float | None, typer.Option(help="Share of the training examples held out as test set.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the partition.")] = 0,
    root: Root = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Option of the data source, as key=value; repeatable.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the heat-map into this file: .png, .svg or .pdf.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Sizes, labels per client, how unlike the clients are, and the heat-map."""
    dataset = load_dataset(data, root, **_options(option or []))
    given = {
        "alpha": alpha,
        "classes_per_client": classes_per_client,
        "min_samples": min_samples,
    }
    options = {key: value for key, value in given.items() if value is not None}
    partition = make_partition(
        dataset,
        partition_name,
        clients,
        seed,
        samples_per_client=samples_per_client,
        test_per_client=test_per_client,
        validation=validation,
        **options,
    )
    check_partition(dataset, partition)
    resolved = partition_options(partition_name, options)
    described = [partition_name, *(f"{key} {value}" for key, value in resolved.items())]
    title = f"{dataset.name}: {', '.join(described)}, {partition.clients} clients, seed {seed}"
    if picture is not None:
        from quiverfl.results.pictures import draw_partition

        try:
            draw_partition(
                partition.train_counts, picture, title=title, class_names=dataset.class_names
            )
        except (OSError, ValueError) as error:
            raise QuiverError(f"--picture {picture}: cannot be written: {error}") from error
    inputs = _inputs(dataset, data)
    if as_json:
        print(json.dumps({**_facts(partition, title), "inputs": inputs}, indent=2))
    else:
        _print_partition(partition, dataset, title, inputs)
    if picture is not None:
        print(f"picture: {picture}", file=sys.stderr if as_json else sys.stdout)


def _describe_source(name: str, root: Path) -> dict[str, str]:
    source = SOURCES[name]
    row = {"name": name, "about": source.about, "origin": source.origin}
    if source.origin == "embedded":
        return row | {"where": "in the package", "state": "ready"}
    if source.origin == "own":
        return row | {"where": "data.options.path", "state": "yours"}
    place = official_folder(name, root)
    cached = any((root / FOLDER).glob(f"{name}-*"))
    state = "missing" if place is None else "there, cached" if cached else "there"
    return row | {"where": str(place or root / source.folders[0]), "state": state}


@contextmanager
def _progress() -> Iterator[ProgressReport]:
    """A bar for every file; on anything but a terminal one line each."""
    console = Console(emoji=False, stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:

        def report(file: str, done: int, size: int | None) -> None:
            if file not in tasks:
                tasks[file] = progress.add_task(file, total=size)
            progress.update(tasks[file], completed=done)

        yield report


def _options(texts: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator:
            raise QuiverError(f"--option {text!r}: write key=value, such as label=digit.")
        try:
            options[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            options[key] = value
    return options


def _facts(partition: Partition, title: str) -> dict[str, Any]:
    return {
        "partition": title,
        "clients": partition.clients,
        "names": list(partition.names),
        "heterogeneity": partition.heterogeneity(),
        "train_sizes": partition.train_counts.sum(axis=1).tolist(),
        "test_sizes": partition.test_counts.sum(axis=1).tolist(),
        "labels_per_client": (partition.train_counts > 0).sum(axis=1).tolist(),
        "train_counts": partition.train_counts.tolist(),
        "test_counts": partition.test_counts.tolist(),
        "test_from": "train" if partition.held_out else "test",
    }


def _print_partition(partition: Partition, dataset: Dataset, title: str, inputs: str) -> None:
    counts = partition.train_counts
    used, total = int(counts.sum()), len(dataset.train_y)
    test = "held-out training" if partition.held_out else "test"
    print(title)
    print(f"inputs             {inputs}")
    print(f"training examples  {_spread(counts.sum(axis=1))}; {used:,} of {total:,} used")
    print(f"{test + ' examples':<18} {_spread(partition.test_counts.sum(axis=1))}")
    print(f"labels per client  {_spread((counts > 0).sum(axis=1))} of {dataset.classes}")
    print(
        f"heterogeneity      {partition.heterogeneity():.3f}, from 0 (all alike) towards 1: mean "
        "total-variation distance from the whole"
    )
    if dataset.classes > SHOWN_CLASSES:
        print(f"More than {SHOWN_CLASSES} classes: --json or --picture show who has which.")
        return
    whose = "  whose" if partition.names else ""
    width = max(2 * dataset.classes + 2, len("shares of the classes"))
    print(f"\nclient  size  test  labels  {'shares of the classes':<{width}}{whose}".rstrip())
    for client in range(min(partition.clients, SHOWN_CLIENTS)):
        own = counts[client]
        sizes = f"{own.sum():>6}{partition.test_counts[client].sum():>6}{(own > 0).sum():>8}"
        name = f"  {partition.names[client]}" if partition.names else ""
        bar = f"|{_shade_classes(own)}|"
        print(f"{client:>6}{sizes}  {bar:<{width}}{name}".rstrip())
    if partition.clients > SHOWN_CLIENTS:
        print(f"… and {partition.clients - SHOWN_CLIENTS} more; --json or --picture show all.")


def _inputs(dataset: Dataset, source: str) -> str:
    """What the inputs are taken for, and what is done to them before they reach the model."""
    if dataset.is_single_array:
        return _input(dataset.train_x, bool(dataset.mean), source)
    known = dataset.mean or {}
    parts = tree_leaves(dataset.train_x)
    return "; ".join(f"{name}: {_input(x, name in known, source)}" for name, x in parts)


def _input(x: Inputs, standardised: bool, source: str) -> str:
    shape = "×".join(str(side) for side in x.shape[1:])
    if x.dtype in IDS:
        return f"ids ({x.dtype}), shape {shape}, kept as they are"
    kind = "images (bytes)" if x.dtype == np.uint8 else f"numbers ({x.dtype})"
    done = "standardised per channel" if standardised else "kept as they are"
    words = f"{kind}, shape {shape}, {done}"
    if source in TOLD and x.dtype != np.uint8 and _all_whole(x):
        words += '; all are whole numbers: if they are ids, set data.options.inputs = "ids"'
    return words


def _all_whole(x: Inputs) -> bool:
    return all((piece == np.trunc(piece)).all() for piece in iterate_pieces(x))


def _shade_classes(own: Integers) -> str:
    """One letter per class, the darker the more frequent; none only where there is nothing."""
    level = np.ceil(np.sqrt(own / own.sum()) * (len(SHADES) - 1)).astype(int)
    return "".join(SHADES[i] * 2 for i in level)


def _spread(values: Integers) -> str:
    low, high = int(values.min()), int(values.max())
    if low == high:
        return f"{low:,} each"
    return f"{low:,} to {high:,}, median {np.median(values):,.0f}"
