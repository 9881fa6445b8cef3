"""A whole `quiver run` against the sum of its own training and mixing.

The numerator is everything a person waits for: starting Python, reading the configuration, making
data and states, evaluation of both stages in every round, history, checkpoints, the summary.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.child import environment
from benchmarks.figures import Figure
from benchmarks.works import TRAINING, A

ROUNDS, QUICK_ROUNDS = 60, 12
TARGET = 1.15

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


def figures(threads: int, quick: bool) -> list[Figure]:
    rounds = QUICK_ROUNDS if quick else ROUNDS
    name = f"`quiver run` / its training and mixing, A, {rounds} rounds"
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "a.toml", Path(folder) / "run"
        file.write_text(CONFIGURATION)
        command = [sys.executable, "-c", "from quiverfl.cli.main import main; main()"]
        command += ["run", str(file), "--out", str(out), "--quiet", "--set", f"run.rounds={rounds}"]
        begin = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env=environment(threads))
        seconds = time.perf_counter() - begin
        if done.returncode:
            words = (done.stderr.strip() or "no message").splitlines()[-1]
            return [Figure("run", name, None, note=f"quiver run failed: {words}")]
        lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    parts = {
        part: sum(line[f"{part}_seconds"] for line in lines)
        for part in ("train", "mix", "evaluate")
    }
    value = seconds / (parts["train"] + parts["mix"])
    return [Figure("run", name, value, "≤", TARGET, details={"whole": seconds, **parts})]
