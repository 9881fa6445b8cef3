"""DFedSAM: DFedAvgM whose gradient is taken uphill, at distance ρ; one gossip step a round."""

from __future__ import annotations

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
    norm,
    same_rate,
    step,
)


def dfedsam(
    setting: Setting, start: list[State], *, epochs: int, rho: float, mutant: str | None = None
) -> Outcome:
    U, V, W = setting.parts
    w = [copied({**state["u"], **state["v"]}) for state in start]
    trained = [copied(w[i]) for i in setting.clients]
    outcome = Outcome()

    def uphill(at: Weights, g: Weights) -> Weights:
        """w + ρ g/‖g‖, or w where g is 0."""
        length = norm(g)
        if length == 0.0:
            return copied(at)
        if mutant == "perturbed by the unnormalised gradient":
            return {n: at[n] + rho * g[n] for n in W}
        if mutant == "perturbed by the clipped, unnormalised gradient":
            cut = clip(setting, g)
            return {n: at[n] + rho * cut[n] for n in W}
        if mutant == "perturbed downhill":
            return {n: at[n] - rho * g[n] / length for n in W}
        if mutant == "norm tensor by tensor":
            return {n: at[n] + rho * g[n] / norm({n: g[n]}) for n in W}
        if mutant == "an epsilon in the norm":
            return {n: at[n] + rho * g[n] / (length + 1e-6) for n in W}
        return {n: at[n] + rho * g[n] / length for n in W}

    for t in range(setting.rounds):
        p, active = setting.weights(t), setting.active(t)
        if mutant == "transposed":
            p = p.T
        rate = same_rate(W, setting.rate(t))
        for i in setting.clients:
            if not active[i] and mutant != "offline clients train":
                continue
            buffer: Weights = {}
            for epoch in range(setting.epochs(i, epochs)):
                of_epoch = list(batches(setting, i, t, 0, epoch))
                for k, rows in enumerate(of_epoch):
                    g1 = gradient(setting, i, rows, w[i], W)
                    if mutant == "perturbed by the decayed gradient":
                        g1 = {n: g1[n] + setting.training.weight_decay * w[i][n] for n in W}
                    there = uphill(w[i], g1)
                    second = rows
                    if mutant == "another batch for the second gradient":
                        second = of_epoch[(k + 1) % len(of_epoch)]
                    g2 = gradient(setting, i, second, there, W)
                    decayed = there if mutant == "decay at the perturbed point" else w[i]
                    if mutant == "step from the perturbed point":
                        w[i] = copied(there)
                    step(setting, w[i], decayed, g2, buffer, rate)
            trained[i] = copied(w[i])
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        w = mixed(p, w)
        if mutant == "two gossip steps":
            w = mixed(p, w)
        outcome.mixed.append([copied(w[i]) for i in setting.clients])
    outcome.state = [
        {"u": {n: w[i][n] for n in U}, "v": {n: w[i][n] for n in V}, "mu": 1.0}
        for i in setting.clients
    ]
    return outcome
