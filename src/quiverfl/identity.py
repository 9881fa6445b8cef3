"""Which keys of a configuration make an experiment, and which only say how it is carried out.

Everything here works on plain trees {section: {key: value}}, as they are written into run folders,
so that folders, sweeps and reports go by one rule.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

Tree = Mapping[str, Any]
Settings = dict[str, dict[str, Any]]

SCHEMA = 1
"""Version of the identities in config.json. Raise it when a default of a configuration changes:
an identity covers the values that differ from their defaults."""

RUNTIME = frozenset(
    f"run.{key}"
    for key in (
        *("device", "threads", "executor", "compile", "states", "arithmetic"),
        *("checkpoint_every", "gradients", "keep_local", "chunk"),
    )
) | {"data.root", "data.mapped"}
"""How and where a run is carried out and how closely it is watched: results differ by rounding at
most, and the same files may lie elsewhere. `run.evaluate_every` decides what is recorded."""

NO_RESULT = ("overrides", "track")
"""Sections that decide nothing: overrides are in what they override, trackers only look on."""

SEEDS = frozenset(f"{section}.seed" for section in ("run", "data", "topology")) | {
    "topology.participation_seed",
    "topology.link_failure_seed",
}
"""Another one makes another run of the same experiment. The last two are written, never
configured."""


def select_run_settings(tree: Tree) -> Settings:
    """What decides what a run computes and records. Overrides are already in what they override."""
    return _without(tree, RUNTIME)


def select_experiment_settings(tree: Tree) -> Settings:
    """What the runs of one experiment have in common, whatever their seeds."""
    return _without(tree, RUNTIME | SEEDS)


def hash_settings(settings: Settings) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def flatten_settings(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as `section.key`."""
    pairs: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            pairs.update(flatten_settings(value, f"{prefix}{key}."))
        else:
            pairs[f"{prefix}{key}"] = value
    return pairs


def _without(tree: Tree, left_out: frozenset[str] | set[str]) -> Settings:
    sections = {
        section: {key: v for key, v in values.items() if f"{section}.{key}" not in left_out}
        for section, values in tree.items()
        if section not in NO_RESULT and isinstance(values, Mapping)
    }
    return {section: values for section, values in sections.items() if values}
