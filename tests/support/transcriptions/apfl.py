"""APFL, Algorithm 1 of Deng et al. 2020: a global model, an own one, and a mixture of the two."""

from __future__ import annotations

from transcriptions.spec import (
    Outcome,
    Setting,
    State,
    Weights,
    averaged,
    batches,
    copied,
    gradient,
    same_rate,
    sample_counts,
    step,
)


def apfl(
    setting: Setting,
    start: list[State],
    *,
    epochs: int,
    adaptive: bool = True,
    alpha: float = 0.5,
    mutant: str | None = None,
) -> Outcome:
    U, V, W = setting.parts
    w = [copied({**state["u"], **state["v"]}) for state in start]
    own = [copied(w[i]) for i in setting.clients]
    share = [alpha for _ in setting.clients]
    outcome = Outcome()

    def mixture(i: int) -> Weights:
        """α v + (1 − α) w."""
        if mutant == "own model evaluated unmixed":
            return copied(own[i])
        return {n: share[i] * own[i][n] + (1 - share[i]) * w[i][n] for n in W}

    trained = [mixture(i) for i in setting.clients]

    def adapt(i: int, t: int) -> None:
        """One plain gradient step of α on one batch."""
        phase = 1 if mutant == "alpha on the batch of training" else 0
        rows = next(iter(batches(setting, i, t, phase, 0)))
        at = {n: share[i] * own[i][n] + (1 - share[i]) * w[i][n] for n in W}
        if mutant == "alpha with the gradient at the own model":
            at = own[i]
        g = gradient(setting, i, rows, at, W)
        slope = 0.0
        for n in W:
            slope = slope + float(((own[i][n] - w[i][n]) * g[n]).sum())
        if mutant == "alpha climbs":
            slope = -slope
        eta = setting.training.lr if mutant == "alpha's rate not decayed" else setting.rate(t)
        share[i] = share[i] - eta * slope
        if mutant != "alpha not cut to [0, 1]":
            share[i] = min(1.0, max(0.0, share[i]))

    for t in range(setting.rounds):
        p, active = setting.weights(t), setting.active(t)
        rate = same_rate(W, setting.rate(t))
        for i in setting.clients:
            if not active[i]:
                continue
            if adaptive and mutant != "alpha after training":
                adapt(i, t)
            phase = 1 if adaptive else 0
            buffer_own: Weights = {}
            buffer: Weights = {}
            for epoch in range(setting.epochs(i, epochs)):
                for rows in batches(setting, i, t, phase, epoch):
                    if mutant == "global step first":
                        g = gradient(setting, i, rows, w[i], W)
                        step(setting, w[i], w[i], g, buffer, rate)
                    a = share[i]
                    bar = {n: a * own[i][n] + (1 - a) * w[i][n] for n in W}
                    at_bar = gradient(setting, i, rows, bar, W)
                    factor = 1.0 if mutant == "chain rule's alpha left out" else a
                    g_own = {n: factor * at_bar[n] for n in W}
                    g = gradient(setting, i, rows, w[i], W)
                    decayed = bar if mutant == "own decay at the mixture" else own[i]
                    step(setting, own[i], decayed, g_own, buffer_own, rate)
                    if mutant != "global step first":
                        step(setting, w[i], w[i], g, buffer, rate)
            if adaptive and mutant == "alpha after training":
                adapt(i, t)
            trained[i] = mixture(i)
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        by = "uniform" if mutant == "not weighted by samples" else "samples"
        w = averaged(p, w, sample_counts(setting, by))
        if mutant == "v averaged":
            own = averaged(p, own, sample_counts(setting))
        if mutant == "own model restarts at the global one":
            own = [copied(w[i]) for i in setting.clients]
        outcome.mixed.append([mixture(i) for i in setting.clients])
        if mutant == "the mixture of training evaluated":
            outcome.mixed[-1] = [copied(trained[i]) for i in setting.clients]
    outcome.state = [
        {
            "u": {n: w[i][n] for n in U},
            "v": {n: w[i][n] for n in V},
            "own_u": {n: own[i][n] for n in U},
            "own_v": {n: own[i][n] for n in V},
            "alpha": share[i],
            "mu": 1.0,
        }
        for i in setting.clients
    ]
    return outcome
