"""K-GT, Algorithm 1 of Liu et al. 2024: local steps corrected by c, which tracks z's mean."""

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
    mixed,
    same_rate,
    step,
)


def kgt(
    setting: Setting,
    start: list[State],
    *,
    epochs: int,
    mixing_lr: float = 1.0,
    mutant: str | None = None,
) -> Outcome:
    U, V, W = setting.parts
    x = [copied({**state["u"], **state["v"]}) for state in start]
    c = [{n: torch.zeros_like(x[i][n]) for n in W} for i in setting.clients]
    trained = [copied(x[i]) for i in setting.clients]
    outcome = Outcome()
    for t in range(setting.rounds):
        p, active = setting.weights(t), setting.active(t)
        if mutant == "transposed":
            p = p.T
        eta = setting.rate(t)
        z = [{n: torch.zeros_like(x[i][n]) for n in W} for i in setting.clients]
        for i in setting.clients:
            if not active[i]:
                continue
            y = copied(x[i])
            buffer: Weights = {}
            steps, speed, reach = 0, 0.0, 0.0
            for epoch in range(setting.epochs(i, epochs)):
                for rows in batches(setting, i, t, 0, epoch):
                    g = gradient(setting, i, rows, y, W)
                    how = None
                    if mutant == "corrected after clipping":
                        g, how = clip(setting, g), "no clipping"
                    for n in W:
                        if mutant == "correction with the wrong sign":
                            g[n] = g[n] - c[i][n]
                        elif mutant != "no correction":
                            g[n] = g[n] + c[i][n]
                    step(setting, y, y, g, buffer, same_rate(W, eta), how)
                    steps = steps + 1
                    speed = setting.training.momentum * speed + 1.0
                    reach = reach + speed * eta
            if mutant == "momentum forgotten":
                reach = steps * eta
            if mutant == "rate not in z":
                reach = reach / eta
            if reach > 0:
                z[i] = {n: (x[i][n] - y[n]) / reach for n in W}
                step_size = 1.0 if mutant == "mixing rate ignored" else mixing_lr
                x[i] = {n: x[i][n] - step_size * (x[i][n] - y[n]) for n in W}
            trained[i] = copied(y) if mutant == "local model of the full step" else copied(x[i])
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        # x ← Σ w (x − η_s K η_c z);  c ← c − z + Σ w z.
        x = mixed(p, x)
        arrived = mixed(p, z)
        for i in setting.clients:
            if mutant == "tracker not updated":
                continue
            for n in W:
                c[i][n] = c[i][n] - z[i][n] + arrived[i][n]
                if mutant == "own z not subtracted":
                    c[i][n] = c[i][n] + z[i][n]
        if mutant == "c is mixed too":
            c = mixed(p, c)
        outcome.mixed.append([copied(x[i]) for i in setting.clients])
    outcome.state = [
        {
            "u": {n: x[i][n] for n in U},
            "v": {n: x[i][n] for n in V},
            "correction_u": {n: c[i][n] for n in U},
            "correction_v": {n: c[i][n] for n in V},
            "mu": 1.0,
        }
        for i in setting.clients
    ]
    return outcome
