"""FedProx: FedAvg, every client held to the model it had at the start of the round."""

from __future__ import annotations

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


def fedprox(
    setting: Setting,
    start: list[State],
    *,
    epochs: int,
    proximal: float,
    weighting: str = "samples",
    mutant: str | None = None,
) -> Outcome:
    U, V, W = setting.parts
    w = [copied({**state["u"], **state["v"]}) for state in start]
    first = [copied(w[i]) for i in setting.clients]
    trained = [copied(w[i]) for i in setting.clients]
    pull = proximal
    if mutant == "proximal term left out":
        pull = 0.0
    if mutant == "proximal term halved":  # the factor of the objective taken for the gradient's
        pull = proximal / 2
    if mutant == "proximal term with the wrong sign":
        pull = -proximal
    outcome = Outcome()
    for t in range(setting.rounds):
        active = setting.active(t)
        rate = same_rate(W, setting.rate(t))
        for i in setting.clients:
            if not active[i]:
                continue
            anchor = copied(w[i])
            if mutant == "anchor is the initial model":
                anchor = copied(first[i])
            if mutant == "anchor is the last trained model":
                anchor = copied(trained[i])
            buffer: Weights = {}
            for epoch in range(setting.epochs(i, epochs)):
                if mutant == "anchor moves with w":
                    anchor = copied(w[i])
                for rows in batches(setting, i, t, 0, epoch):
                    g = gradient(setting, i, rows, w[i], W)
                    if mutant == "proximal term after clipping":
                        g = clip(setting, g)
                    held = U if mutant == "only u is held" else W
                    for n in held:
                        g[n] = g[n] + pull * (w[i][n] - anchor[n])
                    unclipped = "no clipping" if mutant == "proximal term after clipping" else None
                    step(setting, w[i], w[i], g, buffer, rate, unclipped)
            trained[i] = copied(w[i])
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        by = "uniform" if mutant == "not weighted by samples" else weighting
        w = averaged(setting.weights(t), w, sample_counts(setting, by))
        outcome.mixed.append([copied(w[i]) for i in setting.clients])
    outcome.state = [
        {"u": {n: w[i][n] for n in U}, "v": {n: w[i][n] for n in V}, "mu": 1.0}
        for i in setting.clients
    ]
    return outcome
