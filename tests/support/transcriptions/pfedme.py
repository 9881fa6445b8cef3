"""pFedMe, Algorithm 1 of T Dinh et al. 2020: w follows θ, the solution of a proximal problem."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

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


def endless(setting: Setting, i: int, t: int) -> Iterator[np.ndarray]:
    """The batches of phase 1, epoch after epoch."""
    epoch = 0
    while True:
        yield from batches(setting, i, t, 1, epoch)
        epoch = epoch + 1


def pfedme(
    setting: Setting,
    start: list[State],
    *,
    steps: int,
    inner_steps: int,
    proximal: float,
    mutant: str | None = None,
) -> Outcome:
    U, V, W = setting.parts
    w = [copied({**state["u"], **state["v"]}) for state in start]
    theta = [copied(w[i]) for i in setting.clients]
    trained = [copied(theta[i]) for i in setting.clients]
    outcome = Outcome()
    for t in range(setting.rounds):
        p, active = setting.weights(t), setting.active(t)
        eta, eta_theta = setting.rate(t), setting.personal_rate(t)
        if mutant == "personal_lr ignored":
            eta_theta = setting.rate(t)
        if mutant == "personal_lr not decayed":
            eta_theta = setting.personal_rate(0)
        for i in setting.clients:
            if not active[i]:
                continue
            # Phase 0.
            if mutant != "theta kept between rounds":
                theta[i] = copied(w[i])
            received = copied(w[i])
            # Phase 1.
            drawn = endless(setting, i, t)
            buffer: Weights = {}
            for _ in range(steps):
                rows = next(drawn)
                if mutant == "theta restarts at every batch":
                    theta[i] = copied(w[i])
                if mutant == "a new buffer for every batch":
                    buffer = {}
                for k in range(1 if mutant == "one inner step" else inner_steps):
                    if mutant == "a new batch for every inner step" and k > 0:
                        rows = next(drawn)
                    anchor = received if mutant == "anchor is the received model" else w[i]
                    g = gradient(setting, i, rows, theta[i], W)
                    if mutant == "proximal term after clipping":
                        g = clip(setting, g)
                    for n in W:
                        g[n] = g[n] + proximal * (theta[i][n] - anchor[n])
                    unclipped = "no clipping" if mutant == "proximal term after clipping" else None
                    step(setting, theta[i], theta[i], g, buffer, same_rate(W, eta_theta), unclipped)
                pull = eta_theta if mutant == "w pulled with personal rate" else eta
                for n in W:
                    away = w[i][n] - theta[i][n]
                    if mutant == "w decayed too":
                        away = away + setting.training.weight_decay / proximal * w[i][n]
                    w[i][n] = w[i][n] - pull * proximal * away
            trained[i] = copied(w[i] if mutant == "w evaluated" else theta[i])
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        by = "uniform" if mutant == "not weighted by samples" else "samples"
        w = averaged(p, theta if mutant == "theta is sent" else w, sample_counts(setting, by))
        shown = w if mutant in ("w evaluated", "w evaluated after communication") else theta
        outcome.mixed.append([copied(shown[i]) for i in setting.clients])
    outcome.state = [
        {
            "u": {n: w[i][n] for n in U},
            "v": {n: w[i][n] for n in V},
            "theta_u": {n: theta[i][n] for n in U},
            "theta_v": {n: theta[i][n] for n in V},
            "mu": 1.0,
        }
        for i in setting.clients
    ]
    return outcome
