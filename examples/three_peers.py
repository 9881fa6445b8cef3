"""From a simulation to three peers: the same configuration, first in one process, then in three.

    python examples/three_peers.py            # half a minute; needs quiverfl[peer]
    python examples/three_peers.py --quick    # fewer rounds

Everything after the simulation is what three machines would do (docs/reference/peers.md), here on
loopback and in a folder that is removed at the end: certificates and a roster, a folder for each
peer, three processes that push shares of their models to each other over mutual TLS, and an audit
of their records. In sync mode they compute what the simulation computed.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd

import quiverfl as qv
from quiverfl.cli.main import app

NAMES = ("north", "south", "west")
CONFIGURATION = """
[data]
name = "digits"
clients = 3
alpha = 0.3
samples_per_client = 60

[model]
name = "mlp"
hidden = [32]

[method]
name = "dfedpgp"

[topology]
name = "random_push"
neighbors = 1

[training]
lr = 0.05
batch_size = 16

[run]
rounds = {rounds}
executor = "sequential"
threads = 1

[peers]
mode = "sync"
linger = 5
"""


def quiver(*words: object) -> None:
    """What `quiver …` does."""
    code = app([str(word) for word in words], standalone_mode=False)
    if code:
        raise SystemExit(f"quiver {words[0]} {words[1]} ended with {code}")


def started(*words: object) -> subprocess.Popen[bytes]:
    """The same in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "quiverfl", *map(str, words)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def free_addresses(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return addresses


def end_well(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait for all; if one fails the others are ended."""
    try:
        for process in processes:
            if process.wait() != 0:
                raise SystemExit(f"{process.args} ended with {process.returncode}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 3 if parser.parse_args().quick else 20
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        toml = root / "run.toml"
        toml.write_text(CONFIGURATION.format(rounds=rounds))

        run = qv.Experiment.from_toml(toml).run()

        authority = root / "authority"
        peers = [f"--peer={n}={a}" for n, a in zip(NAMES, free_addresses(3), strict=True)]
        quiver("peer", "certs", "init", authority, "--run", "trial", *peers)
        setup = ["--config", toml, "--roster", authority / "roster.toml", "--keys"]
        for name in NAMES:
            quiver("peer", "init", root / name, *setup, authority / name)
        end_well([started("peer", "run", root / name) for name in NAMES])
        quiver("peer", "audit", *(root / name for name in NAMES))

        simulated = last_scores(run.history)
        for number, name in enumerate(NAMES):
            here = last_scores(qv.load_run(root / name / "run").history)  # its own, nobody else's
            before, now = 100 * simulated[number], 100 * here[number]
            print(f"{name}: {before:.2f} % simulated, {now:.2f} % as a peer")


def last_scores(history: pd.DataFrame) -> pd.Series:
    """The accuracies after the last communication, by the client's number."""
    last = (history["round"] == history["round"].max()) & (history["stage"] == "mixed")
    return history[last].set_index("client")["accuracy"]


if __name__ == "__main__":
    main()
