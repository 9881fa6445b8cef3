"""Models that seem to answer every question alike: a network that training has destroyed.

It diverges nowhere and its accuracy looks like a number; it is the share of one class.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quiverfl.results.groups import Group
from quiverfl.results.run_files import RunResult

STAGE = "local"
"""Right after training. Communication mixes models, so that even good ones may look like this."""


def constant_answer_notes(groups: Sequence[Group]) -> list[str]:
    """A sentence for every experiment in which most clients look like that."""
    notes = []
    for group in groups:
        counted = [_suspects(run) for run in group.runs]
        suspects, clients = (sum(column) for column in zip(*counted, strict=True))
        if 2 * suspects > clients:
            notes.append(
                f"{group.label}: {suspects} of {clients} clients score exactly the share of one "
                "class in their test data, as a model does that gives one answer to everything. "
                "Training may have destroyed it: try a smaller training.lr."
            )
    return notes


def _suspects(run: RunResult) -> tuple[int, int]:
    """How many clients score exactly the share of one class, of those that have two or more."""
    counts, history = run.test_counts, run.history
    if counts is None or "accuracy" not in history:
        return 0, 0
    local = history[history["stage"] == STAGE]
    last = local[local["round"] == local["round"].max()].set_index("client")["accuracy"]
    several = [c for c in last.index if c < len(counts) and np.count_nonzero(counts[c]) > 1]
    right = {c: last[c] * counts[c].sum() for c in several}
    shares = {c: counts[c][counts[c] > 0] for c in several}
    alike = [c for c in several if bool((np.abs(shares[c] - right[c]) < 1e-3).any())]
    return len(alike), len(several)
