"""SCAFFOLD, Algorithm 1 of Karimireddy et al. 2020 with option II; the server's step size is 1."""

from __future__ import annotations

import numpy as np
import torch

from transcriptions.spec import (
    Outcome,
    Setting,
    State,
    Weights,
    averaged,
    batches,
    clip,
    copied,
    gradient,
    mixed,
    same_rate,
    sample_counts,
    step,
)


def scaffold(
    setting: Setting, start: list[State], *, epochs: int, mutant: str | None = None
) -> Outcome:
    U, V, W = setting.parts
    w = [copied({**state["u"], **state["v"]}) for state in start]
    control = [{n: torch.zeros_like(w[i][n]) for n in W} for i in setting.clients]
    server = [{n: torch.zeros_like(w[i][n]) for n in W} for i in setting.clients]
    difference = [{n: torch.zeros_like(w[i][n]) for n in W} for i in setting.clients]
    trained = [copied(w[i]) for i in setting.clients]
    outcome = Outcome()
    for t in range(setting.rounds):
        p, active = setting.weights(t), setting.active(t)
        eta = setting.rate(t)
        share = sum(1 for i in setting.clients if active[i]) / len(setting.clients)
        if mutant == "share of clients ignored":
            share = 1.0
        for i in setting.clients:
            if not active[i]:
                if mutant != "idle clients send their old difference":
                    difference[i] = {n: torch.zeros_like(w[i][n]) for n in W}
                continue
            x = copied(w[i])
            y = w[i]
            steps = 0
            buffer: Weights = {}
            for epoch in range(setting.epochs(i, epochs)):
                for rows in batches(setting, i, t, 0, epoch):
                    g = gradient(setting, i, rows, y, W)
                    if mutant == "corrected after clipping":
                        g = clip(setting, g)
                    for n in W:
                        correction = server[i][n] - control[i][n]
                        if mutant == "correction with the wrong sign":
                            correction = control[i][n] - server[i][n]
                        if mutant == "no correction":
                            correction = torch.zeros_like(correction)
                        g[n] = g[n] + correction
                    unclipped = "no clipping" if mutant == "corrected after clipping" else None
                    step(setting, y, y, g, buffer, same_rate(W, eta), unclipped)
                    steps = steps + 1
            trained[i] = copied(y)

            if mutant == "steps counted in epochs":
                steps = setting.epochs(i, epochs)
            # How far a gradient of 1 in every step moves a parameter, momentum and all.
            speed, units = 0.0, 0.0
            for _ in range(steps):
                speed = setting.training.momentum * speed + 1.0
                units = units + speed
            if mutant == "momentum forgotten in the control":
                units = float(steps)
            walked = units * eta
            if mutant == "rate not in the control":
                walked = units
            if mutant == "rate of round 0 in the control":
                walked = units * setting.rate(0)
            if steps == 0:  # nothing is known of its gradients that was not known before
                change = {n: torch.zeros_like(w[i][n]) for n in W}
                if mutant == "no step as a gradient of zero":
                    change = {n: -server[i][n] for n in W}
                difference[i] = {n: share * change[n] for n in W}
                control[i] = {n: control[i][n] + change[n] for n in W}
                continue
            whole = gradient(setting, i, np.arange(setting.samples(i)), x, W)
            new: Weights = {}
            for n in W:
                new[n] = control[i][n] - server[i][n] + (x[n] - y[n]) / walked
                if mutant == "option I":
                    new[n] = whole[n]
                if mutant == "server control not subtracted":
                    new[n] = control[i][n] + (x[n] - y[n]) / walked
            difference[i] = {n: share * (new[n] - control[i][n]) for n in W}
            control[i] = new
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        by = "samples" if mutant == "weighted by samples" else "uniform"
        w = averaged(p, w, sample_counts(setting, by))
        arrived = mixed(p, difference)
        for i in setting.clients:
            if mutant == "server control not updated":
                continue
            if mutant == "server control only for those who trained" and not active[i]:
                continue
            for n in W:
                server[i][n] = server[i][n] + arrived[i][n]
        outcome.mixed.append([copied(w[i]) for i in setting.clients])
    outcome.state = [
        {
            "u": {n: w[i][n] for n in U},
            "v": {n: w[i][n] for n in V},
            "control_u": {n: control[i][n] for n in U},
            "control_v": {n: control[i][n] for n in V},
            "server_u": {n: server[i][n] for n in U},
            "server_v": {n: server[i][n] for n in V},
            "mu": 1.0,
        }
        for i in setting.clients
    ]
    return outcome
