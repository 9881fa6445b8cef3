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
"""Of the identities in config.json. Raise it when a default of a configuration changes: identities
are taken over the values that differ from their defaults. Folders of version 0.1 have none."""

RUNTIME = frozenset(
    f"run.{key}"
    for key in (
        *("device", "threads", "executor", "compile", "states", "arithmetic"),
        *("checkpoint_every", "gradients", "keep_local"),
    )
) | {"data.root", "data.mapped"}
"""How and where a run is carried out and how closely it is watched: results differ by rounding at
most, and the same files may lie elsewhere. `run.evaluate_every` decides what is recorded."""

SEEDS = frozenset(f"{section}.seed" for section in ("run", "data", "topology")) | {
    "topology.participation_seed",
    "topology.link_failure_seed",
}
"""Another one makes another run of the same experiment. The last two are written, never
configured."""


def run_settings(tree: Tree) -> Settings:
    """What decides what a run computes and records. Overrides are already in what they override."""
    return _without(tree, RUNTIME)


def experiment_settings(tree: Tree) -> Settings:
    """What the runs of one experiment have in common, whatever their seeds."""
    return _without(tree, RUNTIME | SEEDS)


def digest(settings: Settings) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def first_identity(tree: Tree) -> str:
    """The identity that version 0.1 wrote for a whole tree, by the rule it had then."""
    then = {"run.device", "run.threads", "run.checkpoint_every", "run.gradients", "data.root"}
    return digest(_without(tree, then))


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as `section.key`."""
    pairs: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            pairs.update(flat(value, f"{prefix}{key}."))
        else:
            pairs[f"{prefix}{key}"] = value
    return pairs


def _without(tree: Tree, left_out: frozenset[str] | set[str]) -> Settings:
    sections = {
        section: {key: v for key, v in values.items() if f"{section}.{key}" not in left_out}
        for section, values in tree.items()
        if section != "overrides" and isinstance(values, Mapping)
    }
    return {section: values for section, values in sections.items() if values}
