"""FedBABU: one v for all, never trained; u averaged; a fine-tuned copy is what is evaluated."""

from __future__ import annotations

from dataclasses import replace

import torch

from quiverfl.data.batches import ADAPT
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


def fedbabu(
    setting: Setting,
    start: list[State],
    *,
    epochs: int,
    finetune_epochs: int,
    finetune_lr: float,
    weighting: str = "samples",
    mutant: str | None = None,
) -> Outcome:
    U, V, W = setting.parts
    u = [copied(state["u"]) for state in start]
    v = [copied(state["v"]) for state in start]
    trained = [{**copied(u[i]), **copied(v[i])} for i in setting.clients]
    outcome = Outcome()

    def finetuned(i: int, t: int, weights: Weights) -> Weights:
        """On a copy: a constant rate, momentum 0.9, no decay, no clipping, the same batches."""
        if mutant == "no fine-tuning":
            return weights
        plain = replace(
            setting.training, momentum=0.9, weight_decay=0.0, clip_norm=None, lr=finetune_lr
        )
        if mutant == "fine-tuning with weight decay":
            plain = replace(plain, weight_decay=setting.training.weight_decay)
        if mutant == "fine-tuning clipped":
            plain = replace(plain, clip_norm=setting.training.clip_norm)
        if mutant == "fine-tuning with the momentum of training":
            plain = replace(plain, momentum=setting.training.momentum)
        apart = replace(setting, training=plain, clipped=[])
        eta = finetune_lr
        if mutant == "fine-tuning rate decayed":
            eta = finetune_lr * setting.training.lr_decay**t
        names = V if mutant == "only the head fine-tuned" else W
        round_of_batches = t if mutant == "fine-tuning batches of the round" else 0
        tuned = copied(weights)
        buffer: Weights = {}
        for epoch in range(finetune_epochs):
            for rows in batches(apart, i, round_of_batches, ADAPT, epoch):
                g = gradient(apart, i, rows, tuned, names)
                step(apart, tuned, tuned, g, buffer, same_rate(names, eta))
        return tuned

    for t in range(setting.rounds):
        eta = setting.rate(t)
        sampled = [i for i in setting.clients if setting.active(t)[i]]
        for i in sampled:
            buffer: Weights = {}
            for epoch in range(setting.epochs(i, epochs)):
                for rows in batches(setting, i, t, 0, epoch):
                    if mutant == "the head is trained":
                        w = {**u[i], **v[i]}
                        g = gradient(setting, i, rows, w, W)
                        step(setting, w, w, g, buffer, same_rate(W, eta))
                        u[i], v[i] = {n: w[n] for n in U}, {n: w[n] for n in V}
                        continue
                    g = gradient(setting, i, rows, {**u[i], **v[i]}, U)
                    step(setting, u[i], u[i], g, buffer, same_rate(U, eta))
                    if mutant == "the head is decayed":
                        for n in V:
                            v[i][n] = v[i][n] * (1 - eta * setting.training.weight_decay)
            trained[i] = {**copied(u[i]), **copied(v[i])}
        outcome.local.append([finetuned(i, t, trained[i]) for i in setting.clients])
        if mutant == "fine-tuning not on a copy":
            for i in sampled:
                u[i] = {n: outcome.local[-1][i][n].clone() for n in U}
                v[i] = {n: outcome.local[-1][i][n].clone() for n in V}

        counts = {j: float(setting.samples(j)) for j in sampled}
        if weighting == "uniform" or mutant == "not weighted by samples":
            counts = dict.fromkeys(sampled, 1.0)
        for name in U:
            mean = torch.zeros_like(u[0][name])
            for j in sampled:
                mean = mean + counts[j] / sum(counts.values()) * u[j][name]
            for i in setting.clients:
                u[i][name] = mean.clone()
        outcome.mixed.append([finetuned(i, t, {**u[i], **v[i]}) for i in setting.clients])
    outcome.state = [{"u": u[i], "v": v[i], "mu": 1.0} for i in setting.clients]
    return outcome
