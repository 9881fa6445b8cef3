"""A topology of one's own, `module:function`, is used wherever a name is."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from quiverfl.cli.main import app
from quiverfl.errors import QuiverError
from quiverfl.runs.config import parse_config
from quiverfl.support.references import hash_source
from quiverfl.topologies import make_topology, ring

CODE = '''
import numpy as np
import quiverfl as qv


def pairs(clients, seed, width=1):
    """In every round everybody averages with the client `width` further on."""
    def weights(round):
        further = np.roll(np.eye(clients), width + (seed + round) % 2, axis=1)
        return (np.eye(clients) + further) / 2
    return weights


def circle(clients):
    return qv.ring(clients)


def anything(**options):
    return qv.ring(options["clients"])


def too_few(clients):
    return qv.ring(3)


def matrix(clients):
    return np.eye(clients)


def broken(clients):
    return 1 / 0


def alone():
    return qv.ring(4)


def strict(clients, radius):
    return qv.ring(clients)


def needy(clients, neighbors=1):
    """Everybody sends to those who said that their loss is highest."""
    def weights(round, view):
        loss = np.where(np.eye(clients, dtype=bool), -1, np.nan_to_num(view.loss))
        chosen = np.argsort(-loss, axis=1, kind="stable")[:, :neighbors]
        mass = np.eye(clients)
        for sender, receivers in enumerate(chosen):
            mass[receivers, sender] = 1
        return mass / (neighbors + 1)
    return qv.custom(weights, clients, reports=qv.ReportSpec(loss=True))


def silent(clients):
    return lambda round, view: np.eye(clients)
'''
CONFIG = """
[data]
clients = 4
samples_per_client = 12
[model]
hidden = [4]
[topology]
name = "my_graphs:pairs"
width = 2
[run]
rounds = 2
threads = 1
"""
SWEEP = """
base = "run.toml"
methods = ["dfedpgp", "dfedavgm"]
[grid]
topology.width = [1, 2]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_graphs.py").write_text(CODE)
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "sweep.toml").write_text(SWEEP)
    yield tmp_path
    forget()


def forget() -> None:
    """As in a new process."""
    sys.modules.pop("my_graphs", None)
    hash_source.cache_clear()


def quiver(*words: str) -> Any:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result


@pytest.mark.usefixtures("here")
def test_it_is_called_with_clients_seed_and_options_and_keeps_its_name() -> None:
    made = make_topology("my_graphs:pairs", 5, seed=1, width=2)
    assert (made.name, made.clients) == ("my_graphs:pairs", 5)
    assert made.options == {"seed": 1, "width": 2}
    assert np.array_equal(made(0).weights, (np.eye(5) + np.roll(np.eye(5), 3, axis=1)) / 2)
    assert make_topology("my_graphs:pairs", 5).options == {"seed": 0}
    circle = make_topology("my_graphs:circle", 5)
    assert (circle.name, circle.options) == ("my_graphs:circle", {})
    assert np.array_equal(circle(3).weights, ring(5)(3).weights)
    assert make_topology("my_graphs:anything", 5, whatever=1).options == {"whatever": 1}
    assert make_topology("my_graphs:pairs", 10, participation=0.5)(0).active.sum() == 5


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("pairs", {"widht": 1}, "has no option 'widht': did you mean 'width'"),
        ("strict", {}, "needs the option 'radius'"),
        ("alone", {}, r"does not take the number of clients: write def alone\(clients"),
        ("too_few", {}, "a graph of 3 clients where 5 were asked for"),
        ("matrix", {}, "returned a ndarray: return a Topology, such as from_matrix"),
        ("broken", {}, r"failed \(my_graphs.py, line 31\): ZeroDivisionError: division"),
        ("piars", {}, "did you mean 'pairs'"),
        ("silent", {}, r"custom\(function, clients, reports=ReportSpec\(loss=True\)\)"),
    ],
)
def test_what_it_does_wrong_is_one_sentence(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(QuiverError, match=words):
        make_topology(f"my_graphs:{name}", 5, **options)


@pytest.mark.usefixtures("here")
def test_a_configuration_that_names_one_that_is_not_there_is_refused() -> None:
    parse_config({"topology": {"name": "my_graphs:pairs"}})
    for name in ("my_graphs:piars", "nowhere:make"):
        with pytest.raises(QuiverError, match=f"^configuration: topology.name = '{name}': "):
            parse_config({"topology": {"name": name}})
    with pytest.raises(QuiverError, match=r"'rign': unknown topology; did you mean 'ring'.*Your"):
        parse_config({"topology": {"name": "rign"}})


def test_runs_comparisons_and_reports_name_it(here: Path) -> None:
    quiver("run", "run.toml", "--out", "one", "-q")
    written = json.loads((here / "one" / "config.json").read_text())
    assert written["topology"] == {"name": "my_graphs:pairs", "width": 2, "seed": 0}
    assert "code of my_graphs:pairs" in written["inputs"]
    quiver("compare", "run.toml", "--methods", "local,dfedpgp", "--out", "two", "-q")
    page = (here / "two" / "report.html").read_text()
    assert "my_graphs:pairs (width 2)" in page
    assert "quiver topology show my_graphs:pairs --picture" in page


def test_a_report_runs_no_code_that_a_folder_names(here: Path) -> None:
    quiver("run", "run.toml", "--out", "one", "-q")
    forget()
    (here / "my_graphs.py").write_text("raise SystemExit('it was run')")
    quiver("report", "one")


def test_a_run_is_not_continued_once_its_code_was_changed(here: Path) -> None:
    quiver("run", "run.toml", "--out", "one", "-q")
    (here / "my_graphs.py").write_text(CODE + "\n# another word\n")
    forget()
    again = CliRunner().invoke(app, ["run", "run.toml", "--out", "one", "-q"])
    assert "another code of my_graphs:pairs: it was changed" in str(again.exception)


def test_a_sweep_over_its_options(here: Path) -> None:
    result = quiver("sweep", "sweep.toml", "--out", "cells", "--jobs", "1", "-q")
    for label in ("DFedPGP (width 1)", "DFedPGP (width 2)", "DFedAvgM (width 1)"):
        assert label in result.output


@pytest.mark.usefixtures("here")
def test_it_is_measured_before_training() -> None:
    shown = ["topology", "show", "my_graphs:pairs", "--clients", "6", "--set", "width=2"]
    report = json.loads(quiver(*shown, "--json").output)
    assert (report["name"], report["options"]) == ("my_graphs:pairs", {"seed": 0, "width": 2})
    wrong = CliRunner().invoke(app, [*shown, "--set", "width"])
    assert "--set 'width': write option=value." in str(wrong.exception)


def test_one_that_looks_runs_and_resumes(here: Path) -> None:
    config = CONFIG.replace("pairs", "needy").replace("width = 2", "neighbors = 2")
    (here / "run.toml").write_text(config.replace("rounds = 2", "rounds = 4"))
    quiver("run", "run.toml", "--out", "one", "-q")
    written = [json.loads(line) for line in (here / "one" / "rounds.jsonl").open()]
    assert written[0]["links"] == "1 2;0 2;0 1;0 1"  # nothing was told: the first ones
    assert len({line["links"] for line in written}) > 1
    (here / "run.toml").write_text(config)
    quiver("run", "run.toml", "--out", "two", "-q")
    quiver("extend", "two", "--rounds", "4", "-q")
    assert (here / "one" / "history.jsonl").read_bytes() == (
        here / "two" / "history.jsonl"
    ).read_bytes()
    shown = quiver("topology", "show", "one", "--json")
    assert json.loads(shown.output)["clients"] == 4
