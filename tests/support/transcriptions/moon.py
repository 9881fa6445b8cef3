"""MOON: FedAvg with features drawn to those of the received model, away from one's own last."""

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


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Of every sample's two vectors."""
    return (a * b).sum(dim=1) / (a.norm(dim=1) * b.norm(dim=1))


def moon(
    setting: Setting,
    start: list[State],
    *,
    epochs: int,
    contrast: float,
    temperature: float,
    weighting: str = "samples",
    mutant: str | None = None,
) -> Outcome:
    U, V, W = setting.parts
    w = [copied({**state["u"], **state["v"]}) for state in start]
    previous = [copied(w[i]) for i in setting.clients]
    trained = [copied(w[i]) for i in setting.clients]
    tau = 1.0 if mutant == "temperature left out" else temperature
    seen = forward if mutant == "features after the head" else features
    outcome = Outcome()

    def contrastive(weights: Weights, received: Weights, last: Weights, x: Tensor) -> Tensor:
        f, f_glob, f_prev = seen(weights, x), seen(received, x), seen(last, x)
        near = torch.exp(cosine(f, f_glob) / tau)
        far = torch.exp(cosine(f, f_prev) / tau)
        if mutant == "negative and positive swapped":
            near, far = far, near
        if mutant == "scalar products instead of cosines":
            near = torch.exp((f * f_glob).sum(dim=1) / tau)
            far = torch.exp((f * f_prev).sum(dim=1) / tau)
        if mutant == "positive missing below":
            return -torch.log(near / far).mean()
        return -torch.log(near / (near + far)).mean()

    for t in range(setting.rounds):
        active = setting.active(t)
        rate = same_rate(W, setting.rate(t))
        for i in setting.clients:
            if not active[i]:
                continue
            received = copied(w[i])
            last = previous[i]
            if mutant == "previous model is the global one":
                last = received
            buffer: Weights = {}
            for epoch in range(setting.epochs(i, epochs)):
                for rows in batches(setting, i, t, 0, epoch):
                    x, y = setting.train[i][0][rows], setting.train[i][1][rows]

                    def loss(
                        weights: Weights,
                        x: Tensor = x,
                        y: Tensor = y,
                        received: Weights = received,
                        last: Weights = last,
                    ) -> Tensor:
                        drawn = contrastive(weights, received, last, x)
                        if mutant == "contrast summed over the batch":
                            drawn = drawn * len(y)
                        return cross_entropy(forward(weights, x), y) + contrast * drawn

                    g = gradient_of(loss, w[i], W)
                    unclipped = None
                    if mutant == "contrast after clipping":
                        plain = gradient(setting, i, rows, w[i], W)
                        cut = clip(setting, plain)
                        g = {n: cut[n] + g[n] - plain[n] for n in W}
                        unclipped = "no clipping"
                    step(setting, w[i], w[i], g, buffer, rate, unclipped)
            trained[i] = copied(w[i])
            previous[i] = copied(w[i])
            if mutant == "previous model is the last received":
                previous[i] = received
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        by = "uniform" if mutant == "not weighted by samples" else weighting
        w = averaged(setting.weights(t), w, sample_counts(setting, by))
        if mutant == "previous model of the idle is what they received":
            for i in setting.clients:
                if not active[i]:
                    previous[i] = copied(w[i])
        outcome.mixed.append([copied(w[i]) for i in setting.clients])
    outcome.state = [
        {
            "u": {n: w[i][n] for n in U},
            "v": {n: w[i][n] for n in V},
            "previous_u": {n: previous[i][n] for n in U},
            "previous_v": {n: previous[i][n] for n in V},
            "mu": 1.0,
        }
        for i in setting.clients
    ]
    return outcome
