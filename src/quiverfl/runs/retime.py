"""Seconds and joules for a finished synchronous run on given devices; nothing is trained.

A run has recorded all that time depends on: training clients, links, steps and bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quiverfl.clock.devices import Devices
from quiverfl.clock.rounds import RoundTimes
from quiverfl.clock.run import Record, time_records
from quiverfl.clock.settings import (
    ClockSettings,
    DeviceSettings,
    NetworkSettings,
    make_devices,
)
from quiverfl.errors import QuiverError
from quiverfl.results.run_files import RunResult, read_lines
from quiverfl.results.summary import rounds_frame, summarize_attacked
from quiverfl.runs.experiment import make_method, make_run_topology
from quiverfl.runs.folder import RunFolder
from quiverfl.runs.run import AnyRun, Run, SavedRun
from quiverfl.topologies.topology import Topology

if TYPE_CHECKING:
    import pandas as pd


class RetimedRun(AnyRun):
    """A run with the times of given devices: what it learned is as it was.

    `rounds` has three more columns: `clock` (seconds when all clients have mixed), `clock_local`
    (when all have trained) and `joules` of the round. `times` has them for each client.
    """

    def __init__(self, run: Run | SavedRun, times: list[RoundTimes], records: list[Record]) -> None:
        self.run, self.times = run, times
        self.method_title, self.clients = run.method_title, run.clients
        self.planned_rounds, self._records = run.planned_rounds, records

    @property
    def done_rounds(self) -> int:
        return self.run.done_rounds

    @property
    def history(self) -> pd.DataFrame:
        return self.run.history

    @property
    def rounds(self) -> pd.DataFrame:
        return rounds_frame(self._records)

    @property
    def summary(self) -> dict[str, Any]:
        attackers = self.run.summary.get("attackers", {}).get("clients", [])
        return {**self.run.summary, **summarize_attacked(self.history, self.rounds, attackers)}


def retime(run: Run | SavedRun | Path | str, devices: Devices, waits: str = "graph") -> RetimedRun:
    """Give a synchronous run the seconds and joules that it would have taken on these devices.

    `waits` is "graph" (a client goes on when what its graph promises is here) or "all" (when
    all are done). A run folder does as well as a run.
    """
    if waits not in ("graph", "all"):
        raise QuiverError(
            f'waits = {waits!r}: a synchronous run waits for "graph" or "all"; a run in which '
            "nobody waits is another run (clock.waits)."
        )
    if not isinstance(devices, Devices):
        raise QuiverError(f"retime: devices is a {type(devices).__name__}: give qv.Devices(…).")
    if isinstance(run, Path | str):
        from quiverfl.runs.run import load_run

        run = load_run(run)
    if isinstance(run, SavedRun):
        topology = _read_topology(run.path, run.clients)
        records: list[Record] = _read_records(run.path)
    elif isinstance(run, Run):
        topology, records = run.simulation.topology, list(run._history.records)
        if run.simulation.timing is not None:
            _check_clock(run.simulation.timing.clock)
    else:
        raise QuiverError(f"retime: {type(run).__name__} is no run: give a Run or a run folder.")
    times = time_records(_take_latest(records), topology, devices.check_clients(run.clients), waits)
    return RetimedRun(run, times, add_times(records, times))


def retime_result(
    result: RunResult, devices: DeviceSettings, network: NetworkSettings, waits: str = "graph"
) -> RunResult:
    """The same for the report: a run folder's result with the columns of time."""
    config = RunFolder(result.path).config()
    seed, size = config.run.seed, config.training.batch_size
    made = make_devices(devices, network, result.clients, seed, size)
    records = _read_records(result.path)
    topology = _read_topology(result.path, result.clients)
    times = time_records(_take_latest(records), topology, made, waits)
    return replace(result, rounds=rounds_frame(add_times(records, times)))


def _read_records(folder: Path) -> list[Record]:
    """The lines of its rounds: the table at the end has sums over all clients alone."""
    records: list[Record] = list(read_lines(folder / "rounds.jsonl"))
    if not records and (folder / "rounds.parquet").exists():
        raise QuiverError(
            f"{folder} has no lines of rounds (rounds.jsonl), which say the steps and bytes of "
            "every client, so its times cannot be told: re-time the folder as the run left it."
        )
    return records


def add_times(records: Iterable[Record], times: Iterable[RoundTimes]) -> list[Record]:
    return [{**r, **t.record()} for r, t in zip(_take_latest(records), times, strict=True)]


def _take_latest(records: Iterable[Record]) -> list[Record]:
    """One record of every round, as it was recorded last, in order."""
    latest = {int(record["round"]): record for record in records}
    return [record for _, record in sorted(latest.items())]


def _check_clock(clock: ClockSettings) -> None:
    """Refuse a run whose graphs were made by the speed of its own devices."""
    if clock.away == "skip" or clock.deadline is not None:
        raise QuiverError(
            "this run left out of its rounds who was away or late on its own devices: on others it "
            "would be another run. Re-time one without clock.away and clock.deadline."
        )


def _read_topology(folder: Path, clients: int) -> Topology:
    config = RunFolder(folder).config()
    _check_clock(config.clock)
    return make_run_topology(config, make_method(config), clients)
