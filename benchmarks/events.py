"""What a job costs in a run without waiting, over a client's part of a synchronous round.

    python -m benchmarks.events [CLIENTS …]

The same clients, model and steps in both, in turns; processor time of one thread. `schedule` is the
part of a job that needs no tensors.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

import quiverfl as qv
from quiverfl.clock.devices import Devices
from quiverfl.clock.run import make_player
from quiverfl.data.dataset import Dataset
from quiverfl.engine.rounds import exchange_messages
from quiverfl.runs.experiment import Experiment

CLIENTS = (1000, 10_000)
REPEATS = 3
TARGET = 1.5
SPREADS: dict[str, dict[str, float]] = {"10×": {"spread": 10.0}, "log-normal": {"sigma": 1.0}}


class Cost(NamedTuple):
    """Microseconds of processor time."""

    clients: int
    speeds: str
    width: float
    """Jobs that trained together, on average."""
    schedule: float
    job: float
    round: float
    """A client's part of a synchronous round."""
    ratio: float
    """The median of the repeats' job / round."""


def make_experiment(clients: int) -> Experiment:
    """An MLP of 64-32-10 parameters, 16 samples a client, six steps a round, ten neighbours."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(clients * 24, 64)).astype(np.float32)
    y = draw.integers(0, 10, clients * 24)
    cut = clients * 20
    dataset = Dataset("noise", x[:cut], y[:cut], x[cut:], y[cut:], 10)
    tree = {
        "data": {"clients": clients, "partition": "iid", "samples_per_client": 16,
                 "test_per_client": 4},
        "model": {"name": "mlp", "hidden": [32]},
        "method": {"name": "dfedpgp", "shared_epochs": 5, "step": "debiased"},
        "topology": {"neighbors": 10},
        "training": {"lr": 0.01, "batch_size": 16},
        "run": {"rounds": 1000, "threads": 1, "executor": "vectorized"},
    }  # fmt: skip
    return Experiment.of(tree, dataset)


def measure(clients: int, speeds: str) -> Cost:
    """Repeats in turns: a stretch of four mean rounds, then a round."""
    made = make_experiment(clients).simulation
    devices = Devices.draw(clients, step=0.1, up=1e7, latency=0.05, **SPREADS[speeds])
    timing = qv.Timing(devices, waits="nobody", until=100.0)
    shard, other = made.shard(), made.shard()
    exchange = made.exchange(other)
    player = make_player(timing, shard, made.topology, made._steps)
    alone = make_player(timing, shard, made.topology, made._steps).schedule
    mean = int(1e6 / float(np.mean(1 / (made._steps * devices.step))))
    everyone = np.ones(clients, dtype=bool)
    jobs, schedules, rounds = [], [], []
    for turn in range(REPEATS + 1):  # the first fills caches
        until = (turn + 1) * 4 * mean
        spent, count = clock(lambda until=until: player.train_until(until))
        only, same = clock(lambda until=until: len(alone.jobs_until(until)))
        assert count == same

        def play(turn: int = turn) -> int:
            other.train(turn, everyone)
            exchange_messages(other, exchange, made.topology(turn), turn)
            return clients

        whole, _ = clock(play)
        jobs.append(1e6 * spent / count)
        schedules.append(1e6 * only / count)
        rounds.append(1e6 * whole / clients)
    assert sum(player.schedule.mass()) == clients << 48
    pairs = [job / one for job, one in zip(jobs[1:], rounds[1:], strict=True)]
    middle = [statistics.median(numbers[1:]) for numbers in (schedules, jobs, rounds)]
    width = float(np.mean(player.widths))
    return Cost(clients, speeds, width, *middle, statistics.median(pairs))


def clock(work: Callable[[], int]) -> tuple[float, int]:
    begin = time.process_time()
    count = work()
    return time.process_time() - begin, count


def main(sizes: list[int]) -> None:
    torch.set_num_threads(1)
    print("| clients | speeds | jobs together | schedule, µs | job, µs | round, µs | ratio |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for clients in sizes:
        for speeds in SPREADS:
            c = measure(clients, speeds)
            costs = f"{c.schedule:.0f} | {c.job:.0f} | {c.round:.0f} | {c.ratio:.2f}"
            print(f"| {c.clients:,} | {c.speeds} | {c.width:.0f} | {costs} |", flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or list(CLIENTS))
