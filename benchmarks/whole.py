"""A whole `quiver run` against the sum of its own training and mixing, and how soon it trains.

The numerator is everything a person waits for: starting Python, reading the configuration, making
data and states, evaluation of both stages in every round, history, checkpoints, the summary. The
start ends where the first round begins: imports, checks and the run folder are behind it then.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.child import ChildFailed, environment
from benchmarks.clock import Kind
from benchmarks.figures import Figure, ratio
from benchmarks.works import TRAINING, A

ROUNDS, QUICK_ROUNDS = 60, 12
RUN_TARGET, START_TARGET = 1.1, 1.5
STARTS = 5
QUICK_START = Path(__file__).parents[1] / "configs" / "quickstart.toml"

CONFIGURATION = f"""
[data]
name = "synthetic"
clients = {A.clients}
partition = "iid"
samples_per_client = {A.samples}
test_per_client = {A.test}
options.shape = {list(A.shape)}
options.train = {A.clients * A.samples}
options.test = {A.clients * A.test}

[model]
name = "mlp"
hidden = [128, 64]

[method]
name = "dfedpgp"
personal_epochs = {A.personal_epochs}
shared_epochs = {A.shared_epochs}

[topology]
name = "random_push"
neighbors = {A.neighbors}

[training]
lr = {TRAINING.lr}
momentum = {TRAINING.momentum}
weight_decay = {TRAINING.weight_decay}
batch_size = {TRAINING.batch_size}
"""


def figures(kind: Kind, threads: int, quick: bool) -> list[Figure]:
    return [_whole_run(kind, threads, quick), *_start(kind, threads, quick)]


def _whole_run(kind: Kind, threads: int, quick: bool) -> Figure:
    rounds = QUICK_ROUNDS if quick else ROUNDS
    name = f"`quiver run` / its training and mixing, A, {rounds} rounds"
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "a.toml", Path(folder) / "run"
        file.write_text(CONFIGURATION)
        try:
            seconds, _ = _run(file, out, rounds, kind, threads)
        except ChildFailed as error:
            return Figure("run", name, None, note=str(error))
        lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    parts = {
        part: sum(line[f"{part}_seconds"] for line in lines)
        for part in ("train", "mix", "evaluate")
    }
    value = seconds / (parts["train"] + parts["mix"])
    return Figure("run", name, value, "≤", RUN_TARGET, details={"whole": seconds, **parts})


def _start(kind: Kind, threads: int, quick: bool) -> list[Figure]:
    names = "from `quiver run` to the first round, quick start", "the same / importing torch"
    starts, torchs = [], []
    for number in range(-1, 2 if quick else STARTS):  # the first one writes what later ones read
        with tempfile.TemporaryDirectory() as folder:
            try:
                _, start = _run(QUICK_START, Path(folder) / "run", 1, kind, threads)
            except ChildFailed as error:
                return [Figure("run", name, None, note=str(error)) for name in names]
        torch = _seconds([sys.executable, "-c", "import torch"], kind, threads)[0]
        if number >= 0:
            starts.append(start)
            torchs.append(torch)
    details = {"seconds": {"start": starts, "torch": torchs}}
    middle = statistics.median(starts)
    return [
        Figure("run", names[0], middle, "≤", START_TARGET, unit="s", details=details),
        Figure("run", names[1], ratio(starts, torchs), details=details),
    ]


def _run(file: Path, out: Path, rounds: int, kind: Kind, threads: int) -> tuple[float, float]:
    """Seconds of a whole `quiver run`, and those until its first round."""
    command = [sys.executable, "-m", "benchmarks.whole", kind, str(time.time())]
    command += ["run", str(file), "--out", str(out), "--quiet", "--set", f"run.rounds={rounds}"]
    seconds, said = _seconds(command, kind, threads)
    return seconds, float(said.splitlines()[-1])


def _seconds(command: list[str], kind: Kind, threads: int) -> tuple[float, str]:
    """What a process took, and what it said."""
    begin, before = time.perf_counter(), _spent()
    done = subprocess.run(command, capture_output=True, text=True, env=environment(threads))
    if done.returncode:
        words = (done.stderr.strip() or "no message").splitlines()[-1]
        raise ChildFailed(f"{' '.join(command[1:4])} failed: {words}")
    passed = _spent() - before if kind == "cpu" else time.perf_counter() - begin
    return passed, done.stdout


def _spent() -> float:
    """Processor seconds of all processes that were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """The command `quiver` on the wanted clock; the last line is when its first round began."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("wall", "cpu"))
    parser.add_argument("begin", type=float)
    wanted, rest = parser.parse_known_args()
    first: list[float] = []

    def clock() -> float:
        now = time.process_time() if wanted.kind == "cpu" else time.time() - wanted.begin
        if not first and sys._getframe(1).f_globals["__name__"] == "quiverfl.engine.history":
            first.append(now)
        return now

    time.perf_counter = clock
    sys.argv = ["quiver", *rest]
    from quiverfl.cli import main as command

    try:
        command.main()
    except SystemExit as ended:
        if ended.code:
            raise
    print(first[0])


if __name__ == "__main__":
    main()
