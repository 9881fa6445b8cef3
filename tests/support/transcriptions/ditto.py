"""Ditto: a global model as in FedAvg, and a personal one held to what was received."""

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
    same_rate,
    step,
)


def ditto(
    setting: Setting,
    start: list[State],
    *,
    epochs: int,
    personal_epochs: int,
    proximal: float,
    weighting: str = "samples",
    mutant: str | None = None,
) -> Outcome:
    U, V, W = setting.parts
    w = [copied({**state["u"], **state["v"]}) for state in start]
    theta = [copied({**state["theta_u"], **state["theta_v"]}) for state in start]
    outcome = Outcome()

    def train_w(i: int, t: int) -> None:
        buffer: Weights = {}
        for epoch in range(setting.epochs(i, epochs)):
            for rows in batches(setting, i, t, 1, epoch):
                g = gradient(setting, i, rows, w[i], W)
                step(setting, w[i], w[i], g, buffer, same_rate(W, setting.rate(t)))

    def train_theta(i: int, t: int, anchor: Weights) -> None:
        rate = same_rate(W, setting.rate(t))
        if mutant == "personal_lr on theta":
            rate = same_rate(W, setting.personal_rate(t))
        passes = personal_epochs
        if mutant == "unequal epochs for theta too":
            passes = setting.epochs(i, personal_epochs)
        buffer: Weights = {}
        for epoch in range(passes):
            for rows in batches(setting, i, t, 0, epoch):
                g = gradient(setting, i, rows, theta[i], W)
                if mutant == "proximal term after clipping":
                    g = clip(setting, g)
                for n in W:
                    g[n] = g[n] + proximal * (theta[i][n] - anchor[n])
                unclipped = "no clipping" if mutant == "proximal term after clipping" else None
                step(setting, theta[i], theta[i], g, buffer, rate, unclipped)

    for t in range(setting.rounds):
        sampled = [i for i in setting.clients if setting.active(t)[i]]
        for i in setting.clients if mutant == "everybody trains theta" else sampled:
            received = copied(w[i])
            if mutant == "theta starts from the received model":
                theta[i] = copied(received)
            if mutant == "anchor after the update":
                train_w(i, t)
                train_theta(i, t, anchor=copied(w[i]))
                continue
            train_theta(i, t, anchor=received)
            if i in sampled:
                train_w(i, t)
        outcome.local.append([copied(theta[i]) for i in setting.clients])

        counts = {j: float(setting.samples(j)) for j in sampled}
        if weighting == "uniform" or mutant == "not weighted by samples":
            counts = dict.fromkeys(sampled, 1.0)
        for name in W:
            mean = torch.zeros_like(w[0][name])
            for j in sampled:
                sent = theta[j] if mutant == "theta is sent" else w[j]
                mean = mean + counts[j] / sum(counts.values()) * sent[name]
            for i in setting.clients:
                w[i][name] = mean.clone()
        evaluated = w if mutant == "the global model evaluated" else theta
        outcome.mixed.append([copied(evaluated[i]) for i in setting.clients])
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
