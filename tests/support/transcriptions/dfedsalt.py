"""DFedSalt, Algorithm 2 of Shi et al. 2023: v plainly, then u by SAM; u is gossiped, v stays."""

from __future__ import annotations

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
    step,
)


def dfedsalt(
    setting: Setting,
    start: list[State],
    *,
    personal_epochs: int,
    shared_epochs: int,
    rho: float,
    mutant: str | None = None,
) -> Outcome:
    U, V, W = setting.parts
    u = [copied(state["u"]) for state in start]
    v = [copied(state["v"]) for state in start]
    trained = [{**copied(u[i]), **copied(v[i])} for i in setting.clients]
    outcome = Outcome()

    def uphill(at: Weights, g: Weights, over: Weights) -> Weights:
        length = norm(over)
        return {n: at[n] + (rho / length * g[n] if length > 0 else 0.0) for n in g}

    for t in range(setting.rounds):
        p, active = setting.weights(t), setting.active(t)
        if mutant == "transposed":
            p = p.T
        rate_u = same_rate(U, setting.rate(t))
        rate_v = same_rate(V, setting.personal_rate(t))
        for i in setting.clients:
            if not active[i] and mutant != "offline clients train":
                continue
            old = copied(u[i])
            buffer_v: Weights = {}
            for epoch in range(personal_epochs):
                for rows in batches(setting, i, t, 0, epoch):
                    g = gradient(setting, i, rows, {**u[i], **v[i]}, V)
                    if mutant == "personal phase perturbed too":
                        there = {**u[i], **uphill(v[i], g, g)}
                        g = gradient(setting, i, rows, there, V)
                    step(setting, v[i], v[i], g, buffer_v, rate_v)
            buffer_u: Weights = {}
            for epoch in range(setting.epochs(i, shared_epochs)):
                for rows in batches(setting, i, t, 1, epoch):
                    here = {**u[i], **v[i]}
                    g = gradient(setting, i, rows, here, U)
                    over = g
                    if mutant == "norm over the whole model":
                        over = gradient(setting, i, rows, here, W)
                    there = {**uphill(u[i], g, over), **v[i]}
                    if mutant == "perturbed by the unnormalised gradient":
                        there = {**{n: u[i][n] + rho * g[n] for n in U}, **v[i]}
                    if mutant == "no perturbation":
                        there = here
                    g = gradient(setting, i, rows, there, U)
                    decayed = there if mutant == "decay at the perturbed point" else u[i]
                    step(setting, u[i], decayed, g, buffer_u, rate_u)
            if mutant == "the body of before is sent":
                u[i] = old
            trained[i] = {**copied(u[i]), **copied(v[i])}
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        u = mixed(p, u)
        if mutant == "personal part mixed":
            v = mixed(p, v)
        outcome.mixed.append([{**copied(u[i]), **copied(v[i])} for i in setting.clients])
    outcome.state = [{"u": u[i], "v": v[i], "mu": 1.0} for i in setting.clients]
    return outcome
