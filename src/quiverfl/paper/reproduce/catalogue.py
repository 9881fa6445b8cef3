"""What the paper shows, by name: the cells each table and figure needs and how it is laid out."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from quiverfl.bundled import configs
from quiverfl.errors import QuiverError, nearest

Kind: TypeAlias = Literal["accuracy", "target", "curves", "series", "partition"]
"""accuracy: methods × cases. target: rounds until an accuracy. curves: one panel per case.
series: one curve per case. partition: heat-maps, nothing is trained."""

FULL_SIZE = "paper"
BASELINES = (
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
FOUR = ("CIFAR-10 Dir-0.3", "CIFAR-10 Pat-2", "CIFAR-100 Dir-0.3", "CIFAR-100 Pat-10")


@dataclass(frozen=True)
class Item:
    """A table or a figure of the paper."""

    title: str
    kind: Kind
    sweep: str
    """The file with its cells."""
    methods: tuple[str, ...] | None = None
    """Only these of the sweep's methods."""
    cases: tuple[str, ...] | None = None
    """Only these of the sweep's cases, where it has them."""
    note: str = ""
    traits: dict[str, dict[str, str]] | None = None
    """Further columns: title → method → text."""


ITEMS = {
    "table1": Item("Test accuracy", "accuracy", "table1"),
    "table2": Item(
        "Rounds to a target accuracy",
        "target",
        "table1",
        methods=BASELINES,
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
        "Rounds to a target accuracy (Tiny-ImageNet)", "target", "table6", methods=BASELINES
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
}


def find_item(name: str) -> Item:
    if name not in ITEMS:
        raise QuiverError(f"{name!r} is not one of the paper's; {nearest(name, ITEMS)}")
    return ITEMS[name]


def sweep_file(item: Item, scale: str) -> Path:
    """The item's sweep: the preset's, or that in a folder of your own."""
    folder = Path(scale) if _is_folder(scale) else configs() / "sweeps"
    path = folder / f"{item.sweep}.toml"
    if not path.is_file():
        raise QuiverError(
            f"{path}: no such file; the scale {scale!r} has {_listed(folder, '*.toml')}."
        )
    return path


def section(scale: str) -> str | None:
    """The section of the item's sweep: the presets are the paper's but for what other scales have.

    In a folder of your own, too, a sweep is what it says.
    """
    return None if _is_folder(scale) or scale == FULL_SIZE else scale


def _is_folder(scale: str) -> bool:
    """Whether it is a folder of your own, and not the name of a scale."""
    if os.sep in scale or scale == ".":
        if not Path(scale).is_dir():
            raise QuiverError(f"--scale {scale}: there is no such folder.")
        return True
    known = sorted(path.stem for path in (configs() / "scales").glob("*.toml"))
    if scale not in known:
        raise QuiverError(f"--scale {scale!r}: {nearest(scale, known)} Or a folder: ./{scale}")
    return False


def _listed(folder: Path, pattern: str) -> str:
    return ", ".join(sorted(path.stem for path in folder.glob(pattern))) or "none"
