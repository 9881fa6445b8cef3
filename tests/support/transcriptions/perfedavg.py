"""Per-FedAvg, first order: the gradient after one step of adaptation; evaluated after one, too."""

from __future__ import annotations

import numpy as np

from quiverfl.data.batches import ADAPT
from transcriptions.spec import (
    Outcome,
    Setting,
    State,
    Weights,
    averaged,
    batches,
    clip,
    copied,
    gradient,
    same_rate,
    sample_counts,
    step,
)


def halves(rows: np.ndarray, mutant: str | None) -> tuple[np.ndarray, np.ndarray]:
    """The first ⌈n/2⌉ and the rest; a single sample is both."""
    if len(rows) == 1 or mutant == "both gradients on the whole batch":
        return rows, rows
    middle = (len(rows) + 1) // 2
    if mutant == "first half rounded down":
        middle = len(rows) // 2
    if mutant == "halves swapped":
        return rows[middle:], rows[:middle]
    if mutant == "both gradients on the first half":
        return rows[:middle], rows[:middle]
    return rows[:middle], rows[middle:]


def perfedavg(
    setting: Setting,
    start: list[State],
    *,
    epochs: int,
    inner_lr: float,
    weighting: str = "samples",
    mutant: str | None = None,
) -> Outcome:
    U, V, W = setting.parts
    w = [copied({**state["u"], **state["v"]}) for state in start]
    trained = [copied(w[i]) for i in setting.clients]
    outcome = Outcome()

    def adapted(i: int, t: int, weights: Weights) -> Weights:
        """A copy, one plain step away."""
        if mutant == "no adaptation before evaluation":
            return copied(weights)
        of_round = t if mutant == "adaptation batches of the round" else 0
        of_phase = 0 if mutant == "adaptation on the batches of training" else ADAPT
        rows = next(iter(batches(setting, i, of_round, of_phase, 0)))
        if mutant == "adaptation on half a batch":
            rows = rows[: (len(rows) + 1) // 2]
        if mutant == "adaptation on the whole set":
            rows = np.arange(setting.samples(i))
        g = gradient(setting, i, rows, weights, W)
        if mutant == "adaptation clipped":
            g = clip(setting, g)
        if mutant == "adaptation decayed":
            g = {n: g[n] + setting.training.weight_decay * weights[n] for n in W}
        rate = setting.rate(t) if mutant == "adaptation with the outer rate" else inner_lr
        return {n: weights[n] - rate * g[n] for n in W}

    for t in range(setting.rounds):
        active = setting.active(t)
        rate = same_rate(W, setting.rate(t))
        for i in setting.clients:
            if not active[i]:
                continue
            buffer: Weights = {}
            for epoch in range(setting.epochs(i, epochs)):
                for rows in batches(setting, i, t, 0, epoch):
                    first, second = halves(rows, mutant)
                    g1 = gradient(setting, i, first, w[i], W)
                    if mutant == "inner gradient clipped":
                        g1 = clip(setting, g1)
                    alpha = inner_lr
                    if mutant == "inner step with the outer rate":
                        alpha = setting.rate(t)
                    if mutant == "inner rate decayed":
                        alpha = inner_lr * setting.training.lr_decay**t
                    inner = {n: w[i][n] - alpha * g1[n] for n in W}
                    g2 = gradient(setting, i, second, inner, W)
                    decayed = inner if mutant == "decay at the inner point" else w[i]
                    if mutant == "step from the inner point":
                        w[i] = inner
                    step(setting, w[i], decayed, g2, buffer, rate)
            trained[i] = copied(w[i])
        outcome.local.append([adapted(i, t, trained[i]) for i in setting.clients])
        if mutant == "adaptation not on a copy":
            for i in setting.clients:
                if active[i]:
                    w[i] = copied(outcome.local[-1][i])

        by = "uniform" if mutant == "not weighted by samples" else weighting
        w = averaged(setting.weights(t), w, sample_counts(setting, by))
        outcome.mixed.append([adapted(i, t, w[i]) for i in setting.clients])
    outcome.state = [
        {"u": {n: w[i][n] for n in U}, "v": {n: w[i][n] for n in V}, "mu": 1.0}
        for i in setting.clients
    ]
    return outcome
