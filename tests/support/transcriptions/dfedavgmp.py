"""DFedAvgM-P: DFedAvgM with only u mixed; v then u, or both jointly."""

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


def dfedavgmp(
    setting: Setting,
    start: list[State],
    *,
    personal_epochs: int,
    shared_epochs: int,
    alternating: bool = True,
    mutant: str | None = None,
) -> Outcome:
    U, V, W = setting.parts
    u = [copied(state["u"]) for state in start]
    v = [copied(state["v"]) for state in start]
    trained = [{**copied(u[i]), **copied(v[i])} for i in setting.clients]
    outcome = Outcome()

    def train_v(i: int, t: int, rate: dict[str, float]) -> None:
        buffer: Weights = {}
        for epoch in range(personal_epochs):
            for rows in batches(setting, i, t, 0, epoch):
                g = gradient(setting, i, rows, {**u[i], **v[i]}, V)
                step(setting, v[i], v[i], g, buffer, rate)

    def train_u(i: int, t: int, rate: dict[str, float]) -> None:
        buffer: Weights = {}
        for epoch in range(setting.epochs(i, shared_epochs)):
            for rows in batches(setting, i, t, 1, epoch):
                g = gradient(setting, i, rows, {**u[i], **v[i]}, U)
                step(setting, u[i], u[i], g, buffer, rate)

    def train_both(i: int, t: int, rate: dict[str, float]) -> None:
        w = {**u[i], **v[i]}
        buffer: Weights = {}
        for epoch in range(setting.epochs(i, shared_epochs)):
            for rows in batches(setting, i, t, 0, epoch):
                g = gradient(setting, i, rows, w, W)
                if mutant == "each part clipped by itself":
                    before = copied(w)
                    step(setting, w, before, {n: g[n] for n in U}, buffer, rate)
                    step(setting, w, before, {n: g[n] for n in V}, buffer, rate)
                else:
                    step(setting, w, w, g, buffer, rate)
        u[i], v[i] = {n: w[n] for n in U}, {n: w[n] for n in V}

    for t in range(setting.rounds):
        p, active = setting.weights(t), setting.active(t)
        if mutant == "transposed":
            p = p.T
        eta, eta_v = setting.rate(t), setting.personal_rate(t)
        if mutant == "personal_lr ignored":
            eta_v = eta
        rate = {**same_rate(U, eta), **same_rate(V, eta_v)}
        for i in setting.clients:
            if not active[i]:
                continue
            if not alternating or mutant == "joint instead of alternating":
                train_both(i, t, rate)
            elif mutant == "u before v":
                train_u(i, t, rate)
                train_v(i, t, rate)
            else:
                train_v(i, t, rate)
                train_u(i, t, rate)
            trained[i] = {**copied(u[i]), **copied(v[i])}
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        mixed_u: list[Weights] = []
        mixed_v: list[Weights] = []
        for i in setting.clients:
            mixed_u.append({n: torch.zeros_like(u[i][n]) for n in U})
            mixed_v.append({n: torch.zeros_like(v[i][n]) for n in V})
            for j in setting.clients:
                for n in U:
                    mixed_u[i][n] = mixed_u[i][n] + float(p[i, j]) * u[j][n]
                for n in V:
                    mixed_v[i][n] = mixed_v[i][n] + float(p[i, j]) * v[j][n]
        u = mixed_u
        if mutant == "personal part mixed":
            v = mixed_v
        outcome.mixed.append([{**copied(u[i]), **copied(v[i])} for i in setting.clients])
    outcome.state = [{"u": u[i], "v": v[i], "mu": 1.0} for i in setting.clients]
    return outcome
