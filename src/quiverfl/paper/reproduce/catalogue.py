"""The paper's tables and figures by name: which cells each of them needs, and how they vary."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from quiverfl.errors import QuiverError, suggest
from quiverfl.runs.config_files import configs_folder, read_toml
from quiverfl.runs.experiment import make_method, make_run_topology
from quiverfl.support.references import Registry
from quiverfl.sweeps.plan import Cell, Choice, load_sweep

Kind: TypeAlias = Literal["accuracy", "target", "curves", "series", "partition"]
"""accuracy: methods × cases. target: rounds until an accuracy. curves: one panel per case.
series: one curve per case. partition: heat-maps, nothing is trained."""

FULL_SIZE = "paper"
PAPER_METHODS = (
    "fedavg",
    "fedper",
    "fedrep",
    "fedbabu",
    "ditto",
    "dfedavgm",
    "dfedavgmp",
    "osgp",
    "dispfl",
    "dfedpgp",
)
"""The methods of the paper's tables; the others of the package are not in them."""
PAPER_WORDS = (
    "“paper” is what the paper prints: mean ± standard deviation of 3 seeds of the full-size "
    "experiment; it does not say at which stage."
)
OTHERS = ("fedrep", "pfllib")
"""Tables of other people, whose settings are theirs."""
FOUR = ("CIFAR-10 Dir-0.3", "CIFAR-10 Pat-2", "CIFAR-100 Dir-0.3", "CIFAR-100 Pat-10")


@dataclass(frozen=True)
class Item:
    """A table or a figure of the paper."""

    title: str
    kind: Kind
    sweep: str
    """The name of the file with its cells."""
    methods: tuple[str, ...] | None = None
    """Only these of the sweep's methods."""
    cases: tuple[str, ...] | None = None
    """Only these of the sweep's cases, where it has them."""
    note: str = ""
    traits: dict[str, dict[str, str]] | None = None
    """Further columns: title → method → text."""
    printed: str = PAPER_WORDS
    """What the numbers in a column “paper” are."""


_ITEMS = {
    "table1": Item("Test accuracy", "accuracy", "table1"),
    "table2": Item(
        "Rounds to a target accuracy",
        "target",
        "table1",
        methods=PAPER_METHODS,
        cases=FOUR,
    ),
    "table3": Item(
        "Test accuracy with unequal computation",
        "accuracy",
        "table3",
        note="Equal groups of clients train what they send for different numbers of epochs; "
        "phases that train only what is kept are unchanged.",
    ),
    "table4": Item(
        "Partial personalization and directed communication",
        "accuracy",
        "table4",
        traits={
            "partial": {"dfedavgmp": "✓", "dfedpgp": "✓"},
            "directed": {"osgp": "✓", "dfedpgp": "✓"},
        },
    ),
    "table6": Item("Test accuracy (Tiny-ImageNet)", "accuracy", "table6"),
    "table7": Item(
        "Rounds to a target accuracy (Tiny-ImageNet)", "target", "table6", methods=PAPER_METHODS
    ),
    "fig2": Item("Learning curves", "curves", "table1"),
    "fig3a": Item("Number of neighbours", "series", "fig3a"),
    "fig3b": Item(
        "Number of clients",
        "series",
        "fig3b",
        note="The same number of images is split among all clients: the fewer clients, the more "
        "each has.",
    ),
    "fig4": Item("Who holds which classes", "partition", "fig4"),
    "fig5": Item("Learning curves (Tiny-ImageNet)", "curves", "table6"),
    "unreliable": Item(
        "Test accuracy with clients offline and links failing",
        "accuracy",
        "unreliable",
        note="Not in the paper, which gives it as its motivation. A push needs one direction of a "
        "link, an undirected exchange both; the clients are drawn again in every round.",
    ),
    "time": Item(
        "In rounds and without waiting, on equal and unequal devices",
        "series",
        "time",
        note="Not in the paper, whose motivation it is. Seconds are those of the devices; runs in "
        "step have as many rounds as in the other tables, those without waiting 600 seconds.",
    ),
    "graphs": Item(
        "Graphs and the step on z",
        "series",
        "graphs",
        note="Not in the paper. DFedPGP on random_pull and random_regular is its undirected or "
        "pulling version: μ stays 1 there.",
    ),
    "fedrep": Item(
        "Test accuracy in FedRep's setting",
        "accuracy",
        "fedrep",
        note="The setting of Table 1 of FedRep's paper (Collins et al., ICML 2021); its numbers "
        "are the mean of the last ten rounds: --stage mixed --report last10.",
    ),
    "pfllib": Item(
        "Test accuracy in PFLlib's setting",
        "accuracy",
        "pfllib_cifar100",
        note="PFLlib reports the best of 2,000 rounds, after communication.",
        printed="“paper” is what pfllib.com/benchmark.html prints: mean ± standard deviation of "
        "three trials.",
    ),
}
ITEMS = Registry("item of the paper", _ITEMS)


def sweep_file(item: Item, scale: str) -> Path:
    """The file of the item's sweep: a preset, or one in a folder of your own."""
    folder = Path(scale) if _is_folder(scale) else configs_folder() / "sweeps"
    path = folder / f"{item.sweep}.toml"
    if not path.is_file():
        known = ", ".join(sorted(other.stem for other in folder.glob("*.toml"))) or "none"
        raise QuiverError(f"{path}: no such file; the scale {scale!r} has {known}.")
    return path


def scale_section(scale: str) -> str | None:
    """The section of a preset that changes the paper's scale into this one.

    None at the paper's own scale, and in a folder of your own, where a sweep is what it says.
    """
    return None if _is_folder(scale) or scale == FULL_SIZE else scale


def _is_folder(scale: str) -> bool:
    """Whether `scale` is a folder of your own, and not the name of a scale."""
    if os.sep in scale or scale == ".":
        if not Path(scale).is_dir():
            raise QuiverError(f"--scale {scale}: there is no such folder.")
        return True
    known = sorted(path.stem for path in (configs_folder() / "scales").glob("*.toml"))
    if scale not in known:
        raise QuiverError(f"--scale {scale!r}: {suggest(scale, known)} Or a folder: ./{scale}")
    return False


# The cells of an item, and two honest variations: the paper's other graph, equal participation.


def make_item_cells(
    item: Item, scale: str, wanted: Choice, equal_participation: bool = False
) -> list[Cell]:
    """The item's cells: its part of the sweep, unless something else was asked for."""
    cells = load_sweep(sweep_file(item, scale), wanted, scale_section(scale)).cells
    if wanted.methods is None and item.methods is not None:
        cells = tuple(cell for cell in cells if cell.config.method.name in item.methods)
    if wanted.cases is None and item.cases is not None:
        own = tuple(cell for cell in cells if cell.case in item.cases)
        cells = own or cells  # a scale of your own has other cases
    if equal_participation:
        return [equalize_participation(cell) for cell in cells]
    return list(cells)


Directed: TypeAlias = Literal["push", "pull"]
Protocol: TypeAlias = Literal["paper", "tuned"]
"""Which learning rates: the paper's for all methods, or those that `quiver tune` chose."""


def graph_settings(directed: Directed) -> tuple[str, ...]:
    """Settings for a graph: Algorithm 1 pushes; the appendix says the experiments pulled."""
    if directed == "push":
        return ()
    return tuple(f"overrides.{name}.topology.name=random_pull" for name in ("osgp", "dfedpgp"))


def add_notes(item: Item, scale: str, protocol: Protocol | None, equal_participation: bool) -> Item:
    """The item with a title and a note that say how its cells were changed."""
    title, notes = item.title, [item.note]
    if equal_participation:
        title = f"{title}, every client training as often"
        notes.append(
            "Server methods had more rounds, so that every client trains as often under all "
            "methods."
        )
    if scale == "tiny":
        notes.append("A smoke test of the machinery: these numbers mean nothing.")
    if protocol is not None:
        notes.append(PROTOCOL_WORDS[protocol])
    return replace(item, title=title, note=" ".join(filter(None, notes)))


def equalize_participation(cell: Cell) -> Cell:
    """Give a cell more rounds if only some clients train in each, so that all train as often.

    The learning rate decays over the longer run as it did over the shorter one.
    """
    config = cell.config
    clients = config.data.clients
    if clients is None:
        raise QuiverError("--equal participation: set data.clients, to know how many there are.")
    active = int(make_run_topology(config, make_method(config), clients)(0).active.sum())
    factor = max(1, round(clients / max(1, active)))
    if factor == 1:
        return cell
    values = [
        ("run.rounds", config.run.rounds * factor),
        ("run.evaluate_every", config.run.evaluate_every * factor),
        ("training.lr_decay", config.training.lr_decay ** (1 / factor)),
    ]
    return replace(cell, config=config.with_values(values))


# Learning rates.


TUNED_KEYS = ("training.lr", "training.lr_decay", "training.personal_lr", "method.finetune_lr")
"""What is tuned; everything else is the scale's."""

PROTOCOL_WORDS = {
    "paper": "The paper's learning rates for every method: nothing was tuned.",
    "tuned": "Rates tuned with `quiver tune`, on samples set aside from the training data; "
    "methods that were not tuned have the scale's.",
}


def rate_settings(protocol: Protocol | None, scale: str, file: Path | None) -> tuple[str, ...]:
    """The rates as `--set` texts; none where the scale's own are wanted."""
    if file is not None and protocol != "tuned":
        raise QuiverError("--rates FILE goes with --protocol tuned.")
    if protocol is None:
        return ()
    path = configs_folder() / "scales" / f"{FULL_SIZE}.toml" if protocol == "paper" else file
    if path is None:
        path = _tuned_file(scale)
    tree = read_toml(path, f"--rates {path}: there is no such file.")
    chosen = tree.get("overrides", {})
    methods = ("local", *PAPER_METHODS) if protocol == "paper" else tuple(chosen)
    if not methods:
        raise QuiverError(f"{path} has no [overrides.METHOD.training]: `quiver tune` writes them.")
    return tuple(
        f"overrides.{method}.{key}={_format_value(_find_value(tree, chosen.get(method, {}), key))}"
        for method in methods
        for key in TUNED_KEYS
        if key.startswith("training.") or method == "fedbabu"
    )


def _tuned_file(scale: str) -> Path:
    path = configs_folder() / "tuned" / f"{scale}.toml"
    if path.is_file():
        return path
    own = configs_folder() / "scales" / f"{scale}.toml"
    if own.is_file() and "lr" in str(read_toml(own, "").get("overrides", {}).get("fedavg", {})):
        raise QuiverError(
            f"--protocol tuned: the {scale} scale's own rates are tuned; leave it out."
        )
    raise QuiverError(
        f"--protocol tuned: there are no tuned rates for the scale {scale!r}. Choose some with "
        "`quiver tune SWEEP --write FILE`, and give --rates FILE."
    )


def _find_value(tree: Mapping[str, Any], own: Mapping[str, Any], path: str) -> Any:
    """A method's own value, else that of the file's [training]; None where it has none."""
    section, _, key = path.partition(".")
    for sections in (own, tree):
        if key in sections.get(section, {}):
            return sections[section][key]
    return None


def _format_value(value: Any) -> str:
    """Write a value as TOML. Without one the key is left out, so that its default holds."""
    return "" if value is None else json.dumps(value)
