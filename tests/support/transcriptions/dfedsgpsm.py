"""DFedSGPSM: push-sum on the whole model, local steps by SAM at z = x/w, local momentum."""

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
)
from transcriptions.spec import step as descend


def dfedsgpsm(
    setting: Setting,
    start: list[State],
    *,
    epochs: int,
    rho: float,
    step: str = "paper",
    mutant: str | None = None,
) -> Outcome:
    U, V, W = setting.parts
    x = [copied({**state["u"], **state["v"]}) for state in start]
    w = [1.0 for _ in setting.clients]
    z = [copied(x[i]) for i in setting.clients]
    trained = [copied(z[i]) for i in setting.clients]
    kept: list[Weights] = [{} for _ in setting.clients]
    outcome = Outcome(push_sum=True)
    for t in range(setting.rounds):
        p, active = setting.weights(t), setting.active(t)
        if mutant == "transposed":
            p = p.T
        for i in setting.clients:
            if not active[i]:
                continue
            eta = setting.rate(t)
            if step == "debiased" or mutant == "z moves by η":
                eta = eta * w[i]
            momentum: Weights = kept[i] if mutant == "momentum survives the round" else {}
            for epoch in range(setting.epochs(i, epochs)):
                for rows in batches(setting, i, t, 0, epoch):
                    # The ascent: z + ρ g/‖g‖.
                    first = gradient(setting, i, rows, z[i], W)
                    length = norm(first)
                    if mutant == "perturbed by the unnormalised gradient":
                        length = 1.0
                    at = x[i] if mutant == "perturbed at x" else z[i]
                    there = {n: at[n] + rho / length * first[n] for n in W}
                    if mutant == "x perturbed by ρ":
                        there = {n: z[i][n] + rho / length * first[n] / w[i] for n in W}
                    if mutant == "no perturbation":
                        there = z[i]
                    second = gradient(setting, i, rows, there, W)
                    decayed = there if mutant == "decay at the perturbed point" else z[i]
                    if mutant == "no momentum":
                        momentum = {}
                    # Its momentum, and the step on x; z follows.
                    descend(setting, x[i], decayed, second, momentum, same_rate(W, eta))
                    z[i] = {n: x[i][n] / w[i] for n in W}
            kept[i] = momentum
            trained[i] = copied(z[i])
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        x = mixed(p, x)
        if mutant != "w is not mixed":
            w = [sum(float(p[i, j]) * w[j] for j in setting.clients) for i in setting.clients]
        z = [{n: x[i][n] / w[i] for n in W} for i in setting.clients]
        outcome.mixed.append([copied(z[i]) for i in setting.clients])
    outcome.state = [
        {"u": {n: x[i][n] for n in U}, "v": {n: x[i][n] for n in V}, "mu": w[i]}
        for i in setting.clients
    ]
    return outcome
