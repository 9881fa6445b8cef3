"""OSGP: push-sum on the whole model, messages of others absorbed `delay` rounds late."""

from __future__ import annotations

from typing import NamedTuple

from transcriptions.spec import (
    Outcome,
    Setting,
    State,
    Weights,
    batches,
    copied,
    gradient,
    same_rate,
)
from transcriptions.spec import step as descend


class Share(NamedTuple):
    """What a sender gave one receiver: p·w and p·μ, to be merged in round `due` or later."""

    due: int
    sender: int
    weight: float
    w: Weights
    mu: float


def osgp(
    setting: Setting,
    start: list[State],
    *,
    epochs: int,
    delay: int = 0,
    step_floor: float | None = None,
    step: str = "paper",
    mutant: str | None = None,
) -> Outcome:
    U, V, W = setting.parts
    w = [copied({**state["u"], **state["v"]}) for state in start]
    mu = [1.0 for _ in setting.clients]
    trained = [copied(w[i]) for i in setting.clients]
    kept: list[Weights] = [{} for _ in setting.clients]
    in_flight: list[list[Share]] = [[] for _ in setting.clients]
    late = delay + 1 if mutant == "one round later" else delay
    outcome = Outcome(push_sum=True)
    for t in range(setting.rounds):
        p, active = setting.weights(t), setting.active(t)
        if mutant == "transposed":
            p = p.T
        for i in setting.clients:
            if not active[i]:
                continue
            mass = 1.0 if mutant == "μ ignored" else mu[i]
            eta = setting.rate(t)
            if step_floor is not None and mutant != "floor ignored":
                eta = eta / max(mass, step_floor) * mass
                if mutant == "floor divides without μ":
                    eta = setting.rate(t) / max(mass, step_floor)
            if step == "debiased" and mutant != "u moves by η":
                eta = eta / mass if mutant == "u moves by η/μ" else eta * mass
            if mutant == "z moves by η":
                eta = eta * mass
            rate = same_rate(W, eta)
            if mutant == "personal_lr on the head":
                rate = {**rate, **same_rate(V, setting.personal_rate(t))}
            buffer = kept[i] if mutant == "momentum survives the round" else {}
            for epoch in range(setting.epochs(i, epochs)):
                for rows in batches(setting, i, t, 0, epoch):
                    z = {n: w[i][n] / mass for n in W}
                    g = gradient(setting, i, rows, w[i] if mutant == "gradient at u" else z, W)
                    decayed = w[i] if mutant == "decay at u" else z
                    descend(setting, w[i], decayed, g, buffer, rate)
            kept[i] = buffer
            trained[i] = {n: w[i][n] / mass for n in W}
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        # Everybody sends; one's own share is merged at once, those of others when they are due.
        for j in setting.clients:
            for i in setting.clients:
                weight = float(p[i, j])
                if weight == 0.0:
                    continue
                at_once = i == j and mutant != "own share delayed"
                due = t if at_once else t + late
                share = {n: weight * w[j][n] for n in W}
                in_flight[i].append(Share(due, j, weight, share, weight * mu[j]))
        for i in setting.clients:
            if mutant == "messages to the offline are lost" and not active[i]:
                in_flight[i] = [s for s in in_flight[i] if s.sender == i or s.due != t]
            if mutant == "an offline client merges":
                arrived = [s for s in in_flight[i] if s.due <= t]
            else:  # who is offline keeps its own share and hears of nobody else
                arrived = [s for s in in_flight[i] if s.due <= t and (active[i] or s.sender == i)]
            in_flight[i] = [s for s in in_flight[i] if not any(s is a for a in arrived)]
            w[i] = {n: w[i][n] * 0.0 for n in W}
            mu[i] = 0.0
            for s in arrived:
                scale = 1.0
                if mutant == "weights of the round of arrival":
                    scale = float(p[i, s.sender]) / s.weight
                for n in W:
                    w[i][n] = w[i][n] + scale * s.w[n]
                mu[i] = mu[i] + scale * s.mu
        masses = [1.0 for _ in mu] if mutant == "μ ignored" else mu
        outcome.mixed.append([{n: w[i][n] / masses[i] for n in W} for i in setting.clients])
    outcome.state = [
        {"u": {n: w[i][n] for n in U}, "v": {n: w[i][n] for n in V}, "mu": mu[i]}
        for i in setting.clients
    ]
    return outcome
