"""Runs that are interrupted, stopped, crowded or out of room say so, and lose nothing."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest

from quiverfl.engine.checkpoint import checkpoints
from shell import QUIVER, quiver

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
batch_size = 4
[run]
rounds = {rounds}
checkpoint_every = 1000
threads = 1
"""
LONG, SHORT = 100_000, 100


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for name, rounds in (("long", LONG), ("short", SHORT)):
        (tmp_path / f"{name}.toml").write_text(CONFIG.format(rounds=rounds))
    return tmp_path


@contextmanager
def running(*arguments: str, cwd: Path, folder: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has recorded some rounds in its folder."""
    with subprocess.Popen([*QUIVER, *arguments], cwd=cwd, stderr=subprocess.PIPE, text=True) as run:
        try:
            lines = cwd / folder / "rounds.jsonl"
            _wait_for(lambda: lines.exists() and lines.read_bytes().count(b"\n") >= 3, run)
            yield run
        finally:
            run.kill()


def _wait_for(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr
        time.sleep(0.01)


def contents(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_ino for path in folder.rglob("*")}


def numbers(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "history.parquet")


def test_no_second_process_writes_to_a_folder(here: Path) -> None:
    with running("run", "long.toml", "--out", "run", "--quiet", cwd=here, folder="run") as first:
        before = contents(here / "run")
        for command in (["run", "long.toml", "--out", "run"], ["resume", "run"]):
            done = quiver(*command, cwd=here)
            assert done.returncode == 2
            said = f"process {first.pid} on host {socket.gethostname()} is writing there"
            assert said in done.stderr
            assert len(done.stderr.splitlines()) == 1
        assert contents(here / "run") == before
        assert first.poll() is None
        report = quiver("report", "run", "--out", "page.html", cwd=here)  # reading needs no lock
        assert report.returncode == 0, report.stderr
    done = quiver("run", "long.toml", "--out", "run", cwd=here)  # the first was killed
    assert done.returncode == 2
    assert "quiver resume run" in done.stderr


def test_one_comparison_at_a_time(here: Path) -> None:
    command = ["compare", "long.toml", "--methods", "local,fedavg", "--out", "both"]
    with running(*command, "--quiet", cwd=here, folder="both/local") as first:
        before = contents(here / "both")
        for methods in ("local", "dfedpgp"):
            done = quiver("compare", "long.toml", "--methods", methods, "--out", "both", cwd=here)
            assert done.returncode == 2
            assert f"process {first.pid}" in done.stderr
            assert done.stdout == ""
        assert contents(here / "both") == before


def test_sigterm_ends_the_round_and_keeps_it(here: Path) -> None:
    assert quiver("run", "short.toml", "--out", "whole", cwd=here).returncode == 0
    with running("run", "short.toml", "--out", "run", "--quiet", cwd=here, folder="run") as process:
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "`quiver resume run` continues" in said
    (newest,) = checkpoints(here / "run" / "checkpoints")
    rounds = len((here / "run" / "rounds.jsonl").read_text().splitlines())
    assert newest.stem == f"round-{rounds:06d}"
    assert f"stopped by SIGTERM after round {rounds};" in said
    assert quiver("resume", "run", "--quiet", cwd=here).returncode == 0
    assert numbers(here / "run").equals(numbers(here / "whole"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_comparison_says_how_it_is_continued(
    here: Path, number: signal.Signals, code: int
) -> None:
    command = ["compare", "long.toml", "--methods", "local,fedavg", "--out", "both", "--quiet"]
    with running(*command, cwd=here, folder="both/local") as process:
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert "run the same `quiver compare` command again" in said
    assert "quiver resume" not in said
    assert not (here / "both" / "fedavg").exists()
    assert bool(checkpoints(here / "both" / "local" / "checkpoints")) == (code == 143)


def test_ctrl_c_says_how_a_run_is_resumed(here: Path) -> None:
    with running("run", "long.toml", "--out", "run", "--quiet", cwd=here, folder="run") as process:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == "interrupted; `quiver resume run` continues from the last checkpoint.\n"


def _last(folder: Path) -> bytes:
    return checkpoints(folder / "checkpoints")[-1].with_suffix(".safetensors").read_bytes()


@pytest.mark.parametrize("kilobytes", [pytest.param(28, marks=pytest.mark.slow), 100])
def test_a_disk_that_is_really_full(here: Path, kilobytes: int) -> None:
    disk = here / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(disk)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(mount).returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        settings = ["--set", "run.checkpoint_every=30"]
        assert quiver("run", "short.toml", *settings, "--out", "whole", cwd=here).returncode == 0
        done = quiver("run", "short.toml", *settings, "--out", "disk/run", "--quiet", cwd=here)
        assert done.returncode == 2, done.stderr
        assert "No space left on device" in done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr
        subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)
        done = quiver("resume", "disk/run", "--quiet", cwd=here)
        assert done.returncode == 0, done.stderr
        assert numbers(disk / "run").equals(numbers(here / "whole"))
        assert _last(disk / "run") == _last(here / "whole")
    finally:
        subprocess.run(["umount", str(disk)])
