"""FedAS, Yang, Huang and Ye 2024: the body received is aligned with one's own features, and bodies
are averaged by the trace of their Fisher information."""

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
    features,
    gradient,
    gradient_of,
    same_rate,
    step,
)


def fedas(
    setting: Setting,
    start: list[State],
    *,
    epochs: int,
    align_epochs: int = 1,
    align_lr: float = 0.01,
    mutant: str | None = None,
) -> Outcome:
    U, V, W = setting.parts
    u = [copied(state["u"]) for state in start]
    v = [copied(state["v"]) for state in start]
    last = [copied(u[i]) for i in setting.clients]
    fisher = [1.0 for _ in setting.clients]
    trained = [{**copied(u[i]), **copied(v[i])} for i in setting.clients]
    classes = v[0]["head.bias"].numel()
    outcome = Outcome()
    for t in range(setting.rounds):
        rate = {**same_rate(U, setting.rate(t)), **same_rate(V, setting.personal_rate(t))}
        if mutant == "personal_lr ignored":
            rate = same_rate(W, setting.rate(t))
        for i in setting.clients:
            if not setting.active(t)[i]:
                continue
            # Prototypes: the mean features of every class by the body after its last training.
            x, y = setting.train[i]
            seen = features({**u[i], **v[i]} if mutant == "own features forgotten" else last[i], x)
            prototypes = torch.zeros(classes, seen.shape[1], dtype=torch.float64)
            for c in range(classes):
                if int((y == c).sum()) > 0:
                    prototypes[c] = seen[y == c].mean(dim=0)
            # Alignment of the body received, by plain steps.
            body = copied(u[i])
            if mutant != "no alignment":
                for epoch in range(align_epochs):
                    for rows in batches(setting, i, t, 1, epoch):

                        def apart(
                            weights: Weights,
                            x: Tensor = x[rows],
                            y: Tensor = y[rows],
                            prototypes: Tensor = prototypes,
                        ) -> Tensor:
                            total = torch.zeros((), dtype=torch.float64)
                            f = features(weights, x)
                            for k in range(len(y)):
                                away = (f[k] - prototypes[int(y[k])]) ** 2
                                summed = mutant == "sum instead of mean over dimensions"
                                total = total + (away.sum() if summed else away.mean())
                            return total / len(y)

                        g = gradient_of(apart, {**body, **v[i]}, U)
                        eta = align_lr
                        if mutant == "alignment rate decayed":
                            eta = align_lr * setting.training.lr_decay**t
                        if mutant == "alignment with the optimizer of training":
                            step(setting, body, body, g, {}, same_rate(U, eta))
                            continue
                        body = {n: body[n] - eta * g[n] for n in U}
            w = {**body, **v[i]}
            buffer: Weights = {}
            for epoch in range(setting.epochs(i, epochs)):
                for rows in batches(setting, i, t, 2, epoch):
                    g = gradient(setting, i, rows, w, W)
                    step(setting, w, w, g, buffer, rate)
            if setting.epochs(i, epochs) > 0:
                last[i] = {n: w[n].clone() for n in U}
            # The trace of the Fisher information: Σ over batches of ‖∇‖² at the trained model.
            trace = 0.0
            for rows in batches(setting, i, t, 3, 0):
                g = gradient(setting, i, rows, w, U if mutant == "Fisher of the body alone" else W)
                squared = sum(float((g[n] ** 2).sum()) for n in g)
                if mutant == "Fisher by the norm":
                    squared = squared**0.5
                if mutant == "Fisher of the last batch":
                    trace = 0.0
                trace = trace + squared
            if mutant == "Fisher before training":
                at = {**body, **v[i]}
                trace = 0.0
                for rows in batches(setting, i, t, 3, 0):
                    g = gradient(setting, i, rows, at, W)
                    trace = trace + sum(float((g[n] ** 2).sum()) for n in g)
            fisher[i] = trace
            u[i] = {n: w[n].clone() for n in U}
            v[i] = {n: w[n].clone() for n in V}
            trained[i] = w
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        weights = fisher
        if mutant == "weighted by samples":
            weights = [float(setting.samples(i)) for i in setting.clients]
        if mutant == "weighted by the inverse":
            weights = [1 / max(f, 1e-300) for f in fisher]
        u = averaged(setting.weights(t), u, weights)
        if mutant == "head averaged":
            v = averaged(setting.weights(t), v, weights)
        outcome.mixed.append([{**copied(u[i]), **copied(v[i])} for i in setting.clients])
    outcome.state = [
        {"u": u[i], "v": v[i], "last_u": last[i], "fisher": fisher[i], "mu": 1.0}
        for i in setting.clients
    ]
    return outcome
