"""Scaffold-P of Chen et al. 2023: SCAFFOLD's correction on u alone, v trained along and kept."""

from __future__ import annotations

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


def scaffoldp(
    setting: Setting, start: list[State], *, epochs: int, mutant: str | None = None
) -> Outcome:
    U, V, W = setting.parts
    u = [copied(state["u"]) for state in start]
    v = [copied(state["v"]) for state in start]
    c_i = [{n: torch.zeros_like(u[i][n]) for n in U} for i in setting.clients]
    c = [{n: torch.zeros_like(u[i][n]) for n in U} for i in setting.clients]
    trained = [{**u[i], **v[i]} for i in setting.clients]
    outcome = Outcome()
    for t in range(setting.rounds):
        p, active = setting.weights(t), setting.active(t)
        eta, eta_v = setting.rate(t), setting.personal_rate(t)
        if mutant == "personal_lr ignored":
            eta_v = eta
        rate = {**same_rate(U, eta), **same_rate(V, eta_v)}
        if mutant == "rates swapped":
            rate = {**same_rate(U, eta_v), **same_rate(V, eta)}
        share = sum(1 for i in setting.clients if active[i]) / len(setting.clients)
        if mutant == "share of clients ignored":
            share = 1.0
        news = [{n: torch.zeros_like(u[i][n]) for n in U} for i in setting.clients]
        for i in setting.clients:
            if not active[i]:
                continue
            x, y = u[i], {**u[i], **v[i]}
            buffer: Weights = {}
            steps = 0
            for epoch in range(setting.epochs(i, epochs)):
                for rows in batches(setting, i, t, 0, epoch):
                    g = gradient(setting, i, rows, y, W)
                    how = None
                    if mutant == "corrected after clipping":
                        g, how = clip(setting, g), "no clipping"
                    for n in U:
                        if mutant == "correction with the wrong sign":
                            g[n] = g[n] + c_i[i][n] - c[i][n]
                        elif mutant != "no correction":
                            g[n] = g[n] - c_i[i][n] + c[i][n]
                    if mutant == "each part clipped by itself":
                        before = copied(y)
                        step(setting, y, before, {n: g[n] for n in U}, buffer, rate)
                        step(setting, y, before, {n: g[n] for n in V}, buffer, rate)
                    else:
                        step(setting, y, y, g, buffer, rate, how)
                    steps = steps + 1
            v[i] = {n: y[n] for n in V}
            if mutant == "personal part forgotten":
                v[i] = {n: trained[i][n] for n in V}
            trained[i] = copied(y)
            if steps == 0:
                continue
            # r: how far a gradient of 1 in every step would have moved a number of u.
            speed, r = 0.0, 0.0
            for _ in range(steps):
                speed = setting.training.momentum * speed + 1.0
                r = r + speed * eta
            if mutant == "K η with momentum":
                r = steps * eta
            if mutant == "the head's rate in the control":
                r = r / eta * eta_v
            change: Weights = {}
            for n in U:
                change[n] = (x[n] - y[n]) / r - c[i][n]
                if mutant == "server control not subtracted":
                    change[n] = (x[n] - y[n]) / r
                c_i[i][n] = c_i[i][n] + change[n]
            news[i] = {n: share * change[n] for n in U}
            u[i] = {n: y[n] for n in U}
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        counts = sample_counts(setting, "samples" if mutant == "weighted by samples" else "uniform")
        u = averaged(p, u, counts)
        if mutant == "personal part averaged":
            v = averaged(p, v, counts)
        arrived = mixed(p, news)
        for i in setting.clients:
            if mutant == "server control only for those who trained" and not active[i]:
                continue
            c[i] = {n: c[i][n] + arrived[i][n] for n in U}
        outcome.mixed.append([copied({**u[i], **v[i]}) for i in setting.clients])
    outcome.state = [
        {"u": u[i], "v": v[i], "control": c_i[i], "server": c[i], "mu": 1.0}
        for i in setting.clients
    ]
    return outcome
