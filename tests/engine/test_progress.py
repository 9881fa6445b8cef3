"""What is shown while a run goes, on a terminal of any width."""

from __future__ import annotations

import re

import numpy as np
import pytest

from quiverfl.runs.progress import progress

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("label", ["dfedpgp", "dfedavgmp-seed10"])
def test_rounds_and_time_come_first_and_are_always_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int, label: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress(label, 200, quiet=False) as watcher:
        assert watcher is not None
        for round in range(40):
            for stage in ("local", "mixed"):
                metrics = {"accuracy": np.full(3, 0.8312), "loss": np.full(3, 1.0)}
                watcher.on_evaluation(round, stage, metrics)
            watcher.on_round_end({"round": round})
    last = CODES.sub("", capsys.readouterr().err).replace("\r", "\n").rstrip().splitlines()[-1]
    assert len(last) <= width
    assert re.match(rf"(━+╸?╺?━* )? *40/200 0:00:0\d \S+ +{label} +acc", last), last
    assert ("━" in last) == (width >= 120)
    assert ("0.8312 local, 0.8312 mixed" in last) == (width >= 80)
