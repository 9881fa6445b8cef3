"""The command line as a person uses it: right, wrong, and read by a machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import quiverfl as qv
from quiverfl.cli.main import app
from quiverfl.methods import METHODS
from quiverfl.runs.config import Config, section_keys
from quiverfl.runs.config_files import load_config
from shell import quiver, started

CONFIG = """
[data]
clients = 6
samples_per_client = 20
[model]
hidden = [8]
[topology]
neighbors = 2
sampled = 2
[training]
lr = 0.05
batch_size = 8
[run]
rounds = 2
threads = 1
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(CONFIG)
    return tmp_path


def test_run_prints_both_stages_and_where_the_folder_is(here: Path) -> None:
    done = started("run", "small.toml", "--out", "out/run", cwd=here)
    assert done.returncode == 0, done.stderr
    assert "stage local: accuracy" in done.stdout
    assert "stage mixed: accuracy" in done.stdout
    assert "out/run" in done.stdout
    assert "round 2/2" in done.stderr  # plain lines: there is no terminal
    again = quiver("run", "small.toml", "--out", "out/run", "--json", cwd=here)
    assert json.loads(again.stdout)["finished"] is True
    assert again.stderr == ""


def test_settings_win_over_the_file_and_name_the_default_folder(here: Path) -> None:
    done = quiver(
        "run", "small.toml", "--set", "method.name=fedavg", "--set", "run.rounds=1", cwd=here
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (here / "runs").iterdir()
    assert folder.name.startswith("small-fedavg-")
    config = json.loads((folder / "config.json").read_text())
    assert config["config"]["run"]["rounds"] == 1
    assert config["topology"]["name"] == "star"


def test_run_says_what_it_took_for_inputs_and_who_is_not_tested(here: Path) -> None:
    """Two of six owners have one row: it is trained on, and no test row is left for them."""
    owners = [f"p{n}" for n in range(4) for _ in range(6)] + ["p4", "p5"]
    rows = [f"{n},{n % 7},{n % 5},{10 + n % 2},{who}" for n, who in enumerate(owners)]
    (here / "patients.csv").write_text("\n".join([",age,dose,label,who", *rows]) + "\n")
    settings = ["name=table", "partition=natural", "samples_per_client=", "options.owner=who"]
    settings += ["options.path=patients.csv"]
    given = [part for text in settings for part in ("--set", f"data.{text}")]
    done = started("run", "small.toml", *given, "--out", "run", "-q", cwd=here)
    assert done.returncode == 0, done.stderr
    assert "2 of 6 clients have no test data and are in no mean." in done.stdout
    notes = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    assert "the inputs are 3 columns, Unnamed: 0, age, dose;" in notes[0]
    assert "the labels 10, 11 are numbered 0 … 1 in this order" in notes[1]
    doubts = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert "column 'Unnamed: 0' looks like a number of the row" in doubts[0]
    assert (len(notes), len(doubts)) == (2, 1)
    everyone = started("run", "small.toml", "--out", "digits", "-q", cwd=here)
    assert "no test data" not in everyone.stdout
    assert everyone.stderr == ""


def test_compare_ends_with_a_table_and_a_report(here: Path) -> None:
    done = quiver(
        "compare", "small.toml", "--methods", "local,dfedpgp", "--seeds", "0,1", "--out", "both",
        cwd=here,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads((here / "both" / "dfedpgp-seed1" / "summary.json").read_text())["finished"]
    assert "DFedPGP" in done.stdout
    assert "both/report.html" in done.stdout
    page = (here / "both" / "report.html").read_text()
    assert "DFedPGP" in page
    assert quiver("report", "both", "--out", "again.html", cwd=here).returncode == 0
    assert (here / "again.html").exists()


def test_compare_over_all_methods(here: Path) -> None:
    done = quiver(
        "compare", "small.toml", "--json", "--out", "all", "--set", "run.rounds=1", cwd=here
    )
    assert done.returncode == 0, done.stderr
    summaries = json.loads(done.stdout)
    assert set(summaries) == set(METHODS)
    assert all(summary["finished"] for summary in summaries.values())
    assert summaries["fedbabu"]["protocol"]["finetune"] == "5 epochs of fine-tuning"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "absent.toml"], "no such configuration file"),
        (["run", "small.toml", "--set", "method.name=dfedpg"], "did you mean 'dfedpgp'"),
        (["run", "small.toml", "--set", "training.lrr=1"], "unknown key training.lrr"),
        (["run", "small.toml", "--set", "topology.neighbors=9"], "neighbors"),
        (["run", "small.toml", "--set", "model.hiden=[3]"], "hiden"),
        (["run", "small.toml", "--set", "model.hidden=64"], "model.hidden = 64: give a list"),
        (
            ["run", "small.toml", "--set", "topology.name=ring", "--set", "topology.neighbors=3"],
            "(`--set topology.neighbors=`",
        ),
        (["run", "small.toml", "--set", "data.clients=5000"], "data.clients"),
        (["run", "small.toml", "--set", "data.name=digit"], "did you mean 'digits'"),
        (["run", "small.toml", "--set", "data.partition=dirichle"], "did you mean 'dirichlet'"),
        (["run", "small.toml", "--set", "run.device=cuda:7"], "device"),
        (["run", "small.toml", "--set", "run.rounds=-3"], "run.rounds = -3"),
        (["run", "small.toml", "--set", "run.threads=0"], "run.threads = 0"),
        (["run", "small.toml", "--out", "small.toml"], "is a file"),
        (["compare", "small.toml", "--methods", "local,fedavgg"], "did you mean 'fedavg'"),
        (["compare", "small.toml", "--seeds", "one"], "whole numbers"),
        (["resume", "nowhere"], "not a run folder"),
        (["report", "nowhere"], "nowhere"),
        (["topology", "show", "rng"], "ring"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence_and_exit_2(here: Path, arguments: list[str], words: str) -> None:
    done = quiver(*arguments, cwd=here)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (here / "runs").exists()


def test_a_mistake_ends_a_process_in_the_same_way(here: Path) -> None:
    done = started("run", "small.toml", "--set", "training.lrr=1", cwd=here)
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown key training.lrr" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_diverging_run_exits_3_and_names_round_and_client(here: Path) -> None:
    done = quiver(
        "run", "small.toml", "--set", "training.lr=1e6", "--set", "training.weight_decay=1",
        "--set", "run.rounds=30", "--out", "wild", cwd=here,
    )  # fmt: skip
    assert done.returncode == 3
    assert "diverged" in done.stderr
    assert "client" in done.stderr
    assert (here / "wild" / "rounds.jsonl").exists()


def test_one_diverging_method_does_not_take_the_others_along(here: Path) -> None:
    with (here / "small.toml").open("a") as file:
        file.write("[overrides.fedavg.training]\nlr = 1e6\nweight_decay = 1.0\nmomentum = 0.9\n")
    done = quiver(
        "compare", "small.toml", "--methods", "fedavg,dfedpgp", "--out", "both",
        "--set", "run.rounds=30", cwd=here,
    )  # fmt: skip
    assert done.returncode == 3
    assert "DFedPGP" in done.stdout
    assert json.loads((here / "both" / "dfedpgp" / "summary.json").read_text())["finished"]


def test_event_files_on_request(here: Path) -> None:
    done = quiver("run", "small.toml", "--out", "run", "--tensorboard", "--quiet", cwd=here)
    assert done.returncode == 0, done.stderr
    assert list((here / "run" / "tensorboard").rglob("events.out.*"))


def test_lists_for_people_and_machines(here: Path) -> None:
    methods = json.loads(quiver("methods", "--json", cwd=here).stdout)
    assert len(methods) == len(METHODS)
    assert {row["name"]: row["topology"] for row in methods}["dfedpgp"] == "random_push"
    for command in ("methods", "topologies", "data"):
        done = quiver(command, cwd=here)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) > 5


def test_the_reference_names_every_key_there_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "configuration.md").read_text()
    for name in Config.model_fields:
        assert f"`[{name}" in page
        for key in section_keys(name) if name != "overrides" else ():
            assert f"`{key}`" in page, f"{name}.{key}"


def test_a_key_of_the_file_can_be_taken_out(here: Path) -> None:
    values = ["topology.name=ring", *(f"topology.{key}=" for key in ("neighbors", "sampled"))]
    config = load_config(here / "small.toml", values)
    assert config.topology.options() == {}
    assert load_config(here / "small.toml", ["training.lr="]).training.lr == 0.1


def test_the_version_is_said() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"quiver {qv.__version__}\n"
