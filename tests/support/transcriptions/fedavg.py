"""FedAvg: the sampled clients train w from the global model; its mean, weighted by sample count."""

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


def fedavg(
    setting: Setting,
    start: list[State],
    *,
    epochs: int,
    weighting: str = "samples",
    mutant: str | None = None,
) -> Outcome:
    U, V, W = setting.parts
    w = [copied({**state["u"], **state["v"]}) for state in start]
    trained = [copied(w[i]) for i in setting.clients]
    kept: list[Weights] = [{} for _ in setting.clients]
    outcome = Outcome()
    for t in range(setting.rounds):
        p, active = setting.weights(t), setting.active(t)
        if mutant == "transposed":
            p = p.T
        rate = same_rate(W, setting.rate(t))
        if mutant == "personal_lr on the head":
            rate = {**rate, **same_rate(V, setting.personal_rate(t))}
        for i in setting.clients:
            if not active[i] and mutant != "everybody trains":
                continue
            buffer = kept[i] if mutant == "momentum survives the round" else {}
            for epoch in range(setting.epochs(i, epochs)):
                for rows in batches(setting, i, t, 0, epoch):
                    g = gradient(setting, i, rows, w[i], W)
                    step(setting, w[i], w[i], g, buffer, rate)
            kept[i] = buffer
            trained[i] = copied(w[i])
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        counts = [float(setting.samples(j)) for j in setting.clients]
        if weighting == "uniform" or mutant == "not weighted by samples":
            counts = [1.0 for _ in setting.clients]
        received: list[Weights] = []
        for i in setting.clients:
            mean = {name: torch.zeros_like(w[i][name]) for name in W}
            total = sum(float(p[i, j]) * counts[j] for j in setting.clients)
            for j in setting.clients:
                for name in W:
                    mean[name] = mean[name] + float(p[i, j]) * counts[j] * w[j][name]
            unheard = total == 0.0
            if mutant == "only the sampled receive" and not active[i]:
                unheard = True
            received.append(copied(w[i]) if unheard else {name: mean[name] / total for name in W})
        w = received
        if mutant == "the head is not averaged":
            w = [{**w[i], **{n: trained[i][n] for n in V}} for i in setting.clients]
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
