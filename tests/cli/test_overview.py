"""What is shown while many cells run, on a terminal of any width."""

from __future__ import annotations

import re

import pytest

from quiverfl.runs.config import parse_config
from quiverfl.sweeps.display import show_sweep
from quiverfl.sweeps.executor import Outcome
from quiverfl.sweeps.plan import Cell

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.mark.parametrize("width", [60, 80, 140])
def test_rounds_and_time_come_first_and_are_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    case = "alpha 0.1, neighbors 10, personal_lr 0.001, lr_decay 0.995"
    cells = [
        Cell(
            parse_config({"method": {"name": "dfedavgmp"}, "run": {"rounds": 200, "seed": seed}}),
            case,
        )
        for seed in (0, 1)
    ]
    with show_sweep(cells, {}, quiet=False) as watcher:
        watcher.on_cell_start(cells[0])
        watcher.on_cell_progress(cells[0], 40, {"local": 0.8312, "mixed": 0.8111})
        watcher.on_cell_end(Outcome(cells[0], "finished", 12.0))
        watcher.on_cell_start(cells[1])
        watcher.on_cell_progress(cells[1], 40, {"local": 0.8312, "mixed": 0.8111})
    shown = CODES.sub("", capsys.readouterr().err).replace("\r", "\n").rstrip().splitlines()
    whole, cell = shown[-2:]
    assert max(map(len, shown)) <= width
    assert re.match(r"1 of 2 cells +0:00:0\d \S+ .*all cells", whole)
    assert re.match(r"40/200 +0:00:0\d \S+ .*DFedAvgM-P", cell)
