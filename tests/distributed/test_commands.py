"""`quiver run --ranks` and torchrun: one run folder, whatever happens to a rank."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import quiverfl as qv
from quiverfl.cli.main import app
from quiverfl.engine.checkpoint import checkpoints
from quiverfl.errors import QuiverError

CONFIG = """
[data]
clients = 7
partition = "dirichlet"
alpha = 0.3
[model]
hidden = [8]
[topology]
neighbors = 2
participation = 0.7
[training]
lr = 0.05
batch_size = 16
[run]
rounds = {rounds}
checkpoint_every = 20
threads = 1
"""
QUIVER = [sys.executable, "-m", "quiverfl"]
FINE = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "short.toml").write_text(CONFIG.format(rounds=6))
    (tmp_path / "long.toml").write_text(CONFIG.format(rounds=80))
    return tmp_path


def quiver(*arguments: str, cwd: Path, **told: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **told}
    command = [*QUIVER, *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def started(*arguments: str, cwd: Path, **told: str) -> subprocess.Popen[str]:
    env = {**os.environ, **told}
    return subprocess.Popen(
        [*QUIVER, *arguments], cwd=cwd, env=env, stderr=subprocess.PIPE, text=True
    )


def in_this_process(*arguments: str, cwd: Path) -> Result:
    """A command without the seconds that a process takes to begin; numbers are the same."""
    with contextlib.chdir(cwd):
        return CliRunner().invoke(app, arguments)


def as_ranks(
    count: int, cwd: Path, command: Callable[[int], list[str]], code: int = 2, **told: str
) -> list[str]:
    """The ranks of one run as torchrun would start them, each with its own words; what they say."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    crew = [
        started(*command(rank), cwd=cwd, RANK=str(rank), **{**FINE, **common, **told})
        for rank in range(count)
    ]
    said = [process.communicate(timeout=120)[1] for process in crew]
    assert [process.returncode for process in crew] == [code] * count, said
    return said


def rounds(folder: Path) -> int:
    lines = folder / "rounds.jsonl"
    return lines.read_bytes().count(b"\n") if lines.exists() else 0


def wait_for(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.02)


def rank_of(parent: int, rank: int) -> int:
    """The process id of one rank of a command."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            status, said = (path / "stat").read_text(), (path / "environ").read_bytes()
        except OSError:
            continue
        if int(status.rpartition(")")[2].split()[1]) == parent and b"\0RANK=%d\0" % rank in said:
            return int(path.name)
    raise AssertionError(f"no rank {rank} below {parent}")


def assert_same_run(one: Path, other: Path) -> None:
    """Every evaluation and the last checkpoint, byte for byte."""
    assert (one / "history.jsonl").read_bytes() == (other / "history.jsonl").read_bytes()
    first, second = (checkpoints(run / "checkpoints")[-1] for run in (one, other))
    assert first.name == second.name
    for kind in (".json", ".safetensors"):
        assert first.with_suffix(kind).read_bytes() == second.with_suffix(kind).read_bytes()
    assert json.loads((other / "summary.json").read_text())["finished"]


def test_one_folder_with_the_files_of_one_process(here: Path) -> None:
    assert in_this_process("run", "short.toml", "--out", "one", "-q", cwd=here).exit_code == 0
    done = quiver("run", "short.toml", "--out", "two", "--ranks", "2", "--json", cwd=here)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["finished"]  # said once
    assert_same_run(here / "one", here / "two")
    assert {p.name for p in (here / "one").iterdir()} == {p.name for p in (here / "two").iterdir()}


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are found in /proc")
def test_a_killed_rank_costs_no_number(here: Path) -> None:
    assert in_this_process("run", "long.toml", "--out", "whole", "-q", cwd=here).exit_code == 0
    command = ["run", "long.toml", "--out", "run", "--ranks", "2", "--max-restarts", "1", "-q"]
    with started(*command, cwd=here) as process:
        wait_for(lambda: rounds(here / "run") >= 30, process)
        os.kill(rank_of(process.pid, 1), signal.SIGKILL)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "starting again from the last checkpoint" in said
    assert_same_run(here / "whole", here / "run")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ranks are found in /proc")
@pytest.mark.parametrize("rank", [0, 2])
def test_torchrun_starts_again_after_a_kill(here: Path, rank: int) -> None:
    assert quiver("run", "long.toml", "--out", "whole", "-q", cwd=here).returncode == 0
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command += ["--max-restarts", "1", "-m", "quiverfl", "run", "long.toml", "--out", "run", "-q"]
    with subprocess.Popen(
        [sys.executable, *command], cwd=here, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for(lambda: rounds(here / "run") >= 30, process)
        os.kill(rank_of(process.pid, rank), signal.SIGKILL)
        _, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert_same_run(here / "whole", here / "run")


@pytest.mark.slow
def test_any_number_of_ranks_continues_what_another_began(here: Path) -> None:
    """4 → 2 → 3 → 1, each stopped by SIGTERM."""
    assert quiver("run", "long.toml", "--out", "whole", "-q", cwd=here).returncode == 0
    command, done = ["run", "long.toml", "--out", "run"], 0
    for ranks in ("4", "2", "3"):
        with started(*command, "--ranks", ranks, "-q", cwd=here) as process:
            wait_for(lambda: rounds(here / "run") >= done + 10, process)  # noqa: B023
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=120)
        assert process.returncode == 143, said
        assert said.count("continues from the last checkpoint") == 1
        command, done = ["resume", "run"], rounds(here / "run")
    assert quiver("resume", "run", "-q", cwd=here).returncode == 0
    assert_same_run(here / "whole", here / "run")
    again = quiver("run", "long.toml", "--out", "run", "--ranks", "2", "-q", cwd=here)
    assert again.returncode == 0, again.stderr  # finished, and nothing is done
    assert_same_run(here / "whole", here / "run")


def test_ranks_with_other_configurations_are_refused(here: Path) -> None:
    def command(rank: int) -> list[str]:
        return ["run", "short.toml", "--out", "run", "--set", f"training.lr=0.0{rank + 1}"]

    said = as_ranks(2, here, command)
    assert "rank 1 differs from rank 0 in training.lr: 0.02 there, 0.01 on rank 0" in said[0]
    assert len(said[0].splitlines()) == 1
    assert not (here / "run").exists()


@pytest.mark.slow
def test_a_rank_of_another_version_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, quiverfl; quiverfl.__version__ = sys.argv.pop(1)\n"
    code += "from quiverfl.cli.main import main; main()"
    monkeypatch.setattr(sys.modules[__name__], "QUIVER", [sys.executable, "-c", code])
    versions = (qv.__version__, "9.9")
    said = as_ranks(2, here, lambda rank: [versions[rank], "run", "short.toml", "--out", "run"])
    assert f"rank 1 differs from rank 0 in quiverfl: 9.9 there, {qv.__version__}" in said[0]
    assert not (here / "run").exists()


def test_a_rank_that_never_comes_is_not_waited_for_in_vain(here: Path) -> None:
    begin = time.monotonic()
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    store = str(here / "store")
    alone = {**told, **FINE, "QUIVER_RANK_STORE": store, "QUIVER_RANK_TIMEOUT": "3"}
    with subprocess.Popen(
        [*QUIVER, "run", "short.toml", "--out", "run"],
        cwd=here,
        env={**os.environ, **alone},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(timeout=60) == 2
    assert "rank 0 of 2 did not meet the others" in said
    assert len(said.splitlines()) == 1
    assert time.monotonic() - begin < 60
    assert not (here / "run").exists()


def test_a_port_in_use_is_said(here: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **FINE}
        told |= {"MASTER_PORT": str(taken.getsockname()[1]), "QUIVER_RANK_TIMEOUT": "5"}
        done = quiver("run", "short.toml", "--out", "run", cwd=here, **told)
    assert done.returncode == 2
    assert "the port is in use" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "8"], "at most 7 ranks"),
        (["--ranks", "0"], "at least 1"),
        (["--ranks", "2", "--max-restarts", "-1"], "0 or more"),
        (["--max-restarts", "3"], "only ranks are restarted"),
        (["--ranks", "1", "--max-restarts", "3"], "only ranks are restarted"),
    ],
)
def test_bad_counts_are_refused_before_anything_starts(
    here: Path, arguments: list[str], words: str
) -> None:
    done = in_this_process("run", "short.toml", "--out", "run", *arguments, cwd=here)
    assert isinstance(done.exception, QuiverError)
    assert words in str(done.exception)
    assert not (here / "run").exists()


@pytest.mark.parametrize("command", ["compare", "sweep", "tune", "reproduce"])
def test_what_is_one_process_is_refused_among_ranks(
    command: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = [command, str(here / "short.toml"), "--out", str(here / "runs")]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, QuiverError), result.output
    assert f"quiver {command} is one process, and this is one of 2 ranks" in str(result.exception)
    assert not (here / "runs").exists()


def test_divergence_on_a_rank_ends_all_with_its_words(here: Path) -> None:
    wild = ["--set", "training.lr=1e30", "--set", "training.momentum=0.9", "-q"]
    said = as_ranks(2, here, lambda _: ["run", "short.toml", "--out", "run", *wild], code=3)
    assert said[0].count("training diverged") == 1
    assert said[0].splitlines()[-1] == said[1].splitlines()[-1]
    assert "diverged" in json.loads((here / "run" / "summary.json").read_text())


def test_a_dry_run_says_what_a_rank_needs(here: Path) -> None:
    done = in_this_process("run", "short.toml", "--dry-run", "--ranks", "3", cwd=here)
    assert done.exit_code == 0, done.output
    said = (
        "7 clients",
        "each of 3 ranks: about",
        "clients in training",
        "between ranks: each sends",
    )
    for words in said:
        assert words in done.stdout
    assert (
        list(here.iterdir()) == [here / "short.toml", here / "long.toml"]
        or not (here / "runs").exists()
    )
