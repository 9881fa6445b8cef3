"""Whose learning rates: the paper's for everybody, or those that `quiver tune` chose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from quiverfl.bundled import configs
from quiverfl.config import read_toml
from quiverfl.errors import QuiverError
from quiverfl.paper.reproduce.catalogue import BASELINES, FULL_SIZE, Item

Protocol: TypeAlias = Literal["paper", "tuned"]

KEYS = ("training.lr", "training.lr_decay", "training.personal_lr", "method.finetune_lr")
"""What is tuned; everything else is the scale's."""

WORDS = {
    "paper": "The paper's learning rates for every method: nothing was tuned.",
    "tuned": "Rates tuned with `quiver tune`, on samples set aside from the training data; "
    "methods that were not tuned have the scale's.",
}


def rate_settings(protocol: Protocol | None, scale: str, file: Path | None) -> tuple[str, ...]:
    """As `--set` texts; nothing where the scale's own rates are wanted."""
    if file is not None and protocol != "tuned":
        raise QuiverError("--rates FILE goes with --protocol tuned.")
    if protocol is None:
        return ()
    path = configs() / "scales" / f"{FULL_SIZE}.toml" if protocol == "paper" else file
    if path is None:
        path = _tuned_file(scale)
    tree = read_toml(path, f"--rates {path}: there is no such file.")
    chosen = tree.get("overrides", {})
    methods = ("local", *BASELINES) if protocol == "paper" else tuple(chosen)
    if not methods:
        raise QuiverError(f"{path} has no [overrides.METHOD.training]: `quiver tune` writes them.")
    return tuple(
        f"overrides.{method}.{key}={_text(_value(tree, chosen.get(method, {}), key))}"
        for method in methods
        for key in KEYS
        if key.startswith("training.") or method == "fedbabu"
    )


def named(item: Item, protocol: Protocol | None) -> Item:
    """The item with a note on whose rates they are."""
    if protocol is None:
        return item
    return replace(item, note=f"{item.note} {WORDS[protocol]}".strip())


def _tuned_file(scale: str) -> Path:
    path = configs() / "tuned" / f"{scale}.toml"
    if path.is_file():
        return path
    own = configs() / "scales" / f"{scale}.toml"
    if own.is_file() and "lr" in str(read_toml(own, "").get("overrides", {}).get("fedavg", {})):
        raise QuiverError(
            f"--protocol tuned: the {scale} scale's own rates are tuned; leave it out."
        )
    raise QuiverError(
        f"--protocol tuned: there are no tuned rates for the scale {scale!r}. Choose some with "
        "`quiver tune SWEEP --write FILE`, and give --rates FILE."
    )


def _value(tree: Mapping[str, Any], own: Mapping[str, Any], path: str) -> Any:
    """A method's own value, else that of the file's [training]; None where it has none."""
    section, _, key = path.partition(".")
    for sections in (own, tree):
        if key in sections.get(section, {}):
            return sections[section][key]
    return None


def _text(value: Any) -> str:
    """Without a value the key is taken out, so that its default holds."""
    return "" if value is None else json.dumps(value)
