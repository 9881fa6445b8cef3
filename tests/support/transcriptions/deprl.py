"""DePRL, Xiong et al. 2024: τ steps of the head, one of the representation, then consensus."""

from __future__ import annotations

from collections.abc import Iterator

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
    same_rate,
    step,
)


def deprl(
    setting: Setting,
    start: list[State],
    *,
    personal_steps: int,
    shared_steps: int,
    mutant: str | None = None,
) -> Outcome:
    U, V, _ = setting.parts
    phi = [copied(state["u"]) for state in start]
    theta = [copied(state["v"]) for state in start]
    trained = [{**copied(phi[i]), **copied(theta[i])} for i in setting.clients]
    kept: list[Weights] = [{} for _ in setting.clients]
    outcome = Outcome()

    def drawn(i: int, t: int, phase: int, count: int) -> Iterator[np.ndarray]:
        """That many batches, of as many epochs as it takes."""
        epoch = 0
        while count > 0:
            for rows in batches(setting, i, t, phase, epoch):
                if count > 0:
                    yield rows
                if mutant != "epochs in place of steps":
                    count = count - 1
            if mutant == "epochs in place of steps":
                count = count - 1
            epoch = epoch if mutant == "the first epoch again" else epoch + 1

    for t in range(setting.rounds):
        p, active = setting.weights(t), setting.active(t)
        if mutant == "transposed":
            p = p.T
        alpha, beta = setting.rate(t), setting.personal_rate(t)
        if mutant == "one rate for both":
            beta = alpha
        for i in setting.clients:
            if not active[i] and mutant != "offline clients train":
                continue
            before = copied(theta[i])
            buffer: Weights = {}
            for rows in drawn(i, t, 0, personal_steps):
                g = gradient(setting, i, rows, {**phi[i], **theta[i]}, V)
                step(setting, theta[i], theta[i], g, buffer, same_rate(V, beta))
            buffer = kept[i] if mutant == "momentum survives the round" else {}
            head = before if mutant == "the body sees the old head" else theta[i]
            for rows in drawn(i, t, 1, shared_steps):
                g = gradient(setting, i, rows, {**phi[i], **head}, U)
                step(setting, phi[i], phi[i], g, buffer, same_rate(U, alpha))
            kept[i] = buffer
            trained[i] = {**copied(phi[i]), **copied(theta[i])}
        outcome.local.append([copied(trained[i]) for i in setting.clients])

        phi = mixed(p, phi)
        if mutant == "the head is mixed":
            theta = mixed(p, theta)
        outcome.mixed.append([{**copied(phi[i]), **copied(theta[i])} for i in setting.clients])
    outcome.state = [{"u": phi[i], "v": theta[i], "mu": 1.0} for i in setting.clients]
    return outcome
