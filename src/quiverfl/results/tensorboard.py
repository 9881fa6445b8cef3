"""A run as TensorBoard event files, for those who look at everything there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from quiverfl.errors import QuiverError
from quiverfl.extras import require
from quiverfl.results.run_files import read_run
from quiverfl.results.summary import STAGES, by_client, spread

COLUMNS = {
    "network_bytes": "cost/bytes of the round",
    "busiest_bytes": "cost/bytes of the busiest node",
    "steps": "cost/local steps of the round",
    "seconds": "cost/seconds of the round",
    "mu_min": "mass/smallest",
    "mu_max": "mass/largest",
    "consensus": "consensus distance",
    "gradient_shared": "gradient/shared part at the mean",
    "gradient_personal": "gradient/personal parts",
}


def write_events(run_folder: Path, out: Path) -> int:
    """Write a run's history into the folder `out`; how many points were written.

    Steps are rounds, counted from 1; times are those of the run.
    """
    require("tensorboard", "writing event files")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    if out.is_dir() and any(out.glob("*tfevents*")):
        raise QuiverError(f"{out} holds event files already: choose another folder.")
    run = read_run(run_folder)
    started = (run_folder / "config.json").stat().st_mtime
    clock = _clock(run.rounds)
    try:
        writer = EventFileWriter(str(out), filename_suffix=".quiver")
    except OSError as problem:
        raise QuiverError(f"{out} cannot be written: {problem.strerror}.") from problem
    count = 0
    for name, round, number in (*_scores(run.history), *_per_round(run.rounds)):
        value = Summary.Value(tag=name, simple_value=number)
        at = started + clock.get(round, 0.0)
        writer.add_event(Event(wall_time=at, step=round + 1, summary=Summary(value=[value])))
        count += 1
    writer.close()
    return count


Points = Iterator[tuple[str, int, float]]


def _scores(history: pd.DataFrame) -> Points:
    """(name, round, number) for every metric and stage: the mean and the worst tenth."""
    for metric in history.columns.difference(["round", "stage", "client"]):
        for stage in STAGES:
            for round, row in by_client(history, stage, metric).iterrows():
                figures = spread(row, metric)
                yield f"{metric}/{stage}", int(str(round)), figures["mean"]
                yield f"{metric}, worst 10 %/{stage}", int(str(round)), figures["worst10"]


def _per_round(rounds: pd.DataFrame) -> Points:
    for column, name in COLUMNS.items():
        if column in rounds:
            known = rounds[["round", column]].dropna().astype(float)
            for round, number in known.itertuples(index=False):
                yield name, int(round), float(number)


def _clock(rounds: pd.DataFrame) -> dict[int, float]:
    """Seconds since the start at the end of each round."""
    if "seconds" not in rounds:
        return {}
    return dict(zip(rounds["round"].astype(int), rounds["seconds"].cumsum(), strict=True))
