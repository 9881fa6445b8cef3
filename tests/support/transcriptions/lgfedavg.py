"""LG-FedAvg of Liang et al. 2020: own representation ℓ, one global model g that is given it.

A sampled client trains its ℓ and the received g together; the server averages the g's by samples.
Nothing here is called u or v: which part is which is the point.
"""

from __future__ import annotations

import torch

from transcriptions.spec import (
    BODY,
    HEAD,
    Outcome,
    Setting,
    State,
    Weights,
    batches,
    copied,
    gradient,
    step,
)


def lgfedavg(
    setting: Setting, start: list[State], *, epochs: int, mutant: str | None = None
) -> Outcome:
    local_names, global_names = BODY, HEAD
    if mutant == "body shared, head kept":
        local_names, global_names = HEAD, BODY
    first = [{**state["u"], **state["v"]} for state in start]
    own = [{n: first[i][n].clone() for n in local_names} for i in setting.clients]
    everyone = {n: first[0][n].clone() for n in global_names}
    trained = [copied(first[i]) for i in setting.clients]
    outcome = Outcome()
    for t in range(setting.rounds):
        lr_own, lr_global = setting.personal_rate(t), setting.rate(t)
        if mutant == "personal_lr ignored":
            lr_own = lr_global
        rate = {**dict.fromkeys(local_names, lr_own), **dict.fromkeys(global_names, lr_global)}
        sampled = [i for i in setting.clients if setting.active(t)[i]]
        received = copied(everyone)
        total = {n: torch.zeros_like(received[n]) for n in global_names}
        weight = 0.0
        for i in sampled:
            w = {**own[i], **copied(received)}
            buffer: Weights = {}
            for epoch in range(setting.epochs(i, epochs)):
                for rows in batches(setting, i, t, 0, epoch):
                    names = (*BODY, *HEAD)
                    if mutant == "representation frozen":
                        names = global_names
                    step(setting, w, w, gradient(setting, i, rows, w, names), buffer, rate)
            own[i] = {n: w[n] for n in local_names}
            trained[i] = copied(w)
            size = 1.0 if mutant == "not weighted by samples" else float(setting.samples(i))
            total = {n: total[n] + size * w[n] for n in global_names}
            weight = weight + size
        everyone = {n: total[n] / weight for n in global_names}
        outcome.local.append([copied(trained[i]) for i in setting.clients])
        outcome.mixed.append([{**copied(own[i]), **copied(everyone)} for i in setting.clients])
    outcome.state = [
        {"u": copied(everyone), "v": copied(own[i]), "mu": 1.0} for i in setting.clients
    ]
    return outcome
