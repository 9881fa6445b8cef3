"""DFedAvgM: train w with heavy-ball momentum, then mix it with the neighbours."""

from __future__ import annotations

import torch

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


def dfedavgm(
    setting: Setting, start: list[State], *, epochs: int, mutant: str | None = None
) -> Outcome:
    U, V, W = setting.parts
    w = [copied({**state["u"], **state["v"]}) for state in start]
    trained = [copied(w[i]) for i in setting.clients]
    kept: list[Weights] = [{} for _ in setting.clients]
    outcome = Outcome()
    for t in range(setting.rounds):
        p, active = setting.weights(t), setting.active(t)
        if mutant == "transposed":
            p = p.T
        rate = same_rate(W, setting.rate(t))
        if mutant == "personal_lr on the head":
            rate = {**rate, **same_rate(V, setting.personal_rate(t))}
        before = [copied(w[i]) for i in setting.clients]
        for i in setting.clients:
            if not active[i] and mutant != "offline clients train":
                continue
            buffer = kept[i] if mutant == "momentum survives the round" else {}
            for epoch in range(setting.epochs(i, epochs)):
                for rows in batches(setting, i, t, 0, epoch):
                    g = gradient(setting, i, rows, w[i], W)
                    step(setting, w[i], w[i], g, buffer, rate)
            kept[i] = buffer
            trained[i] = copied(w[i])
        local = trained
        if mutant == "local stage of the idle is what they hold":
            local = w
        outcome.local.append([copied(local[i]) for i in setting.clients])

        sent = before if mutant == "sends what it had before training" else w
        received: list[Weights] = []
        for i in setting.clients:
            mixed = {name: torch.zeros_like(w[i][name]) for name in W}
            for j in setting.clients:
                for name in W:
                    mixed[name] = mixed[name] + float(p[i, j]) * sent[j][name]
            if mutant == "the head is not mixed":
                mixed = {**mixed, **{n: w[i][n] for n in V}}
            received.append(mixed)
        w = received
        outcome.mixed.append([copied(w[i]) for i in setting.clients])
    outcome.state = [
        {"u": {n: w[i][n] for n in U}, "v": {n: w[i][n] for n in V}, "mu": 1.0}
        for i in setting.clients
    ]
    return outcome
