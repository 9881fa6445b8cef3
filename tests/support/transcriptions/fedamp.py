"""HeurFedAMP of Huang et al. 2021, with the cosines of the round before.

Everybody mixes all models by attention: ξ_ii for itself, and for the others a softmax of
σ cos(u_i, u_j), of what is shared. A client then trains near what it received: ∇F + λ (w − cloud).
The cosines are those of the models sent a round earlier; in the first round nobody knows any.
"""

from __future__ import annotations

import math

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

OWN, SHARPNESS = 0.4, 3.0


def fedamp(
    setting: Setting,
    start: list[State],
    *,
    epochs: int,
    proximal: float,
    weighting: str,
    mutant: str | None = None,
) -> Outcome:
    assert weighting == "uniform"
    U, V, W = setting.parts
    m = len(setting.clients)
    cloud = [{**state["u"], **state["v"]} for state in start]
    before: list[Weights] | None = None
    outcome = Outcome()
    for t in range(setting.rounds):
        models, rate = [], same_rate(W, setting.rate(t))
        for i in setting.clients:
            w = copied(cloud[i])
            buffer: Weights = {}
            for epoch in range(setting.epochs(i, epochs)):
                for rows in batches(setting, i, t, 0, epoch):
                    g = gradient(setting, i, rows, w, W)
                    if mutant != "no proximal term":
                        g = {n: g[n] + proximal * (w[n] - cloud[i][n]) for n in W}
                    step(setting, w, w, g, buffer, rate)
            models.append(w)
        outcome.local.append([copied(w) for w in models])

        compared = models if mutant == "cosines of this round" else before
        xi = [[0.0] * m for _ in setting.clients]
        for i in setting.clients:
            names = W if mutant == "cosine of the whole model" else U
            score = {j: 0.0 for j in setting.clients if j != i}
            if compared is not None:
                for j in score:
                    moved = [compared[i], compared[j]]
                    if mutant == "cosine of updates":
                        moved = [{n: w[n] - start[0]["u"][n] for n in U} for w in moved]
                    score[j] = cosine(moved[0], moved[1], names)
            if mutant == "distance for similarity":
                score = {j: -score[j] for j in score}
            sigma = 1.0 if mutant == "sharpness forgotten" else SHARPNESS
            total = sum(math.exp(sigma * score[j]) for j in score)
            own = 1 / m if mutant == "own weight forgotten" else OWN
            xi[i][i] = own
            for j in score:
                xi[i][j] = (1 - own) * math.exp(sigma * score[j]) / total
        if mutant == "transposed":
            xi = [[xi[j][i] for j in setting.clients] for i in setting.clients]
        before = models
        cloud = []
        for i in setting.clients:
            sums = {n: xi[i][0] * models[0][n] for n in W}
            for j in list(setting.clients)[1:]:
                sums = {n: sums[n] + xi[i][j] * models[j][n] for n in W}
            cloud.append(sums)
        outcome.mixed.append([copied(w) for w in cloud])
    outcome.state = [
        {"u": {n: cloud[i][n] for n in U}, "v": {n: cloud[i][n] for n in V}, "mu": 1.0}
        for i in setting.clients
    ]
    return outcome


def cosine(a: Weights, b: Weights, names: tuple[str, ...]) -> float:
    inner, aa, bb = 0.0, 0.0, 0.0
    for n in names:
        inner += float((a[n] * b[n]).sum())
        aa += float((a[n] * a[n]).sum())
        bb += float((b[n] * b[n]).sum())
    return inner / math.sqrt(aa * bb)
