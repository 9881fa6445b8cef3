"""A run folder is the whole truth of a run, and a kill at any moment loses nothing."""

from __future__ import annotations

import datetime
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

import quiverfl as qv
from quiverfl.data.partition import Partition
from quiverfl.engine.checkpoint import checkpoints
from quiverfl.engine.history import Record
from quiverfl.errors import QuiverWarning
from quiverfl.methods import METHODS, Method
from quiverfl.results.groups import group_runs
from quiverfl.results.run_files import find_runs, read_run
from quiverfl.runs import provenance
from quiverfl.runs.config import Config, parse_config
from quiverfl.runs.experiment import Experiment, run_in_folder
from quiverfl.runs.folder import RunFolder
from quiverfl.topologies.topology import Topology
from quiverfl.types import Metrics
from shell import QUIVER, quiver

CONFIG = {
    "data": {"name": "digits", "clients": 6, "samples_per_client": 20, "alpha": 0.3},
    "model": {"name": "mlp", "hidden": [8]},
    "method": {"name": "dfedpgp", "shared_epochs": 1},
    "topology": {"neighbors": 2, "sampled": 2},
    "training": {"lr": 0.05, "batch_size": 8, "momentum": 0.9},
    "run": {"rounds": 6, "checkpoint_every": 2, "threads": 1},
}


def config(**changes: object) -> Config:
    return parse_config(CONFIG).with_values((k.replace("__", "."), v) for k, v in changes.items())


def test_everything_is_there_and_readable(tmp_path: Path) -> None:
    summary = run_in_folder(config(), tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {
        "config.json",
        "environment.json",
        "partition.npz",
        "history.jsonl",
        "rounds.jsonl",
        "history.parquet",
        "rounds.parquet",
        "checkpoints",
        "summary.json",
    }
    history = pd.read_parquet(tmp_path / "run" / "history.parquet")
    assert len(history) == 6 * 2 * 6
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert summary["finished"] is True
    assert summary["protocol"]["stage"] == "local"
    last = history[(history["round"] == 5) & (history["stage"] == "mixed")]
    assert summary["stages"]["mixed"]["last"]["mean"] == pytest.approx(last["accuracy"].mean())
    partition = np.load(tmp_path / "run" / "partition.npz")
    assert partition["train_counts"].shape == (6, 10)
    assert len(np.unique(partition["train_indices"])) == 6 * 20


def test_nothing_is_overwritten_silently(tmp_path: Path) -> None:
    run_in_folder(config(), tmp_path / "run")
    before = (tmp_path / "run" / "history.parquet").stat().st_mtime_ns
    run_in_folder(config(run__threads=2), tmp_path / "run")  # the same experiment: not repeated
    assert (tmp_path / "run" / "history.parquet").stat().st_mtime_ns == before
    with pytest.raises(qv.QuiverError, match=r"another configuration \(training.lr: 0.05 there"):
        run_in_folder(config(training__lr=0.01), tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(qv.QuiverError, match="not empty and not a run"):
        run_in_folder(config(), tmp_path / "other")
    assert (tmp_path / "other" / "thesis.txt").read_text() == "mine"


def test_data_changed_after_the_start_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.npz"
    x, y = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 3
    mine = config(data__name="npz", data__samples_per_client=5, run__rounds=2).with_values(
        [("data.options", {"path": str(file), "cache": str(tmp_path / "cache")})]
    )
    np.savez(file, x=x, y=y)
    run_in_folder(mine, tmp_path / "over")
    begun = tmp_path / "begun"
    shutil.copytree(tmp_path / "over", begun)
    (begun / "summary.json").unlink()
    np.savez(file, x=x + 1e-3, y=y)
    for folder in (tmp_path / "over", begun):
        with pytest.raises(qv.QuiverError, match="a run with another data npz"):
            run_in_folder(mine, folder)
    file.unlink()
    assert run_in_folder(mine, tmp_path / "over")["finished"]  # results outlive their data


def test_a_run_is_not_continued_with_another_partition(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_in_folder(config(), folder)
    (folder / "summary.json").unlink()
    with np.load(folder / "partition.npz") as file:
        arrays = dict(file)
    arrays["train_indices"] = arrays["train_indices"][::-1]
    np.savez(folder / "partition.npz", **arrays)
    lost = {"finished": False, "diverged": {"round": 1, "client": 0}}
    (folder / "summary.json").write_text(json.dumps(lost))
    with pytest.raises(qv.QuiverError, match="other examples than this installation"):
        run_in_folder(config(), folder)
    assert RunFolder(folder).summary() == lost  # what is refused is not touched
    (folder / "partition.npz").write_bytes(b"PK")
    with pytest.raises(qv.QuiverError, match=r"partition.npz is damaged"):
        run_in_folder(config(), folder)


def test_a_configuration_changed_after_the_start_is_refused(tmp_path: Path) -> None:
    run_in_folder(config(), tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    path.write_text(path.read_text().replace('"lr": 0.05', '"lr": 0.5'))
    with pytest.raises(qv.QuiverError, match="was changed after the run was started"):
        RunFolder(tmp_path / "run").config()


FIRST = """{
"quiver": "0.1.0",
"identity": "1cc9b29023522131e4b1e5f549a46cb52d146977f38557513806fe186871e70d",
"inputs": {"data digits": "3acb9a7a8f0b0e3262724876d4600691"},
"config": {
 "data": {"name": "digits", "root": null, "clients": 4, "partition": "dirichlet", "alpha": null,
  "classes_per_client": null, "min_samples": null, "samples_per_client": 12,
  "test_per_client": null, "validation": null, "augment": "none", "seed": null, "options": {}},
 "model": {"name": "mlp", "personal": ["head"], "hidden": [4]},
 "method": {"name": "dfedpgp", "shared_epochs": 1},
 "topology": {"name": "auto", "neighbors": 2},
 "training": {"lr": 0.05, "personal_lr": null, "lr_decay": 1.0, "momentum": 0.0,
  "weight_decay": 0.0, "batch_size": 128, "clip_norm": null},
 "run": {"rounds": 4, "seed": 0, "common_init": true, "epochs_per_client": null,
  "epoch_groups": null, "evaluate_every": 1, "keep_local": true, "gradients": false,
  "dtype": "float32", "device": "cpu", "threads": 1, "executor": "sequential",
  "checkpoint_every": 2},
 "overrides": {}},
"topology": {"name": "random_push", "neighbors": 2, "seed": 0, "static": false}
}"""
"""The config.json of a run that version 0.1 made, before folders had a `schema`."""


def test_a_folder_of_the_first_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(FIRST)
    with pytest.raises(qv.QuiverError, match=r"written by Quiver 0\.1.*use quiverfl 0\.1"):
        RunFolder(tmp_path).config()


def test_a_folder_of_a_later_version_is_left_to_it(tmp_path: Path) -> None:
    run_in_folder(config(), tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 2'))
    with pytest.raises(qv.QuiverError, match="written by a later version of Quiver"):
        RunFolder(tmp_path / "run").config()


def test_the_identities_are_written_once_and_reports_go_by_them(tmp_path: Path) -> None:
    for seed, executor in enumerate(("sequential", "vectorized")):
        one = config(run__seed=seed, run__executor=executor, run__gradients=bool(seed))
        run_in_folder(one, tmp_path / str(seed))
        written = json.loads((tmp_path / str(seed) / "config.json").read_text())
        assert written["experiment"] == one.experiment() == config().experiment()
        assert written["identity"] == one.identity()
        place = list(METHODS).index("dfedpgp")
        assert written["method"] == {"name": "dfedpgp", "title": "DFedPGP", "order": place}
    (group,) = group_runs(find_runs([tmp_path]))
    assert group.seeds == (0, 1)


def test_what_differs_is_named_without_what_does_not_matter(tmp_path: Path) -> None:
    run_in_folder(config(), tmp_path / "run")
    other = config(training__lr=0.01, data__root="elsewhere", run__executor="sequential")
    with pytest.raises(
        qv.QuiverError, match=r"configuration \(training.lr: 0.05 there, 0.01 here\)"
    ):
        run_in_folder(other, tmp_path / "run")


def interrupted(tmp_path: Path, rounds: int = 4) -> Path:
    """A folder as a kill after some rounds leaves it: no summary, a torn last line."""
    folder = tmp_path / "cut"
    run_in_folder(config(run__rounds=6), folder)
    for name in ("summary.json", "history.parquet", "rounds.parquet"):
        (folder / name).unlink()
    for path in checkpoints(folder / "checkpoints"):
        if int(path.stem.removeprefix("round-")) > rounds:
            path.unlink()
            path.with_suffix(".safetensors").unlink()
    with (folder / "history.jsonl").open("a") as file:
        file.write('{"round": 6, "stage": "lo')
    return folder


def numbers(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "history.parquet")


def test_resuming_ends_with_the_same_numbers(tmp_path: Path) -> None:
    run_in_folder(config(), tmp_path / "whole")
    folder = interrupted(tmp_path)
    run_in_folder(RunFolder(folder).config(), folder)
    assert numbers(folder).equals(numbers(tmp_path / "whole"))
    left, right = (
        json.loads((path / "summary.json").read_text())["stages"]
        for path in (folder, tmp_path / "whole")
    )
    assert left == right


@pytest.mark.parametrize("rounds", [0, 5])
def test_a_folder_read_is_the_run_in_memory(tmp_path: Path, rounds: int) -> None:
    some = config(run__rounds=rounds, run__evaluate_every=2)
    run_in_folder(some, tmp_path / "run")
    memory, read = Experiment.of(some).simulation.run(), read_run(tmp_path / "run")
    timed = [name for name in read.rounds.columns if name.endswith("seconds")]
    assert_frame_equal(memory.history, read.history, check_dtype=rounds > 0)
    assert_frame_equal(
        memory.rounds.drop(columns=timed),
        read.rounds.drop(columns=timed),
        check_dtype=False,
    )
    assert sorted(set(read.history["round"])) == ([1, 3, 4] if rounds else [])


@pytest.mark.parametrize("name", ["history", "rounds"])
def test_a_damaged_history_is_named_and_no_result_made_of_it(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    run_in_folder(config(), folder)
    for file in ("summary.json", "history.parquet", "rounds.parquet"):
        (folder / file).unlink()
    path = folder / f"{name}.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    with pytest.raises(qv.QuiverError, match=rf"{name}.jsonl lacks round \d"):
        run_in_folder(config(), folder)
    assert not (folder / "summary.json").exists()


def test_under_natural_every_owner_is_a_client_unless_fewer_are_wanted() -> None:
    natural = parse_config({"data": {"partition": "natural"}})
    assert natural.data.clients is None
    assert natural.with_values([("training.lr", 0.1)]).data.clients is None
    assert parse_config(natural.model_dump(mode="json")).data.clients is None
    assert parse_config({"data": {"partition": "natural", "clients": 7}}).data.clients == 7
    assert parse_config({}).data.clients == 20


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "checksum": lambda path: flip_a_bit(path.with_suffix(".safetensors")),
    "missing": lambda path: path.with_suffix(".safetensors").unlink(),
    "empty": lambda path: path.write_text(""),
    "half": lambda path: path.write_text("{"),
    "short": lambda path: path.write_text('{"round": 6}'),
    "list": lambda path: path.write_text("[]"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_checkpoint_before_a_damaged_one_serves(tmp_path: Path, kind: str) -> None:
    run_in_folder(config(), tmp_path / "whole")
    folder = interrupted(tmp_path, rounds=6)
    DAMAGE[kind](checkpoints(folder / "checkpoints")[-1])
    with pytest.warns(QuiverWarning, match=r"round-000006.*after round 4"):
        run_in_folder(RunFolder(folder).config(), folder)
    assert numbers(folder).equals(numbers(tmp_path / "whole"))
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 6


@pytest.mark.parametrize("kind", DAMAGE)
def test_without_a_whole_checkpoint_the_remedy_named_works(tmp_path: Path, kind: str) -> None:
    run_in_folder(config(), tmp_path / "whole")
    folder = interrupted(tmp_path, rounds=6)
    lines = (folder / "history.jsonl").read_bytes()
    for path in checkpoints(folder / "checkpoints"):
        DAMAGE[kind](path)
    for _ in range(2):
        with pytest.raises(qv.QuiverError, match="no checkpoint can be used") as refused:
            run_in_folder(RunFolder(folder).config(), folder)
    assert f"delete the folder {folder / 'checkpoints'}:" in str(refused.value)
    assert (folder / "history.jsonl").read_bytes() == lines
    shutil.rmtree(folder / "checkpoints")
    run_in_folder(RunFolder(folder).config(), folder)
    assert numbers(folder).equals(numbers(tmp_path / "whole"))


def test_damaged_checkpoints_do_not_crowd_out_good_ones(tmp_path: Path) -> None:
    """One that is passed over goes when the next is written: two good ones are kept."""
    folder = interrupted(tmp_path, rounds=6)
    for suffix in (".json", ".safetensors"):
        newest = folder / "checkpoints" / f"round-000006{suffix}"
        newest.rename(newest.with_name(f"round-000099{suffix}"))
    (folder / "checkpoints" / "round-000099.json").write_text("{")
    (folder / "checkpoints" / "round-000005.safetensors").write_bytes(b"of an interrupted save")
    with pytest.warns(QuiverWarning):
        run_in_folder(RunFolder(folder).config(), folder)
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == [f"round-00000{n}.{s}" for n in (4, 6) for s in ("json", "safetensors")]


def test_a_run_of_a_newer_version_is_read_but_not_resumed(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**text, "quiver": "9.9.9"}))
    with pytest.raises(qv.QuiverError, match=r"written by Quiver 9\.9\.9.*resume it with 9\.9\.9"):
        run_in_folder(config(), folder)
    assert read_run(folder).done_rounds == 6
    (folder / "summary.json").write_text('{"finished": true}')
    assert run_in_folder(config(), folder) == {"finished": True}


@contextmanager
def filling_disk() -> Iterator[Callable[[int], None]]:
    """From a call on, the kernel refuses to let files grow beyond a size, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)


class Filling:
    """Fills the disk when a round is over, so that the next line is written in part."""

    def __init__(self, folder: Path, fill: Callable[[int], None]) -> None:
        self._folder, self._fill = folder, fill

    def on_evaluation(self, round: int, stage: str, metrics: Metrics) -> None: ...

    def on_round_end(self, record: Record) -> None:
        if record["round"] == 4:
            self._fill((self._folder / "history.jsonl").stat().st_size + 20)


@pytest.mark.parametrize("first", ["config", "partition", "checkpoint", "line", "parquet"])
def test_what_a_full_disk_refuses_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    run_in_folder(config(), tmp_path / "whole")
    folder, recorder = tmp_path / "run", None
    finish = RunFolder.finish
    with filling_disk() as fill:
        if first == "line":
            recorder = Filling(folder, fill)
        elif first == "parquet":
            monkeypatch.setattr(RunFolder, "finish", lambda *given: (fill(99), finish(*given))[1])
        else:
            described = (tmp_path / "whole" / "config.json").stat().st_size
            fill({"config": 99, "partition": described + 99, "checkpoint": 12_000}[first])
        with pytest.raises(qv.QuiverError, match="cannot be written") as refused:
            run_in_folder(config(), folder, recorder)
    monkeypatch.undo()
    remedy = "run the same command again" if first == "config" else f"`quiver resume {folder}`"
    assert remedy in str(refused.value)
    assert not list(tmp_path.rglob(".*"))  # nor is room taken by halves
    if first == "line":
        assert not (folder / "history.jsonl").read_bytes().endswith(b"\n")
    run_in_folder(config(), folder)
    assert numbers(folder).equals(numbers(tmp_path / "whole"))
    assert last_tensors(folder) == last_tensors(tmp_path / "whole")


def last_tensors(folder: Path) -> bytes:
    return checkpoints(folder / "checkpoints")[-1].with_suffix(".safetensors").read_bytes()


def test_a_diverging_run_keeps_what_it_had(tmp_path: Path) -> None:
    wild = config(training__lr=1e6, training__weight_decay=1.0, run__rounds=30)
    with pytest.raises(qv.Diverged):
        run_in_folder(wild, tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["finished"] is False
    assert {"round", "client"} <= set(summary["diverged"])
    assert (tmp_path / "run" / "history.jsonl").exists()
    RunFolder(tmp_path / "run").open(wild, {}, *_parts(wild))  # tried again, and killed at once
    assert "diverged" not in RunFolder(tmp_path / "run").summary()


def _parts(config: Config) -> tuple[Partition, Topology, Method]:
    experiment = Experiment.of(config)
    return experiment.partition, experiment.topology, experiment.method


@pytest.mark.parametrize("method", ["dfedpgp", pytest.param("fedavg", marks=pytest.mark.slow)])
def test_a_killed_process_is_resumed_bit_for_bit(tmp_path: Path, method: str) -> None:
    text = f"""
[data]
clients = 6
samples_per_client = 20
[model]
hidden = [8]
[method]
name = "{method}"
[topology]
neighbors = 2
sampled = 2
[training]
lr = 0.05
batch_size = 4
[run]
rounds = 60
checkpoint_every = 3
threads = 1
"""
    (tmp_path / "run.toml").write_text(text)
    run = ["run", "run.toml", "--quiet", "--out"]
    assert quiver(*run, "whole", cwd=tmp_path).returncode == 0
    process = subprocess.Popen([*QUIVER, *run, "cut"], cwd=tmp_path)
    lines = tmp_path / "cut" / "rounds.jsonl"
    deadline = time.monotonic() + 60
    while not (lines.exists() and lines.read_bytes().count(b"\n") >= 7):
        assert time.monotonic() < deadline
        assert process.poll() is None, "finished before it could be killed"
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    again = quiver(*run, "cut", cwd=tmp_path)
    assert again.returncode == 2
    assert "quiver resume" in again.stderr
    assert quiver("resume", "cut", "--quiet", cwd=tmp_path).returncode == 0
    assert numbers(tmp_path / "cut").equals(numbers(tmp_path / "whole"))
    newest = [checkpoints(tmp_path / name / "checkpoints")[-1] for name in ("cut", "whole")]
    first, second = (path.with_suffix(".safetensors").read_bytes() for path in newest)
    assert first == second


def test_the_folder_says_when_how_and_with_what_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def environment() -> dict[str, str]:
        told = json.loads((tmp_path / "run" / "environment.json").read_text())
        assert isinstance(told, dict)
        return told

    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/quiver", "run", "my run.toml"])
    folder = RunFolder(tmp_path / "run")
    run_in_folder(config(), tmp_path / "run")
    first = environment()
    assert first["command"] == "quiver run 'my run.toml'"
    started = datetime.datetime.fromisoformat(first["started"])
    assert abs(datetime.datetime.now(datetime.UTC) - started) < datetime.timedelta(hours=1)
    monkeypatch.setattr(sys, "argv", ["quiver", "extend"])
    folder.extend(8)
    run_in_folder(folder.config(), tmp_path / "run")
    assert environment()["command"] == first["command"], "it comes from where it was begun"
    assert environment()["started"] == first["started"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["/a/b/quiver", "run", "x.toml"], "quiver run x.toml"),
        (["/src/quiverfl/__main__.py", "compare", "a b"], "quiver compare 'a b'"),
        (["train.py"], "train.py"),
        (["-c"], None),
        ([""], None),
    ],
)
def test_the_command_is_said_as_it_could_be_typed(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], said: str | None
) -> None:
    monkeypatch.delenv(provenance.COMMAND, raising=False)
    monkeypatch.setattr(sys, "argv", argv)
    assert provenance.read_command() == said
    told = provenance.command_environment()
    assert told == ({} if said is None else {provenance.COMMAND: said})
    monkeypatch.setattr(os, "environ", {**os.environ, **told})
    monkeypatch.setattr(sys, "argv", ["job.py"])
    assert provenance.read_command() == (said or "job.py"), "a worker names who it works for"


def test_the_commit_is_that_of_the_clone(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@x"]
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert provenance._describe_clone(tmp_path) is None, "no clone"
    git("init", "-q")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-qm", "one")
    git("tag", "-a", "v1", "-m", "one")
    head = git("rev-parse", "HEAD")[:12]
    assert provenance._describe_clone(tmp_path) == head
    (tmp_path / "file").write_text("b")
    assert provenance._describe_clone(tmp_path) == f"{head}-dirty"
