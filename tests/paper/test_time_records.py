"""What docs/explanation/time.md says of accuracy and seconds is what the records of runs say."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import quiverfl as qv
from quiverfl.clock.devices import Devices
from quiverfl.clock.run import time_records
from quiverfl.clock.settings import DeviceSettings, NetworkSettings, make_devices
from quiverfl.paper.reproduce.catalogue import ITEMS, make_item_cells, rate_settings
from quiverfl.runs.experiment import make_method, make_run_topology
from quiverfl.runs.folder import RunFolder
from quiverfl.sweeps.plan import Choice
from quiverfl.topologies.topology import count_uploads
from quiverfl.types import Floats

ROOT = Path(__file__).parents[2]
CELLS = ROOT / "results" / "cells"
PAGE = (ROOT / "docs" / "explanation" / "time.md").read_text()
PAPER = rate_settings("paper", "medium", None)
SLOW: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "compute and links 10×": ({"step": 0.5, "spread": 10}, {"up": 1.25e6, "spread": 10}),
    "equal devices": ({"step": 0.158}, {"up": 0.395e6}),
    "10×, 20 % away": (
        {"step": 0.5, "spread": 10, "away": 0.2, "mean_on": 120},
        {"up": 1.25e6, "spread": 10},
    ),
}
"""The cases of configs/sweeps/time.toml."""
END, TARGET = 240.0, 0.6


class Course(NamedTuple):
    """A run on the clock: at each evaluation the seconds, and what each client has spent so far."""

    seconds: Floats
    rounds: Floats
    megabytes: Floats
    joules: Floats
    local: Floats
    mixed: Floats

    def at(self, seconds: float, column: Floats) -> float:
        """Between two evaluations on the line from one to the other."""
        assert self.seconds[0] <= seconds <= self.seconds[-1]
        return float(np.interp(seconds, self.seconds, column))

    @property
    def reached(self) -> float:
        """When the better stage's accuracy is first at the target; nan if it is not."""
        best = np.maximum(self.local, self.mixed)
        after = np.flatnonzero(best >= TARGET)
        if not len(after):
            return np.nan
        k = int(after[0])
        if not k:
            return float(self.seconds[0])
        return float(np.interp(TARGET, best[k - 1 : k + 1], self.seconds[k - 1 : k + 1]))

    def row(self) -> list[str]:
        reached = self.reached
        numbers = [f"{self.at(END, self.rounds):.0f}"]
        numbers += [f"{100 * self.at(END, stage):.1f}" for stage in (self.local, self.mixed)]
        if np.isnan(reached):
            return [*numbers, "–", "–", "–"]
        spent = [self.at(reached, column) for column in (self.megabytes, self.joules)]
        return [*numbers, f"{reached:.0f}", f"{spent[0]:.0f}", f"{spent[1]:.0f}"]


def accuracies(history: Any) -> tuple[list[int], Floats, Floats]:
    means = history.groupby(["stage", "round"])["accuracy"].mean()
    return means["local"].index.tolist(), means["local"].to_numpy(), means["mixed"].to_numpy()


def read_events(path: Path) -> Course:
    """A run that was simulated without waiting."""
    run = qv.load_run(path)
    _, local, mixed = accuracies(run.history)
    rounds, clients = run.rounds, run.clients
    return Course(
        rounds["clock"].to_numpy(),
        rounds["jobs"].cumsum().to_numpy() / clients,
        rounds["network_bytes"].cumsum().to_numpy() / clients / 1e6,
        rounds["joules"].cumsum().to_numpy() / clients,
        local,
        mixed,
    )


def read_rounds(path: Path, devices: Devices) -> Course:
    """A synchronous run, re-timed. Its record has sums over clients, which all do the same."""
    run, config = qv.load_run(path), RunFolder(path).config()
    topology = make_run_topology(config, make_method(config), run.clients)
    records = []
    for row in run.rounds.to_dict("records"):
        graph = topology(int(row["round"]))
        uploads, active = count_uploads(graph), int(graph.active.sum())
        size, rest = divmod(row["sent_bytes"], max(1, int(uploads.sum())))
        assert (rest, row["steps"] % active, active) == (0, 0, row["active"])
        steps = graph.active * (row["steps"] // active)
        sent = (uploads * size).tolist()
        records.append({"round": row["round"], "steps": steps.tolist(), "sent_bytes": sent})
    times = time_records(records, topology, devices, "graph")
    seen, local, mixed = accuracies(run.history)
    clients = run.clients
    return Course(
        np.array([times[k].record()["clock"] for k in seen]),
        np.cumsum([time.graph.active.sum() / clients for time in times])[seen],
        np.cumsum([time.sent.sum() / clients / 1e6 for time in times])[seen],
        np.cumsum([time.joules.sum() / clients for time in times])[seen],
        local,
        mixed,
    )


def devices_of(case: str, seed: int) -> Devices:
    own, network = SLOW[case]
    made = DeviceSettings(**own), NetworkSettings(latency=0.05, **network)  # type: ignore[arg-type]
    return make_devices(*made, 50, seed)


def in_step(method: str, case: str, seed: int) -> Course:
    choice = Choice((method,), (seed,), ("CIFAR-10 Dir-0.3",), PAPER)
    (cell,) = make_item_cells(ITEMS.find("table1"), "medium", choice)
    return read_rounds(CELLS / cell.name, devices_of(case, seed))


def without_waiting(waits: str, step: str | None, seed: int) -> Course:
    method = "dfedavgmp" if waits == "pairs" else "dfedpgp"
    choice = Choice((method,), (seed,), ("compute and links 10×",), PAPER)
    cells = make_item_cells(ITEMS.find("time"), "medium", choice)
    points = [(dict(cell.point), cell.name) for cell in cells]
    (name,) = [
        name
        for point, name in points
        if (point["clock.waits"], point.get("method.step")) == (waits, step)
    ]
    return read_events(CELLS / name)


ROWS: dict[str, Any] = {
    "Local": lambda seed: in_step("local", "compute and links 10×", seed),
    "FedAvg": lambda seed: in_step("fedavg", "compute and links 10×", seed),
    "FedPer": lambda seed: in_step("fedper", "compute and links 10×", seed),
    "DFedAvgM-P, in step": lambda seed: in_step("dfedavgmp", "compute and links 10×", seed),
    "DFedPGP, in step": lambda seed: in_step("dfedpgp", "compute and links 10×", seed),
    "DFedAvgM-P, pairs": lambda seed: without_waiting("pairs", None, seed),
    "DFedPGP, nobody, debiased step": lambda seed: without_waiting("nobody", "debiased", seed),
    "DFedPGP, nobody, the paper's step": lambda seed: without_waiting("nobody", "paper", seed),
}
SEEDS = dict.fromkeys(ROWS, (0, 1)) | dict.fromkeys(list(ROWS)[-1:], (0,))


def row(title: str) -> str:
    numbers = zip(*(ROWS[title](seed).row() for seed in SEEDS[title]), strict=True)
    cells = (" / ".join(seeds) if set(seeds) != {"–"} else "–" for seeds in numbers)
    return f"| {title} | {' | '.join(cells)} |"


@pytest.mark.parametrize("title", ROWS)
def test_the_table_against_seconds_is_that_of_the_records(title: str) -> None:
    assert row(title) in PAGE


@pytest.mark.parametrize("case", ["equal devices", "10×, 20 % away"])
def test_seconds_with_other_devices_are_those_of_the_records(case: str) -> None:
    """Of a push, the undirected exchange and FedPer, in this order."""
    methods = ("dfedpgp", "dfedavgmp", "fedper")
    words = [
        " / ".join(f"{in_step(method, case, seed).reached:,.0f}" for seed in (0, 1))
        for method in methods
    ]
    text = " ".join(PAGE.split())
    ways = ("after {} s, the undirected exchange after {}, FedPer after {}.", "{}, {} and {} s.")
    assert any(way.format(*words) in text for way in ways)
