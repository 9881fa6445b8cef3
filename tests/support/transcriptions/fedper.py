"""FedPer: u and v trained jointly, u averaged, v kept."""

from __future__ import annotations

import torch

from transcriptions.spec import (
    Outcome,
    Setting,
    State,
    Weights,
    batches,
    copied,
    gradient,
    same_rate,
    step,
)


def fedper(
    setting: Setting,
    start: list[State],
    *,
    epochs: int,
    weighting: str = "samples",
    mutant: str | None = None,
) -> Outcome:
    U, V, W = setting.parts
    w = [copied({**state["u"], **state["v"]}) for state in start]
    first = [copied(w[i]) for i in setting.clients]
    trained = [copied(w[i]) for i in setting.clients]
    kept: list[Weights] = [{} for _ in setting.clients]
    outcome = Outcome()
    for t in range(setting.rounds):
        eta, eta_v = setting.rate(t), setting.personal_rate(t)
        if mutant == "personal_lr ignored":
            eta_v = eta
        if mutant == "personal_lr not decayed":
            eta_v = setting.personal_rate(0)
        rate = {**same_rate(U, eta), **same_rate(V, eta_v)}
        sampled = [i for i in setting.clients if setting.active(t)[i]]
        for i in sampled:
            buffer = kept[i] if mutant == "momentum survives the round" else {}
            if mutant == "personal part starts afresh":
                w[i] = {**w[i], **{n: first[i][n] for n in V}}
            for epoch in range(setting.epochs(i, epochs)):
                for rows in batches(setting, i, t, 0, epoch):
                    g = gradient(setting, i, rows, w[i], W)
                    if mutant == "each part clipped by itself":
                        before = copied(w[i])
                        step(setting, w[i], before, {n: g[n] for n in U}, buffer, rate)
                        step(setting, w[i], before, {n: g[n] for n in V}, buffer, rate)
                    else:
                        step(setting, w[i], w[i], g, buffer, rate)
            kept[i] = buffer
            trained[i] = copied(w[i])
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        counts = {j: float(setting.samples(j)) for j in sampled}
        if weighting == "uniform" or mutant == "not weighted by samples":
            counts = dict.fromkeys(sampled, 1.0)
        averaged = W if mutant == "personal part averaged" else U
        for name in averaged:
            mean = torch.zeros_like(w[0][name])
            for j in sampled:
                mean = mean + counts[j] / sum(counts.values()) * w[j][name]
            for i in setting.clients:
                w[i][name] = mean.clone()
        outcome.mixed.append([copied(w[i]) for i in setting.clients])
    outcome.state = [
        {
            "u": {n: w[i][n] for n in U},
            "v": {n: w[i][n] for n in V},
            "mu": 1.0,
        }
        for i in setting.clients
    ]
    return outcome
