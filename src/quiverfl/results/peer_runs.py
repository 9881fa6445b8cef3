"""What several peers recorded of one run, put together: each knows its own client and no other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from quiverfl.results.run_files import Counts, RunResult

if TYPE_CHECKING:
    import pandas as pd

ADDED = ("sent_bytes", "received_bytes", "network_bytes", "active", "steps")
SMALLEST = ("mu_min",)
"""Of the rest, the largest counts: the round is over when the slowest peer has ended it."""


def joined_peers(runs: Iterable[RunResult]) -> list[RunResult]:
    """The same runs, with the peers of one run and seed as one, in the place of the first."""
    found: dict[object, list[RunResult]] = {}
    for run in runs:
        name = run.member.get("run")
        key = (name, run.experiment, run.seed) if name is not None else run.path
        found.setdefault(key, []).append(run)
    return [_joined(peers) if peers[0].member else peers[0] for peers in found.values()]


def _joined(peers: Sequence[RunResult]) -> RunResult:
    import pandas as pd

    own = [run.history[run.history["client"] == run.member["number"]] for run in peers]
    history = pd.concat(own, ignore_index=True).sort_values(
        ["round", "stage", "client"], ignore_index=True
    )
    return replace(
        peers[0],
        history=history.drop_duplicates(["round", "stage", "client"], ignore_index=True),
        rounds=_rounds([run.rounds for run in peers]),
        train_counts=_counts([run.train_counts for run in peers]),
        test_counts=_counts([run.test_counts for run in peers]),
        finished=all(run.finished for run in peers),
        diverged=next((run.diverged for run in peers if run.diverged is not None), None),
    )


def _rounds(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    import pandas as pd

    whole = pd.concat(frames, ignore_index=True)
    how = {
        name: "sum" if name in ADDED else "min" if name in SMALLEST else "max"
        for name in whole.columns
        if name != "round"
    }
    together: pd.DataFrame = whole.groupby("round", as_index=False).agg(how)
    return together


def _counts(known: Sequence[Counts | None]) -> Counts | None:
    """A peer knows how the run's data set is shared out, or its own rows alone."""
    there = [counts for counts in known if counts is not None]
    classes = max((counts.shape[1] for counts in there), default=0)
    if not there:
        return None
    wide = [np.pad(counts, ((0, 0), (0, classes - counts.shape[1]))) for counts in there]
    largest: Counts = np.maximum.reduce(wide)
    return largest
