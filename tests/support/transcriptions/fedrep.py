"""FedRep: v with u frozen, then u with v frozen; u averaged. A frozen part is not touched."""

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


def fedrep(
    setting: Setting,
    start: list[State],
    *,
    personal_epochs: int,
    shared_epochs: int,
    weighting: str = "samples",
    mutant: str | None = None,
) -> Outcome:
    U, V, _ = setting.parts
    u = [copied(state["u"]) for state in start]
    v = [copied(state["v"]) for state in start]
    trained = [{**copied(u[i]), **copied(v[i])} for i in setting.clients]
    outcome = Outcome()
    for t in range(setting.rounds):
        eta, eta_v = setting.rate(t), setting.personal_rate(t)
        if mutant == "personal_lr ignored":
            eta_v = eta
        sampled = [i for i in setting.clients if setting.active(t)[i]]
        for i in sampled:
            for part in ("u", "v") if mutant == "u before v" else ("v", "u"):
                if part == "v":
                    buffer_v: Weights = {}
                    epochs = personal_epochs
                    if mutant == "unequal epochs for v too":
                        epochs = setting.epochs(i, personal_epochs)
                    for epoch in range(epochs):
                        for rows in batches(setting, i, t, 0, epoch):
                            g = gradient(setting, i, rows, {**u[i], **v[i]}, V)
                            step(setting, v[i], v[i], g, buffer_v, same_rate(V, eta_v))
                            if mutant == "frozen part decayed":
                                _decay(setting, u[i], eta)
                else:
                    buffer_u: Weights = {}
                    for epoch in range(setting.epochs(i, shared_epochs)):
                        for rows in batches(setting, i, t, 1, epoch):
                            g = gradient(setting, i, rows, {**u[i], **v[i]}, U)
                            step(setting, u[i], u[i], g, buffer_u, same_rate(U, eta))
                            if mutant == "frozen part decayed":
                                _decay(setting, v[i], eta_v)
                            if mutant == "momentum moves the frozen part":
                                for n in V:
                                    buffer_v[n] = setting.training.momentum * buffer_v[n]
                                    v[i][n] = v[i][n] - eta_v * buffer_v[n]
            trained[i] = {**copied(u[i]), **copied(v[i])}
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        counts = {j: float(setting.samples(j)) for j in sampled}
        if weighting == "uniform" or mutant == "not weighted by samples":
            counts = dict.fromkeys(sampled, 1.0)
        for part_of, names in ((u, U), (v, V)):
            if part_of is v and mutant != "personal part averaged":
                continue
            for name in names:
                mean = torch.zeros_like(part_of[0][name])
                for j in sampled:
                    mean = mean + counts[j] / sum(counts.values()) * part_of[j][name]
                for i in setting.clients:
                    part_of[i][name] = mean.clone()
        outcome.mixed.append([{**copied(u[i]), **copied(v[i])} for i in setting.clients])
    outcome.state = [{"u": u[i], "v": v[i], "mu": 1.0} for i in setting.clients]
    return outcome


def _decay(setting: Setting, weights: Weights, rate: float) -> None:
    """What one optimizer over everything does to a part whose gradient is zero."""
    for name in weights:
        weights[name] = weights[name] * (1 - rate * setting.training.weight_decay)
