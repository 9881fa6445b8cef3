"""Commands write into new folders, empty ones and their own; what is another's is left as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import quiverfl as qv
from quiverfl.support.output_folders import describe_contents, list_contents
from run_folders import Recipe, write_comparison, write_json, write_run
from shell import quiver

CONFIG = """
[data]
clients = 4
samples_per_client = 10
[model]
hidden = [4]
[topology]
neighbors = 1
[training]
lr = 0.05
batch_size = 8
[run]
rounds = 1
threads = 1
"""
SWEEP = """
base = "small.toml"
methods = ["local"]
seeds = [0]
"""


@pytest.mark.parametrize("format", ["svg", "png"])
def test_a_picture_replaces_pictures_only(tmp_path: Path, format: str) -> None:
    target = tmp_path / f"p.{format}"
    words = (
        "topology",
        "show",
        "ring",
        "--clients",
        "4",
        "--rounds",
        "2",
        "--picture",
        str(target),
    )
    for _ in range(2):
        assert quiver(*words, cwd=tmp_path).returncode == 0
    target.write_text("precious")
    refused = quiver(*words, cwd=tmp_path)
    assert refused.returncode == 2
    assert "is not one that this command wrote" in " ".join(refused.stderr.split())
    assert target.read_text() == "precious"


TRIES = """
[grid]
training.lr = [0.1]
data.validation = [0.2]
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(CONFIG)
    (tmp_path / "plan.toml").write_text(SWEEP)
    (tmp_path / "tries.toml").write_text(SWEEP + TRIES)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("years of work")
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def compare(here: Path, methods: str, *words: str) -> tuple[int, str]:
    done = quiver("compare", "small.toml", "--methods", methods, *words, "-q", cwd=here)
    return done.returncode, done.stderr


WRITERS = {
    "run": ("run", "small.toml", "--out"),
    "compare": ("compare", "small.toml", "--methods", "local", "--out"),
    "sweep": ("sweep", "plan.toml", "--no-estimate", "--out"),
    "tune": ("tune", "tries.toml", "--no-estimate", "--out"),
    "reproduce": ("reproduce", "table1", "--scale", "tiny", "--no-estimate", "--out"),
    "reproduce a partition": ("reproduce", "fig4", "--scale", "tiny", "--out"),
    "theory": ("theory", "--quick", "--out"),
    "peer demo": ("peer", "demo", "--out"),
    "peer certs init": ("peer", "certs", "init", "--run", "x", "--peer", "a=127.0.0.1:1"),
}


@pytest.mark.parametrize("words", WRITERS.values(), ids=WRITERS)
def test_a_foreign_folder_is_refused_by_every_command(here: Path, words: tuple[str, ...]) -> None:
    done = quiver(*words, "foreign", cwd=here)
    assert done.returncode == 2, done.stdout
    assert "foreign" in done.stderr
    assert "another" in done.stderr or "new folder" in done.stderr
    assert "Traceback" not in done.stderr
    assert files(here / "foreign") == {"notes.txt": b"years of work"}


@pytest.mark.parametrize("words", WRITERS.values(), ids=WRITERS)
def test_the_folder_of_another_run_is_refused_by_every_command(
    here: Path, words: tuple[str, ...]
) -> None:
    before = files(write_run(here / "theirs", Recipe(rounds=2, clients=3)))
    done = quiver(*words, "theirs", cwd=here)
    assert done.returncode == 2, done.stdout
    assert "theirs" in done.stderr
    assert "Traceback" not in done.stderr
    assert files(here / "theirs") == before


def test_the_sentence_names_the_folder_what_is_there_and_the_remedy(here: Path) -> None:
    for name in ("a", "b", "c"):
        (here / "foreign" / name).write_text("")
    _, said = compare(here, "local", "--out", "foreign")
    assert said.strip() == (
        "error: foreign holds a, b, c and 1 more, and nothing is written beside that: choose "
        "another --out, or move away what is there."
    )


def test_what_is_in_a_folder_in_words(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Recipe(rounds=2, clients=3))
    assert describe_contents(run) == "a run"
    write_comparison(tmp_path / "several", rounds=2, clients=3)
    assert describe_contents(tmp_path / "several") == "other runs"
    (tmp_path / "sweep").mkdir()
    (tmp_path / "several").rename(tmp_path / "sweep" / "cells")
    assert describe_contents(tmp_path / "sweep") == "the cells of a sweep"
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "peer.toml").touch()
    assert describe_contents(tmp_path / "peer") == "a peer"
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "config.json").write_text('{"name": "of another program"}')
    (tmp_path / "web" / ".lock").touch()
    (tmp_path / "web" / "empty").mkdir()
    assert describe_contents(tmp_path / "web") == "config.json"
    assert list_contents(tmp_path / "none") == []


def test_a_comparison_is_continued_and_gets_further_methods_and_seeds(here: Path) -> None:
    assert compare(here, "local", "--out", "both") == (0, "")
    (here / "both" / "notes.txt").write_text("mine")
    first = files(here / "both" / "local")
    assert compare(here, "local,dfedpgp", "--out", "both") == (0, "")
    assert compare(here, "fedavg", "--out", "both") == (0, "")
    assert compare(here, "fedavg", "--seeds", "1,2", "--out", "both") == (0, "")
    assert files(here / "both" / "local") == first
    assert list_contents(here / "both") == [
        *("dfedpgp", "fedavg", "fedavg-seed1", "fedavg-seed2", "local", "notes.txt", "report.html")
    ]


def test_a_comparison_that_was_killed_at_its_beginning_is_begun_again(here: Path) -> None:
    (here / "both" / "local").mkdir(parents=True)
    (here / "both" / ".lock").touch()
    (here / "both" / "local" / ".lock").touch()
    assert compare(here, "local", "--out", "both") == (0, "")


def test_runs_of_another_comparison_are_refused_before_anything_is_computed(here: Path) -> None:
    other = ("--set", "training.lr=0.01")
    assert compare(here, "fedavg", "--out", "both", *other) == (0, "")
    before = files(here / "both")
    code, said = compare(here, "local,fedavg", "--out", "both")
    assert code == 2
    assert "holds a run of another configuration" in said
    code, said = compare(here, "local", "--out", "both")
    assert code == 2
    assert "both holds other runs" in said
    assert files(here / "both") == before
    (here / "new" / "local").mkdir(parents=True)
    (here / "new" / "local" / "data.csv").write_text("mine")
    code, said = compare(here, "dfedpgp,local", "--out", "new")
    assert code == 2
    assert "holds data.csv" in said
    assert not (here / "new" / "dfedpgp").exists()


def test_comparisons_in_python_go_by_the_same_rule(here: Path) -> None:
    config = here / "small.toml"
    with pytest.raises(qv.QuiverError, match=r"foreign holds notes\.txt"):
        qv.compare(config, methods=["local"], folder=here / "foreign")
    with pytest.raises(qv.QuiverError, match=r"foreign holds notes\.txt"):
        qv.sweep(here / "plan.toml", here / "foreign", dry_run=True)
    first = qv.compare(config, methods=["local"], folder=here / "both")
    again = qv.compare(config, methods=["local"], folder=here / "both")
    assert again.runs["local"].summary == first.runs["local"].summary
    assert compare(here, "local,fedavg", "--out", "both") == (0, "")


def test_a_comparison_in_python_is_alone_in_its_folder(here: Path) -> None:
    from quiverfl.support import locks

    with locks.lock_folder(here / "both"), pytest.raises(qv.QuiverError, match="is in use"):
        qv.compare(here / "small.toml", methods=["local"], folder=here / "both")


def test_sweeps_share_a_folder_of_runs_and_of_comparisons(here: Path) -> None:
    write_run(here / "runs" / "one", Recipe(rounds=2, clients=3))
    write_comparison(here / "others" / "both", rounds=2, clients=3)
    (here / "others" / "both" / "report.html").touch()
    for folder in ("runs", "others", "runs"):  # the last time resumes
        done = quiver("sweep", "plan.toml", "--no-estimate", "-q", "--out", folder, cwd=here)
        assert done.returncode == 0, done.stderr
        assert len(list_contents(here / folder / "cells")) == 1


def test_a_sweep_that_was_killed_at_its_beginning_is_begun_again(here: Path) -> None:
    for name in ("cells", "logs"):
        (here / "runs" / name).mkdir(parents=True)
    (here / "runs" / "logs" / "of-a-cell.log").touch()
    done = quiver("sweep", "plan.toml", "--dry-run", "--no-estimate", "--out", "runs", cwd=here)
    assert done.returncode == 0, done.stderr


def test_a_sweep_writes_its_tables_into_no_run_of_its_name(here: Path) -> None:
    before = files(write_run(here / "runs" / "plan", Recipe(rounds=2, clients=3)))
    done = quiver("sweep", "plan.toml", "--no-estimate", "--out", "runs", cwd=here)
    assert done.returncode == 2
    assert "plan holds a run" in done.stderr
    assert files(here / "runs" / "plan") == before
    assert list_contents(here / "runs") == ["plan"]


def test_a_project_is_not_begun_among_runs(here: Path) -> None:
    write_run(here / "runs" / "one", Recipe(rounds=2, clients=3))
    (here / "peer").mkdir()
    (here / "peer" / "peer.toml").touch()
    for folder, words in (("runs/one", "a run"), ("runs", "other runs"), ("peer", "a peer")):
        done = quiver("init", folder, cwd=here)
        assert done.returncode == 2
        assert f"{folder} holds {words}" in done.stderr
        assert "choose another folder" in done.stderr
    assert quiver("init", "foreign", cwd=here).returncode == 0  # beside one's own files


def make_keys(here: Path) -> list[str]:
    peers = [word for n in "abcd" for word in ("--peer", f"{n}=127.0.0.1:741{ord(n) - 96}")]
    made = quiver("peer", "certs", "init", "ca", "--run", "x", *peers, cwd=here)
    assert made.returncode == 0, made.stderr
    return ["--config", "small.toml", "--roster", "ca/roster.toml", "--keys", "ca/a"]


def test_a_peer_is_made_in_a_folder_of_its_own(here: Path) -> None:
    common = make_keys(here)
    before = files(here / "foreign")
    done = quiver("peer", "init", "foreign", *common, cwd=here)
    assert done.returncode == 2
    assert "foreign holds notes.txt" in done.stderr
    assert files(here / "foreign") == before
    (here / "mine").mkdir()
    (here / "mine" / "run.toml").write_text("# of another run")
    done = quiver("peer", "init", "mine", *common, cwd=here)
    assert done.returncode == 2
    assert "mine/run.toml is there already, and is not small.toml" in done.stderr
    assert files(here / "mine") == {"run.toml": b"# of another run"}
    (here / "mine" / "run.toml").write_text(CONFIG)
    assert quiver("peer", "init", "mine", *common, cwd=here).returncode == 0


@pytest.fixture
def run(here: Path) -> Path:
    done = quiver("run", "small.toml", "--out", "run", "-q", cwd=here)
    assert done.returncode == 0, done.stderr
    return here / "run"


def test_an_export_replaces_exports_alone(here: Path, run: Path) -> None:
    before = files(run)
    for name, taken in (("run/config", "config.json"), ("x", "x.safetensors")):
        (here / "x.safetensors").write_text("mine")
        done = quiver("export", "run", "--out", f"{name}.safetensors", cwd=here)
        assert done.returncode == 2, done.stdout
        assert f"{taken} is there already and is not of an earlier export" in done.stderr
    assert files(run) == before
    assert (here / "x.safetensors").read_text() == "mine"
    for _ in range(2):
        assert quiver("export", "run", "--out", "y.safetensors", cwd=here).returncode == 0


@pytest.mark.parametrize("kind", [".md", ".csv", ".tex"])
def test_a_table_replaces_tables_alone(here: Path, run: Path, kind: str) -> None:
    words = ("report", "run", "--table", f"t{kind}", "--out", "page.html")
    for _ in range(2):
        assert quiver(*words, cwd=here).returncode == 0
    (here / f"t{kind}").write_text("years of work")
    (here / "page.html").unlink()
    done = quiver(*words, cwd=here)
    assert done.returncode == 2
    assert f"t{kind}: the file is there already" in done.stderr
    assert (here / f"t{kind}").read_text() == "years of work"
    assert not (here / "page.html").exists()


def test_tuned_rates_replace_no_configuration(here: Path) -> None:
    words = ("tune", "tries.toml", "--no-estimate", "--out", "runs", "--write")
    done = quiver(*words, "small.toml", cwd=here)
    assert done.returncode == 2
    assert "small.toml: the file is there already" in done.stderr
    assert (here / "small.toml").read_text() == CONFIG
    assert not (here / "runs").exists()


def test_a_config_of_another_program_is_no_run(here: Path) -> None:
    write_json(here / "foreign" / "config.json", {"architectures": ["Bert"]})
    before = json.loads((here / "foreign" / "config.json").read_text())
    code, said = compare(here, "local", "--out", "foreign")
    assert code == 2
    assert "foreign holds config.json, notes.txt" in said
    assert json.loads((here / "foreign" / "config.json").read_text()) == before


def test_a_file_is_no_folder(here: Path) -> None:
    code, said = compare(here, "local", "--out", "small.toml")
    assert code == 2
    assert "small.toml is a file: choose another --out." in said


def test_a_reproduced_partition_may_be_made_again(here: Path) -> None:
    words = ("reproduce", "fig4", "--scale", "tiny", "--out", "paper")
    for _ in range(2):
        done = quiver(*words, cwd=here)
        assert done.returncode == 0, done.stderr
    done = quiver("sweep", "plan.toml", "--dry-run", "--no-estimate", "--out", "paper", cwd=here)
    assert done.returncode == 0, done.stderr
