"""How long a sweep takes is told before it starts, from runs or short trials; then what is left."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from quiverfl.data.sources import load_dataset
from quiverfl.runs.config import Config, parse_config
from quiverfl.sweeps import estimate as estimating
from quiverfl.sweeps.display import Tally, _Bars, _Lines
from quiverfl.sweeps.estimate import Estimate, cost_class, estimate_seconds, trial
from quiverfl.sweeps.executor import Outcome
from quiverfl.sweeps.plan import Cell, SweepFolder


def config(**sections: dict[str, Any]) -> Config:
    tree = {
        "data": {"clients": 12, "samples_per_client": 40, "test_per_client": 10},
        "model": {"hidden": [8]},
        "method": {"name": "dfedavgm", "epochs": 1},
        "training": {"batch_size": 10},
        "run": {"rounds": 20},
    }
    return parse_config({name: {**tree.get(name, {}), **sections.get(name, {})} for name in tree})


@pytest.mark.parametrize(
    ("sections", "same"),
    [
        ({"run": {"seed": 3}}, True),
        ({"run": {"rounds": 99}}, True),
        ({"training": {"lr": 1.5, "clip_norm": 1.0}}, True),
        ({"data": {"partition": "pathological", "classes_per_client": 2}}, True),
        ({"data": {"samples_per_client": 20}}, False),
        ({"training": {"batch_size": 5}}, False),
        ({"method": {"epochs": 2}}, False),
        ({"model": {"hidden": [9]}}, False),
        ({"run": {"evaluate_every": 2}}, False),
        ({"run": {"epoch_groups": [1, 2]}}, False),
    ],
)
def test_what_costs_time_and_what_does_not(sections: dict[str, Any], same: bool) -> None:
    assert (cost_class(config(**sections)) == cost_class(config())) is same


def write_rounds(places: SweepFolder, cell: Cell, seconds: list[float]) -> None:
    folder = places.run(cell)
    folder.mkdir(parents=True)
    lines = [json.dumps({"round": t, "seconds": s}) + "\n" for t, s in enumerate(seconds)]
    (folder / "rounds.jsonl").write_text("".join(lines))


def test_a_cell_that_ran_tells_the_pace_of_its_kind_without_a_trial(tmp_path: Path) -> None:
    places = SweepFolder(tmp_path)
    done, begun, new = (Cell(config(run={"seed": seed})) for seed in range(3))
    write_rounds(places, done, [2.0] * 20)
    write_rounds(places, begun, [9.0] * 5)
    found = estimate_seconds([begun, new], places, [done, begun, new])
    assert found.seconds == {begun.name: 30.0, new.name: 40.0}
    assert (found.trials, found.measured, found.unknown) == (0, 2, 0)
    assert found.total(jobs=1) == 70.0
    assert found.total(jobs=2) == 40.0  # never less than the longest cell


def test_each_kind_is_tried_once(tmp_path: Path) -> None:
    kinds = [config(run={"seed": seed}, method={"epochs": 1 + seed % 2}) for seed in range(4)]
    turns: list[tuple[int, int]] = []
    found = estimate_seconds(
        [Cell(kind) for kind in kinds],
        SweepFolder(tmp_path),
        on_trial=lambda done, of: turns.append((done, of)),
    )
    assert turns == [(0, 2), (1, 2)]
    assert all(seconds is not None and seconds > 0 for seconds in found.seconds.values())


@pytest.mark.parametrize(("samples", "steps"), [(20, 12 * 2), (110, 12 * 11)])
def test_a_trial_is_scaled_to_the_work_it_stands_for(
    samples: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock by which a step takes a second, a mixing or an evaluation half of one."""

    def on_round_end(self: Any, record: dict[str, Any]) -> None:
        cost = {"train_seconds": float(np.sum(record["steps"])), "mix_seconds": 0.5}
        self._records.append({**cost, "evaluate_seconds": 0.5})

    monkeypatch.setattr(estimating._Keeping, "on_round_end", on_round_end)
    wanted = config(data={"samples_per_client": samples}, run={"evaluate_every": 2})
    # The trial has 10 clients with 10 samples, in training and in testing; the whole has 12.
    expected = steps + 0.5 * 12 / 10 + 0.5 * (12 * 10) / (10 * 10) / 2
    assert trial(wanted, load_dataset("digits")) == pytest.approx(expected)


def test_what_cannot_be_tried_is_unknown_and_no_error(tmp_path: Path) -> None:
    cell = Cell(config(model={"wrong": 1}))
    found = estimate_seconds([cell], SweepFolder(tmp_path))
    assert found == Estimate({cell.name: None}, trials=1, measured=0, reason=found.reason)
    assert "no option 'wrong'" in found.reason
    assert found.unknown == 1
    assert found.total(jobs=2) == 0.0


def test_cells_weigh_what_they_were_estimated_at() -> None:
    long, short = Cell(config()), Cell(config(run={"rounds": 10}))
    tally = Tally([long, short], {long.name: 30.0, short.name: 10.0})
    assert tally.fraction == 0.0
    tally.record_progress(long, 1)
    tally.record_progress(long, 10)
    assert math.isclose(tally.fraction, 0.375)  # 10 of 20 rounds of three quarters
    tally.conclude(Outcome(short, "finished"))
    assert math.isclose(tally.fraction, 0.625)
    tally.conclude(Outcome(long, "diverged"))
    assert tally.fraction == 1.0
    assert tally.describe() == "2 of 2 cells, 1 failed"


def test_a_resumed_cell_counts_from_where_it_went_on() -> None:
    cell = Cell(config())
    tally = Tally([cell], {})
    tally.record_progress(cell, 11)  # the first ten were there
    assert math.isclose(tally.fraction, 0.1)


def test_plain_lines_say_how_each_cell_ended() -> None:
    cell = Cell(config(), case="Digits")
    text = io.StringIO()
    lines = _Lines(Console(file=text, width=200), Tally([cell], {}))
    lines.on_cell_start(cell)
    lines.on_cell_progress(cell, 3, {"local": 0.5})
    lines.on_cell_end(Outcome(cell, "failed", 2.0, "no [memory] left"))
    assert text.getvalue() == (
        "[1 of 1 cells, 1 failed, about 0.0 s left] DFedAvgM, Digits, seed 0: failed in 2.0 s. "
        "no [memory] left\n"
    )


def test_on_a_terminal_there_is_a_bar_for_each_cell_that_runs() -> None:
    from rich.progress import Progress, TextColumn

    cells = [Cell(config(run={"seed": seed}), case="Digits") for seed in range(2)]
    columns = (TextColumn("{task.description}"), TextColumn("{task.fields[done]}"))
    display = Progress(*columns, console=Console(file=io.StringIO(), force_terminal=True))
    bars = _Bars(display, Tally(cells, {}))
    for cell in cells:
        bars.on_cell_start(cell)
    bars.on_cell_progress(cells[0], 1, {})
    bars.on_cell_progress(cells[0], 5, {"local": 0.25, "mixed": 0.5})
    shown = [
        (task.description, task.completed, task.fields["done"], task.fields["score"])
        for task in display.tasks
    ]
    assert shown == [
        ("[bold]all cells", 0.125, "0 of 2 cells", ""),
        ("DFedAvgM, Digits, seed 0", 5, "5/20", "local 0.2500, mixed 0.5000"),
        ("DFedAvgM, Digits, seed 1", 0, "0/20", ""),
    ]
    bars.on_cell_end(Outcome(cells[0], "finished", 1.0))
    assert [task.fields["done"] for task in display.tasks] == ["1 of 2 cells", "0/20"]


def test_what_is_enough_for_now_costs_less(tmp_path: Path) -> None:
    """A rung of a race: so many of the rounds, not all."""
    places = SweepFolder(tmp_path)
    begun, new = (Cell(config(run={"seed": seed})) for seed in range(2))
    write_rounds(places, begun, [2.0] * 3)
    found = estimate_seconds([begun, new], places, until={begun.name: 5, new.name: 5})
    assert found.seconds == {begun.name: 4.0, new.name: 10.0}
