"""FedAvg with DBE, Zhang et al. 2023: a personal bias of the features, and a pull of their mean."""

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
    copied,
    cross_entropy,
    features,
    same_rate,
    sample_counts,
    step,
)


def feddbe(
    setting: Setting,
    start: list[State],
    *,
    epochs: int,
    mean_weight: float = 50.0,
    weighting: str = "samples",
    mutant: str | None = None,
) -> Outcome:
    U, V, W = setting.parts
    w = [copied({**state["u"], **state["v"]}) for state in start]
    width = w[0]["head.weight"].shape[1]
    bias = [torch.zeros(width, dtype=torch.float64) for _ in setting.clients]
    sums = [torch.zeros(width, dtype=torch.float64) for _ in setting.clients]
    counts = [0.0 for _ in setting.clients]
    mean = [torch.zeros(width, dtype=torch.float64) for _ in setting.clients]
    known = [0.0 for _ in setting.clients]
    outcome = Outcome()

    def head(weights: Weights, f: Tensor) -> Tensor:
        return f @ weights["head.weight"].T + weights["head.bias"]

    def used(i: int) -> Weights:
        """head(f + z) is a linear head whose bias has W z in it."""
        if mutant == "bias left out of the model":
            return copied(w[i])
        moved = w[i]["head.bias"] + w[i]["head.weight"] @ bias[i]
        return {**copied(w[i]), "head.bias": moved}

    trained = [used(i) for i in setting.clients]
    for t in range(setting.rounds):
        p, active = setting.weights(t), setting.active(t)
        rate = same_rate(W, setting.rate(t))
        rate_z = {"z": setting.personal_rate(t)}
        if mutant == "personal_lr ignored":
            rate_z = {"z": setting.rate(t)}
        for i in setting.clients:
            if not active[i]:
                continue
            begun = copied(w[i])
            buffer: Weights = {}
            buffer_z: Weights = {}
            for epoch in range(setting.epochs(i, epochs)):
                for rows in batches(setting, i, t, 0, epoch):
                    x, y = setting.train[i][0][rows], setting.train[i][1][rows]
                    here = {n: w[i][n].detach().requires_grad_(True) for n in W}
                    z = bias[i].detach().requires_grad_(True)
                    f = features(here, x)
                    loss = cross_entropy(head(here, f + z), y)
                    away = (f.mean(dim=0) - mean[i]) ** 2
                    if mutant == "every sample pulled, not their mean":
                        away = ((f - mean[i]) ** 2).mean(dim=0)
                    if mutant == "mean of features with their bias":
                        away = ((f + z.detach()).mean(dim=0) - mean[i]) ** 2
                    pull = 0.5 * (away.sum() if mutant == "summed over dimensions" else away.mean())
                    if known[i] or mutant == "pulled to zero before a mean is known":
                        loss = loss + mean_weight * pull
                    found = torch.autograd.grad(loss, [*here.values(), z])
                    g = dict(zip(W, found[:-1], strict=True))
                    if known[i] or mutant == "bias trained from the first round":
                        moved = {"z": bias[i]}
                        if mutant != "bias never trained":
                            step(setting, moved, moved, {"z": found[-1]}, buffer_z, rate_z)
                        bias[i] = moved["z"]
                    if mutant == "model step with the new bias":
                        f = features(here, x)
                        loss = cross_entropy(head(here, f + bias[i]), y)
                        if known[i]:
                            away = (f.mean(dim=0) - mean[i]) ** 2
                            loss = loss + mean_weight * 0.5 * away.mean()
                        again = torch.autograd.grad(loss, list(here.values()))
                        g = dict(zip(W, again, strict=True))
                    step(setting, w[i], w[i], g, buffer, rate)
            trained[i] = used(i)
            at = begun if mutant == "features of before training" else w[i]
            everything = features(at, setting.train[i][0])
            sums[i], counts[i] = everything.sum(dim=0), float(setting.samples(i))
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        by = "uniform" if mutant == "not weighted by samples" else weighting
        w = averaged(p, w, sample_counts(setting, by))
        for i in setting.clients:
            total = sum(float(p[i, j]) * counts[j] for j in setting.clients)
            summed = sum(float(p[i, j]) * sums[j] for j in setting.clients)
            if mutant == "mean of the clients' means":
                total = sum(float(p[i, j]) for j in setting.clients if counts[j])
                summed = sum(
                    float(p[i, j]) * sums[j] / counts[j] for j in setting.clients if counts[j]
                )
            if total > 0 and (not known[i] or mutant == "mean taken again every round"):
                mean[i], known[i] = summed / total, 1.0
        if mutant == "bias averaged":
            every = sum(bias) / len(bias)
            bias = [every.clone() for _ in setting.clients]
        outcome.mixed.append([used(i) for i in setting.clients])
    outcome.state = [
        {
            "u": {n: w[i][n] for n in U},
            "v": {n: w[i][n] for n in V},
            "bias": bias[i],
            "mean": mean[i],
            "known": known[i],
            "mu": 1.0,
        }
        for i in setting.clients
    ]
    return outcome
