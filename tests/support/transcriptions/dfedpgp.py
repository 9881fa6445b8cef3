"""DFedPGP, Algorithm 1 of Liu et al. 2024, line by line (the comments count its lines)."""

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
    same_rate,
)
from transcriptions.spec import step as descend


def dfedpgp(
    setting: Setting,
    start: list[State],
    *,
    personal_epochs: int,
    shared_epochs: int,
    step_floor: float | None = None,
    step: str = "paper",
    mutant: str | None = None,
) -> Outcome:
    U, V, _ = setting.parts
    # Line 1: u, z = u, v; μ = 1.
    u = [copied(state["u"]) for state in start]
    v = [copied(state["v"]) for state in start]
    mu = [1.0 for _ in setting.clients]
    z = [copied(u[i]) for i in setting.clients]
    trained = [{**copied(z[i]), **copied(v[i])} for i in setting.clients]
    kept: list[Weights] = [{} for _ in setting.clients]
    outcome = Outcome(push_sum=True)

    def train_v(i: int, t: int) -> Weights:
        """Lines 5-7: v at (z, v) with z fixed."""
        eta_v = setting.personal_rate(t)
        if mutant == "personal_lr ignored":
            eta_v = setting.rate(t)
        if mutant == "personal_lr not decayed":
            eta_v = setting.personal_rate(0)
        passes = personal_epochs
        if mutant == "unequal epochs for v too":
            passes = setting.epochs(i, personal_epochs)
        body = u[i] if mutant == "v trained at u" else z[i]
        buffer: Weights = {}
        for epoch in range(passes):
            for rows in batches(setting, i, t, 0, epoch, mutant):
                g = gradient(setting, i, rows, {**body, **v[i]}, V, mutant)
                descend(setting, v[i], v[i], g, buffer, same_rate(V, eta_v), mutant)
        return buffer

    def train_u(i: int, t: int, buffer_v: Weights) -> None:
        """Lines 9-11: the gradient at z with the new v, applied to u; z = u/μ after every step."""
        eta = setting.training.lr if mutant == "rate not decayed" else setting.rate(t)
        if step_floor is not None and mutant != "floor ignored":
            eta = eta / max(mu[i], step_floor) * mu[i]
        if step == "debiased" and mutant != "u moves by η":
            eta = eta / mu[i] if mutant == "u moves by η/μ" else eta * mu[i]
        if mutant == "z moves by η":
            eta = eta * mu[i]
        buffer = kept[i] if mutant == "momentum survives the round" else {}
        for epoch in range(setting.epochs(i, shared_epochs)):
            for rows in batches(setting, i, t, 1, epoch, mutant):
                body = u[i] if mutant == "gradient at u" else z[i]
                g = gradient(setting, i, rows, {**body, **v[i]}, U, mutant)
                decayed = u[i] if mutant == "decay at u" else z[i]
                if mutant == "clipped after dividing by μ":
                    g = clip(setting, {n: g[n] / mu[i] for n in U})
                    g = {n: g[n] * mu[i] for n in U}
                descend(setting, u[i], decayed, g, buffer, same_rate(U, eta), mutant)
                if mutant != "z only after communication":
                    z[i] = {n: u[i][n] / mu[i] for n in U}
                if mutant == "momentum survives the phase":
                    for n in V:
                        buffer_v[n] = setting.training.momentum * buffer_v[n]
                        v[i][n] = v[i][n] - setting.personal_rate(t) * buffer_v[n]
        z[i] = {n: u[i][n] / mu[i] for n in U}
        kept[i] = buffer

    for t in range(setting.rounds):  # line 2
        p, active = setting.weights(t), setting.active(t)
        if mutant == "transposed":
            p = p.T
        for i in setting.clients:  # line 3
            if not active[i]:
                continue
            if mutant == "u before v":
                train_u(i, t, {})
                train_v(i, t)
            else:
                buffer_v = train_v(i, t)
                train_u(i, t, buffer_v)
            body = u[i] if mutant == "u is the output" else z[i]
            trained[i] = {**copied(body), **copied(v[i])}
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        # Lines 14-16: push p·(u, μ), sum what arrives.
        new_u: list[Weights] = []
        new_v: list[Weights] = []
        new_mu: list[float] = []
        for i in setting.clients:
            new_u.append({n: torch.zeros_like(u[i][n]) for n in U})
            new_v.append({n: torch.zeros_like(v[i][n]) for n in V})
            new_mu.append(0.0)
            for j in setting.clients:
                share = float(p[i, j])
                for n in U:
                    new_u[i][n] = new_u[i][n] + share * u[j][n]
                for n in V:
                    new_v[i][n] = new_v[i][n] + share * v[j][n]
                new_mu[i] = new_mu[i] + share * mu[j]
        u = new_u
        if mutant == "personal part mixed":
            v = new_v
        if mutant != "μ is not mixed":
            mu = new_mu
        # Line 17: z = u/μ, which with v is also the output.
        z = [{n: u[i][n] / mu[i] for n in U} for i in setting.clients]
        body_of = u if mutant == "u is the output" else z
        outcome.mixed.append([{**copied(body_of[i]), **copied(v[i])} for i in setting.clients])
    outcome.state = [{"u": u[i], "v": v[i], "mu": mu[i]} for i in setting.clients]
    return outcome
