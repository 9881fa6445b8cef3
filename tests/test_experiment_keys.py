"""What makes an experiment, what makes a run of it, and what changes neither."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import Any

import pytest
from pydantic import create_model

from quiverfl.engine.settings import RunSettings
from quiverfl.identity import RUNTIME
from quiverfl.runs.config import Config, parse_config

BASE = {"data": {"clients": 6}, "training": {"lr": 0.05}, "topology": {"neighbors": 2}}


def changed(key: str, value: Any) -> Config:
    return parse_config(BASE).with_values([(key, value)])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.device", "cuda"),
        ("run.threads", 3),
        ("run.executor", "sequential"),
        ("run.arithmetic", "peers"),
        ("run.checkpoint_every", 2),
        ("run.gradients", True),
        ("run.keep_local", False),
        ("data.root", "/elsewhere"),
        ("overrides.fedavg.training.lr", 0.5),
    ],
)
def test_how_and_where_it_is_carried_out_changes_nothing(key: str, value: Any) -> None:
    base, other = parse_config(BASE), changed(key, value)
    assert (other.experiment(), other.identity()) == (base.experiment(), base.identity())
    assert key in RUNTIME or key.startswith("overrides.")


@pytest.mark.parametrize("key", ["run.seed", "data.seed", "topology.seed"])
def test_a_seed_makes_another_run_of_the_same_experiment(key: str) -> None:
    assert changed(key, 7).experiment() == parse_config(BASE).experiment()
    assert changed(key, 7).identity() != parse_config(BASE).identity()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.evaluate_every", 5),
        ("run.rounds", 7),
        ("training.lr", 0.1),
        ("method.shared_epochs", 2),
        ("method.name", "fedavg"),
        ("topology.neighbors", 3),
        ("data.clients", 20),
        ("model.hidden", [5]),
    ],
)
def test_everything_else_makes_another_experiment(key: str, value: Any) -> None:
    assert changed(key, value).experiment() != parse_config(BASE).experiment()
    assert changed(key, value).identity() != parse_config(BASE).identity()


def test_a_default_written_out_is_the_same_experiment() -> None:
    base = parse_config(BASE)
    assert parse_config(base.model_dump(mode="json")).identity() == base.identity()
    assert changed("run.rounds", 20).experiment() == base.experiment()


def test_a_key_that_a_later_version_adds_changes_no_identity() -> None:
    run = make_dataclass("Later", [("warmup", int, 0)], bases=(RunSettings,), frozen=True)
    later = create_model("Config", __base__=Config, run=(run, run()))
    tree = {**BASE, "run": {"seed": 3, "rounds": 5}}
    assert later.model_validate(tree).identity() == parse_config(tree).identity()
    assert later.model_validate(tree).experiment() == parse_config(tree).experiment()
    warm = {**tree, "run": {**tree["run"], "warmup": 2}}
    assert later.model_validate(warm).experiment() != parse_config(tree).experiment()


def test_identities_stay_what_they_were() -> None:
    """Written into folders and their names: a change here is a change of SCHEMA."""
    config = parse_config({**BASE, "run": {"seed": 3}})
    assert config.experiment() == EXPERIMENT
    assert config.identity() == IDENTITY


EXPERIMENT = "e4cceaa09db11bdae983e002a91fe5595c307485222d888ea518347d02858607"
IDENTITY = "e6386c34170add54118f7e8057b9229103b8e94ff9c0ed3497321a24ee4e66e2"


def test_a_graph_by_its_name_takes_no_options_that_were_for_the_usual_ones() -> None:
    base = parse_config({"topology": {"neighbors": 3, "sampled": 2, "participation": 0.5}})
    ring = base.with_values([("topology.name", "ring")]).topology
    assert (ring.name, ring.options()) == ("ring", {"participation": 0.5})
    push = base.with_values([("topology.name", "random_push")]).topology
    assert push.options() == {"neighbors": 3, "participation": 0.5}
    # What is set beside the name, before or behind it, is never left out.
    for values in ([("topology.neighbors", 4)], [("topology.sampled", 4)]):
        given = base.with_values([*values, ("topology.name", "ring")]).topology
        assert given.options() == {values[0][0].partition(".")[2]: 4, "participation": 0.5}
    named = parse_config({"topology": {"name": "random_push", "neighbors": 3}})
    assert named.with_values([("topology.name", "ring")]).topology.options() == {"neighbors": 3}
    method = base.with_values([("method.proximal", 0.3), ("method.name", "fedprox")]).method
    assert method.options() == {"proximal": 0.3}
