"""FedProto: models stay; what travels is, for every class, the mean of what the head is given."""

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


def fedproto(
    setting: Setting,
    start: list[State],
    *,
    epochs: int,
    proximal: float,
    mutant: str | None = None,
) -> Outcome:
    U, V, W = setting.parts
    w = [copied({**state["u"], **state["v"]}) for state in start]
    classes, dimensions = w[0]["head.weight"].shape
    nothing = torch.zeros(classes, dimensions, dtype=torch.float64)
    sums = [nothing.clone() for _ in setting.clients]
    counts = [torch.zeros(classes, dtype=torch.float64) for _ in setting.clients]
    prototypes = [nothing.clone() for _ in setting.clients]
    known = [torch.zeros(classes, dtype=torch.float64) for _ in setting.clients]
    trained = [copied(w[i]) for i in setting.clients]
    outcome = Outcome()

    def pull(i: int, weights: Weights, x: Tensor, y: Tensor) -> Tensor:
        """The mean over the batch; a sample of an unknown class counts as 0."""
        f = features(weights, x)
        total = torch.zeros((), dtype=torch.float64)
        heard = 0
        for k in range(len(y)):
            j = int(y[k])
            if known[i][j] == 0 and mutant != "unknown classes pulled to zero":
                continue
            heard = heard + 1
            apart = (f[k] - prototypes[i][j]) ** 2
            summed = mutant == "sum instead of mean over dimensions"
            total = total + (apart.sum() if summed else apart.mean())
        if mutant == "mean over the samples of known classes":
            return total / max(heard, 1)
        return total / len(y)

    def summed_up(weights: Weights, x: Tensor, y: Tensor, into: Tensor, number: Tensor) -> None:
        f = features(weights, x)
        for k in range(len(y)):
            j = int(y[k])
            into[j] = into[j] + f[k]
            number[j] = number[j] + 1.0

    for t in range(setting.rounds):
        p, active = setting.weights(t), setting.active(t)
        rate = same_rate(W, setting.rate(t))
        for i in setting.clients:
            if not active[i]:
                if mutant == "idle clients forget their sums":
                    sums[i], counts[i] = torch.zeros_like(sums[i]), torch.zeros_like(counts[i])
                continue
            before = copied(w[i])
            on_the_way = torch.zeros_like(sums[i])
            visits = torch.zeros_like(counts[i])
            buffer: Weights = {}
            for epoch in range(setting.epochs(i, epochs)):
                on_the_way, visits = torch.zeros_like(sums[i]), torch.zeros_like(counts[i])
                for rows in batches(setting, i, t, 0, epoch):
                    x, y = setting.train[i][0][rows], setting.train[i][1][rows]
                    summed_up(w[i], x, y, on_the_way, visits)

                    def loss(weights: Weights, i: int = i, x: Tensor = x, y: Tensor = y) -> Tensor:
                        drawn = pull(i, weights, x, y)
                        return cross_entropy(forward(weights, x), y) + proximal * drawn

                    g = gradient_of(loss, w[i], W)
                    unclipped = None
                    if mutant == "pull after clipping":
                        plain = gradient(setting, i, rows, w[i], W)
                        cut = clip(setting, plain)
                        g = {n: cut[n] + g[n] - plain[n] for n in W}
                        unclipped = "no clipping"
                    step(setting, w[i], w[i], g, buffer, rate, unclipped)
            trained[i] = copied(w[i])

            sums[i], counts[i] = torch.zeros_like(sums[i]), torch.zeros_like(counts[i])
            at = before if mutant == "prototypes before training" else w[i]
            x, y = setting.train[i]
            summed_up(at, x, y, sums[i], counts[i])
            if mutant == "prototypes of the last epoch's batches":
                sums[i], counts[i] = on_the_way, visits
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        for i in setting.clients:
            if mutant == "only those who train receive" and not active[i]:
                continue
            alone = not any(p[i, j] > 0 for j in setting.clients if j != i)
            gone = alone and not active[i]
            if gone and mutant != "offline clients take their own prototypes":
                continue
            mixed_sum = torch.zeros_like(sums[i])
            mixed_count = torch.zeros_like(counts[i])
            for j in setting.clients:
                weight = float(p[i, j])
                if mutant == "weighted by samples as well":
                    weight = weight * setting.samples(j)
                for c in range(classes):
                    if mutant == "prototypes not weighted by counts":
                        if counts[j][c] > 0:
                            mixed_sum[c] = mixed_sum[c] + weight * sums[j][c] / counts[j][c]
                            mixed_count[c] = mixed_count[c] + weight
                        continue
                    mixed_sum[c] = mixed_sum[c] + weight * sums[j][c]
                    mixed_count[c] = mixed_count[c] + weight * counts[j][c]
            for c in range(classes):
                if mixed_count[c] > 0:
                    prototypes[i][c] = mixed_sum[c] / mixed_count[c]
                    known[i][c] = 1.0
                elif mutant == "known classes forgotten":
                    known[i][c] = 0.0
                elif mutant == "prototypes of absent classes set to zero":
                    prototypes[i][c] = 0.0 * prototypes[i][c]
        if mutant == "models averaged":
            w = averaged(p, w, sample_counts(setting))
        outcome.mixed.append([copied(w[i]) for i in setting.clients])
    outcome.state = [
        {
            "u": {n: w[i][n] for n in U},
            "v": {n: w[i][n] for n in V},
            "sums": sums[i],
            "counts": counts[i],
            "prototypes": prototypes[i],
            "known": known[i],
            "mu": 1.0,
        }
        for i in setting.clients
    ]
    return outcome
