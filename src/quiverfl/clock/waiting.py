"""Times of waiting: a few rounds under each kind of exchange, as a table and as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quiverfl.clock.devices import MICROSECONDS, Devices
from quiverfl.clock.push import Push
from quiverfl.clock.rounds import Kind, RoundTimer
from quiverfl.clock.schedule import Jobs
from quiverfl.results.pictures import save_picture
from quiverfl.topologies import random_push, random_regular, star
from quiverfl.types import Floats, Integers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES = {
    "server": "server, a fifth sampled",
    "barrier": "barrier: all wait for all",
    "undirected": "undirected, in step",
    "push": "push, in step",
    "nobody": "push, without waiting",
}


@dataclass(frozen=True, eq=False)
class Waiting:
    """Training times under one kind of exchange; bars are (client, begin, end) of training."""

    title: str
    training: list[tuple[int, float, float]]
    seconds: float
    """Mean seconds of a client and round."""
    waiting: float
    """The fraction of the time in which a client does not train."""
    slowest: float
    """Seconds of a round for the client that has the longest."""


def compare_waiting(
    devices: Devices, neighbors: int, rounds: int, steps: int, payload: int, seed: int = 0
) -> dict[str, Waiting]:
    """The same devices, steps and bytes under each kind of exchange."""
    clients = devices.clients
    work = np.full(clients, steps, dtype=np.int64)
    size = np.full(clients, payload, dtype=np.int64)
    push = random_push(clients, neighbors, seed=seed)
    pairs = random_regular(clients, neighbors - (clients * neighbors) % 2, seed=seed)
    hub = star(clients, max(1, clients // 5), seed=seed)
    graphs = {"server": hub, "barrier": pairs, "undirected": pairs, "push": push}
    by_kind: dict[str, Waiting] = {}
    kinds: tuple[Kind, ...] = ("server", "barrier", "undirected", "push")
    for kind in kinds:
        timer = RoundTimer(devices, kind)
        times = [timer.advance(graphs[kind](t), work, size) for t in range(rounds)]
        bars = [
            (int(i), one.began[i] / MICROSECONDS, one.trained[i] / MICROSECONDS)
            for one in times
            for i in np.flatnonzero(one.graph.active)
        ]
        by_kind[kind] = _summarize(
            kind, bars, times[-1].mixed, np.full(clients, rounds), devices, work
        )
    horizon = int(timer.advance(push(rounds), work, size).began.max())  # as long as in step
    jobs = Push(devices, work, size, push).jobs_until(horizon)
    by_kind["nobody"] = _summarize_jobs(jobs, horizon, devices, work)
    return by_kind


def _summarize(
    kind: str,
    bars: list[tuple[int, float, float]],
    ends: Integers,
    rounds: Integers,
    devices: Devices,
    steps: Integers,
) -> Waiting:
    each: Floats = ends / MICROSECONDS / np.maximum(1, rounds)
    busy = np.bincount(
        [bar[0] for bar in bars], minlength=devices.clients
    ) * devices.work(steps) / MICROSECONDS  # fmt: skip
    idle = 1 - busy / np.maximum(ends / MICROSECONDS, 1e-9)
    return Waiting(TITLES[kind], bars, float(each.mean()), float(idle.mean()), float(each.max()))


def _summarize_jobs(jobs: Jobs, horizon: int, devices: Devices, steps: Integers) -> Waiting:
    begins, ends = jobs.start / MICROSECONDS, jobs.finish / MICROSECONDS
    bars = list(zip(jobs.client.tolist(), begins.tolist(), ends.tolist(), strict=True))
    counts = np.bincount(jobs.client, minlength=devices.clients)
    whole_time = np.full(devices.clients, horizon, dtype=np.int64)
    whole = _summarize("nobody", bars, whole_time, counts, devices, steps)
    seconds = horizon / MICROSECONDS * devices.clients / max(1, len(jobs))
    return Waiting(whole.title, bars, seconds, whole.waiting, whole.slowest)


def draw_waiting(by_kind: dict[str, Waiting], path: Path, seconds: float | None = None) -> None:
    """A Gantt picture: a bar where a client trains, nothing where it waits or is away."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.1 * len(by_kind)), layout="constrained", facecolor="white")
    panels = figure.subplots(len(by_kind), 1, sharex=True, squeeze=False)[:, 0]
    end = seconds or max(end for one in by_kind.values() for *_, end in one.training)
    for axes, one in zip(panels, by_kind.values(), strict=True):
        _draw_bars(axes, one, end)
    panels[-1].set_xlabel("seconds")
    save_picture(figure, path, "Who trains when")


def _draw_bars(axes: Axes, one: Waiting, end: float) -> None:
    rows = np.array([bar[0] for bar in one.training])
    begins = np.array([bar[1] for bar in one.training])
    lengths = np.array([bar[2] for bar in one.training]) - begins
    axes.barh(rows, lengths, left=begins, height=0.8, color="#0072B2", edgecolor="white", lw=0.3)
    axes.set_xlim(0, end)
    axes.set_ylabel("client")
    axes.set_title(
        f"{one.title}: {one.seconds:.1f} s a round, {one.waiting:.0%} waiting", fontsize=9
    )
