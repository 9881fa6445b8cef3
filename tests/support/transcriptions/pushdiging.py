"""Push-DIGing: the sum of all gradients is tracked, model and tracker are pushed; whole model."""

from __future__ import annotations

import torch

from transcriptions.spec import (
    Outcome,
    Setting,
    State,
    Weights,
    batches,
    clip,
    copied,
    gradient,
    mixed,
)


def pushdiging(setting: Setting, start: list[State], *, mutant: str | None = None) -> Outcome:
    U, V, W = setting.parts
    w = [copied({**state["u"], **state["v"]}) for state in start]
    mu = [1.0 for _ in setting.clients]
    track = [{n: torch.zeros_like(w[i][n]) for n in W} for i in setting.clients]
    last = [{n: torch.zeros_like(w[i][n]) for n in W} for i in setting.clients]
    buffer = [{n: torch.zeros_like(w[i][n]) for n in W} for i in setting.clients]
    trained = [copied(w[i]) for i in setting.clients]
    outcome = Outcome(push_sum=True)
    for t in range(setting.rounds):
        p, active = setting.weights(t), setting.active(t)
        if mutant == "transposed":
            p = p.T
        eta = setting.training.lr if mutant == "rate not decayed" else setting.rate(t)
        for i in setting.clients:
            if not active[i] and mutant != "offline clients train":
                continue
            if mutant == "one epoch of steps":
                drawn = list(batches(setting, i, t, 0, 0))
            else:
                drawn = [next(iter(batches(setting, i, t, 0, 0)))]
            for rows in drawn:
                z = {n: w[i][n] / mu[i] for n in W}
                g = gradient(setting, i, rows, w[i] if mutant == "gradient at w not z" else z, W)
                decay = setting.training.weight_decay
                if mutant == "decay left out":
                    decay = 0.0
                decayed = w[i] if mutant == "decay at w" else z
                if mutant == "decay before clipping":
                    g = clip(setting, {n: g[n] + decay * decayed[n] for n in W})
                else:
                    g = clip(setting, g)
                    g = {n: g[n] + decay * decayed[n] for n in W}
                new: Weights = {}
                for n in W:
                    new[n] = track[i][n] + g[n] - last[i][n]
                    if mutant == "last gradient not subtracted":
                        new[n] = track[i][n] + g[n]
                    if mutant == "no tracking":
                        new[n] = g[n]
                moved_by: Weights = track[i] if mutant == "step with the old tracker" else new
                if mutant == "tracked gradient clipped":
                    moved_by = clip(setting, new)
                if mutant == "with momentum":
                    buffer[i] = {n: setting.training.momentum * buffer[i][n] + new[n] for n in W}
                    moved_by = buffer[i]
                w[i] = {n: w[i][n] - eta * moved_by[n] for n in W}
                track[i] = new
                last[i] = g
            trained[i] = {n: w[i][n] / mu[i] for n in W}
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        w = mixed(p, w)
        if mutant != "tracking variable not mixed":
            track = mixed(p, track)
        if mutant == "last gradient mixed too":
            last = mixed(p, last)
        if mutant != "μ is not mixed":
            mu = [sum(float(p[i, j]) * mu[j] for j in setting.clients) for i in setting.clients]
        outcome.mixed.append([{n: w[i][n] / mu[i] for n in W} for i in setting.clients])
    outcome.state = [
        {
            "u": {n: w[i][n] for n in U},
            "v": {n: w[i][n] for n in V},
            "track_u": {n: track[i][n] for n in U},
            "track_v": {n: track[i][n] for n in V},
            "last_u": {n: last[i][n] for n in U},
            "last_v": {n: last[i][n] for n in V},
            "mu": mu[i],
        }
        for i in setting.clients
    ]
    return outcome
