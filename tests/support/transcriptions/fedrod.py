"""Fed-RoD, Algorithm 1 of Chen and Chao 2022: a generic head by a balanced loss, a personal one.

The generic model is averaged. The personal head is added to its logits, without a gradient to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transcriptions.spec import (
    Outcome,
    Setting,
    State,
    Weights,
    averaged,
    batches,
    clip,
    copied,
    cross_entropy,
    features,
    forward,
    gradient,
    gradient_of,
    same_rate,
    sample_counts,
    step,
)


def fedrod(
    setting: Setting,
    start: list[State],
    *,
    epochs: int,
    weighting: str = "samples",
    mutant: str | None = None,
) -> Outcome:
    U, V, W = setting.parts
    generic = [copied({**state["u"], **state["v"]}) for state in start]
    personal = [{n: generic[i][n].clone() for n in V} for i in setting.clients]
    if mutant == "personal head begins at zero":
        personal = [{n: torch.zeros_like(generic[i][n]) for n in V} for i in setting.clients]
    classes = generic[0]["head.bias"].numel()
    outcome = Outcome()

    def used(i: int) -> Weights:
        """Its logits are the sum of both heads', which is one linear head of summed weights."""
        if mutant == "generic model evaluated":
            return copied(generic[i])
        if mutant == "personal head alone evaluated":
            return {**copied(generic[i]), **copied(personal[i])}
        return {
            **{n: generic[i][n].clone() for n in U},
            **{n: generic[i][n] + personal[i][n] for n in V},
        }

    def counts(i: int) -> Tensor:
        number = torch.zeros(classes, dtype=torch.float64)
        for label in setting.train[i][1]:
            number[int(label)] += 1
        return number

    def balanced(weights: Weights, x: Tensor, y: Tensor, number: Tensor) -> Tensor:
        """−log( n_y e^{z_y} / Σ_c n_c e^{z_c} ), the mean over the batch."""
        total = torch.zeros((), dtype=torch.float64)
        logits = forward(weights, x)
        for k in range(len(y)):
            above = number[int(y[k])] * torch.exp(logits[k, int(y[k])])
            below = (number * torch.exp(logits[k])).sum()
            total = total - torch.log(above / below)
        return total / len(y)

    trained = [used(i) for i in setting.clients]
    for t in range(setting.rounds):
        rate = same_rate(W, setting.rate(t))
        rate_p = same_rate(V, setting.personal_rate(t))
        if mutant == "personal_lr ignored":
            rate_p = same_rate(V, setting.rate(t))
        for i in setting.clients:
            if not setting.active(t)[i]:
                continue
            number = counts(i)
            if mutant == "balanced by the inverse":
                number = 1 / number.clamp(min=1.0)
            buffer: Weights = {}
            buffer_p: Weights = {}
            for epoch in range(setting.epochs(i, epochs)):
                for rows in batches(setting, i, t, 1, epoch):
                    x, y = setting.train[i][0][rows], setting.train[i][1][rows]

                    def objective(
                        weights: Weights, x: Tensor = x, y: Tensor = y, number: Tensor = number
                    ) -> Tensor:
                        if mutant == "generic head by the plain loss":
                            return cross_entropy(forward(weights, x), y)
                        return balanced(weights, x, y, number)

                    if mutant == "generic step first":
                        g = gradient_of(objective, generic[i], W)
                        step(setting, generic[i], generic[i], g, buffer, rate)
                    # The personal head on the features and logits of before the generic step.
                    f, z = features(generic[i], x), forward(generic[i], x)

                    def local(
                        head: Weights,
                        f: Tensor = f,
                        z: Tensor = z,
                        y: Tensor = y,
                        n: Tensor = number,
                    ) -> Tensor:
                        own = f @ head["head.weight"].T + head["head.bias"]
                        if mutant == "personal head without the generic logits":
                            z = torch.zeros_like(z)
                        if mutant == "personal head by the balanced loss":
                            return cross_entropy(z + own + torch.log(n), y)
                        return cross_entropy(z + own, y)

                    g_p = gradient_of(local, personal[i], V)
                    if mutant == "gradient of both heads together":
                        whole = gradient(setting, i, rows, used(i), W)
                        step(setting, generic[i], generic[i], whole, buffer, rate)
                    elif mutant != "generic step first":
                        g = gradient_of(objective, generic[i], W)
                        if mutant == "each part clipped by itself":
                            g = {
                                **clip(setting, {n: g[n] for n in U}),
                                **clip(setting, {n: g[n] for n in V}),
                            }
                            step(setting, generic[i], generic[i], g, buffer, rate, "no clipping")
                        else:
                            step(setting, generic[i], generic[i], g, buffer, rate)
                    step(setting, personal[i], personal[i], g_p, buffer_p, rate_p)
            trained[i] = used(i)
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        by = "uniform" if mutant == "not weighted by samples" else weighting
        generic = averaged(setting.weights(t), generic, sample_counts(setting, by))
        if mutant == "personal head averaged":
            personal = averaged(setting.weights(t), personal, sample_counts(setting))
        outcome.mixed.append([used(i) for i in setting.clients])
    outcome.state = [
        {
            "u": {n: generic[i][n] for n in U},
            "v": {n: generic[i][n] for n in V},
            "personal_v": personal[i],
            "mu": 1.0,
        }
        for i in setting.clients
    ]
    return outcome
