"""DFedPGP-SAM: DFedPGP whose second phase takes its gradient uphill of z, at distance ρ."""

from __future__ import annotations

import numpy as np

from transcriptions.spec import (
    Outcome,
    Setting,
    State,
    Weights,
    batches,
    copied,
    gradient,
    mixed,
    norm,
    same_rate,
)
from transcriptions.spec import step as descend


def dfedpgpsam(
    setting: Setting,
    start: list[State],
    *,
    personal_epochs: int,
    shared_epochs: int,
    rho: float,
    step_floor: float | None = None,
    step: str = "paper",
    mutant: str | None = None,
) -> Outcome:
    U, V, W = setting.parts
    u = [copied(state["u"]) for state in start]
    v = [copied(state["v"]) for state in start]
    mu = [1.0 for _ in setting.clients]
    z = [copied(u[i]) for i in setting.clients]
    trained = [{**copied(z[i]), **copied(v[i])} for i in setting.clients]
    outcome = Outcome(push_sum=True)

    def train_v(i: int, t: int) -> None:
        """Phase 0: v at (z, v) with z fixed, plain."""
        rate = same_rate(V, setting.personal_rate(t))
        buffer: Weights = {}
        for epoch in range(personal_epochs):
            for rows in batches(setting, i, t, 0, epoch):
                g = gradient(setting, i, rows, {**z[i], **v[i]}, V)
                if mutant == "personal phase perturbed too":
                    away = {n: v[i][n] + rho * g[n] / norm(g) for n in V}
                    g = gradient(setting, i, rows, {**z[i], **away}, V)
                descend(setting, v[i], v[i], g, buffer, rate)

    def perturbed(i: int, rows: np.ndarray) -> Weights:
        """(z', v) with z' = z + ρ g₁/‖g₁‖, g₁ of u alone."""
        g1 = gradient(setting, i, rows, {**z[i], **v[i]}, U)
        length = norm(g1)
        if length == 0.0:
            return {**z[i], **v[i]}
        if mutant == "norm over the whole model":
            length = norm(gradient(setting, i, rows, {**z[i], **v[i]}, W))
        if mutant == "perturbed by the unnormalised gradient":
            length = 1.0
        if mutant == "perturbed at u not z":
            g1 = gradient(setting, i, rows, {**u[i], **v[i]}, U)
            return {**{n: u[i][n] + rho * g1[n] / norm(g1) for n in U}, **v[i]}
        if mutant == "u perturbed by ρ":
            return {**{n: (u[i][n] + rho * g1[n] / length) / mu[i] for n in U}, **v[i]}
        if mutant == "v perturbed too":
            g1 = gradient(setting, i, rows, {**z[i], **v[i]}, W)
            at = {**z[i], **v[i]}
            return {n: at[n] + rho * g1[n] / norm(g1) for n in W}
        return {**{n: z[i][n] + rho * g1[n] / length for n in U}, **v[i]}

    def train_u(i: int, t: int) -> None:
        """Phase 1: the gradient at (z', v), applied to u; z = u/μ after every step."""
        eta = setting.rate(t)
        if step_floor is not None and mutant != "floor ignored":
            eta = eta / max(mu[i], step_floor) * mu[i]
        if step == "debiased" and mutant != "u moves by η":
            eta = eta / mu[i] if mutant == "u moves by η/μ" else eta * mu[i]
        if mutant == "z moves by η":
            eta = eta * mu[i]
        buffer: Weights = {}
        for epoch in range(setting.epochs(i, shared_epochs)):
            of_epoch = list(batches(setting, i, t, 1, epoch))
            for k, rows in enumerate(of_epoch):
                there = perturbed(i, rows)
                second = rows
                if mutant == "another batch for the second gradient":
                    second = of_epoch[(k + 1) % len(of_epoch)]
                g2 = gradient(setting, i, second, there, U)
                decayed = z[i]
                if mutant == "decay at u":
                    decayed = u[i]
                if mutant == "decay at the perturbed point":
                    decayed = {n: there[n] for n in U}
                if mutant == "step from the perturbed point":
                    u[i] = {n: there[n] * mu[i] for n in U}
                descend(setting, u[i], decayed, g2, buffer, same_rate(U, eta))
                z[i] = {n: u[i][n] / mu[i] for n in U}

    for t in range(setting.rounds):
        p, active = setting.weights(t), setting.active(t)
        if mutant == "transposed":
            p = p.T
        for i in setting.clients:
            if not active[i] and mutant != "offline clients train":
                continue
            train_v(i, t)
            train_u(i, t)
            trained[i] = {**copied(z[i]), **copied(v[i])}
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        u = mixed(p, u)
        mu = [sum(float(p[i, j]) * mu[j] for j in setting.clients) for i in setting.clients]
        z = [{n: u[i][n] / mu[i] for n in U} for i in setting.clients]
        outcome.mixed.append([{**copied(z[i]), **copied(v[i])} for i in setting.clients])
    outcome.state = [{"u": u[i], "v": v[i], "mu": mu[i]} for i in setting.clients]
    return outcome
