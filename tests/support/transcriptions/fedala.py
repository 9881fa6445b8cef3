"""FedALA, Algorithm 1 of Zhang et al. 2023: before training, the head received is weighed in.

Θ̂ = Θ_i + (Θ − Θ_i) ⊙ W for the head, the received body as it is; W is learned on the client's data.
"""

from __future__ import annotations

import torch

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


def fedala(
    setting: Setting,
    start: list[State],
    *,
    epochs: int,
    weight_epochs: int = 1,
    weight_lr: float = 1.0,
    weighting: str = "samples",
    mutant: str | None = None,
) -> Outcome:
    U, V, W = setting.parts
    received = [copied({**state["u"], **state["v"]}) for state in start]
    own = [copied({n: received[i][n] for n in V}) for i in setting.clients]
    share = [{n: torch.ones_like(own[i][n]) for n in V} for i in setting.clients]
    trained = [copied(received[i]) for i in setting.clients]
    outcome = Outcome()

    def aggregated(i: int) -> Weights:
        """The model that training begins with."""
        head = {}
        for n in V:
            if mutant == "own and received head swapped":
                head[n] = received[i][n] + (own[i][n] - received[i][n]) * share[i][n]
            elif mutant == "received head as it is":
                head[n] = received[i][n].clone()
            else:
                head[n] = own[i][n] + (received[i][n] - own[i][n]) * share[i][n]
        return {**{n: received[i][n].clone() for n in U}, **head}

    for t in range(setting.rounds):
        rate = same_rate(W, setting.rate(t))
        for i in setting.clients:
            if not setting.active(t)[i]:
                continue
            if mutant == "W begins at one again":
                share[i] = {n: torch.ones_like(share[i][n]) for n in V}
            eta = weight_lr * setting.training.lr_decay**t
            if mutant != "W's rate decayed":
                eta = weight_lr
            phase = 1 if mutant == "W on the batches of training" else 0
            passes = weight_epochs
            if mutant == "unequal epochs for W too":
                passes = setting.epochs(i, weight_epochs)
            for epoch in range(passes):
                for rows in batches(setting, i, t, phase, epoch):
                    at = own[i] if mutant == "gradient at the own head" else {}
                    g = gradient(setting, i, rows, {**aggregated(i), **at}, V)
                    for n in V:
                        slope = g[n] * (received[i][n] - own[i][n])
                        if mutant == "chain rule left out":
                            slope = g[n]
                        if mutant == "W climbs":
                            slope = -slope
                        moved = share[i][n] - eta * slope
                        if mutant != "W not cut":
                            moved = moved.clamp(0.0, 1.0)
                        share[i][n] = moved
            w = aggregated(i)
            buffer: Weights = {}
            for epoch in range(setting.epochs(i, epochs)):
                for rows in batches(setting, i, t, 1, epoch):
                    g = gradient(setting, i, rows, w, W)
                    step(setting, w, w, g, buffer, rate)
            trained[i] = w
            received[i] = copied(w)
            if mutant != "own head never updated":
                own[i] = {n: w[n].clone() for n in V}
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        by = "uniform" if mutant == "not weighted by samples" else weighting
        received = averaged(setting.weights(t), received, sample_counts(setting, by))
        if mutant == "the received model evaluated":
            outcome.mixed.append([copied(received[i]) for i in setting.clients])
            continue
        outcome.mixed.append([aggregated(i) for i in setting.clients])
    outcome.state = [
        {
            "u": {n: received[i][n] for n in U},
            "v": {n: received[i][n] for n in V},
            "own_v": own[i],
            "share": share[i],
            "mu": 1.0,
        }
        for i in setting.clients
    ]
    return outcome
