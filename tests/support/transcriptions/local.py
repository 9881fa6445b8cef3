"""Local: train w; nothing is sent."""

from __future__ import annotations

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


def local(
    setting: Setting, start: list[State], *, epochs: int, mutant: str | None = None
) -> Outcome:
    U, V, W = setting.parts
    w = [copied({**state["u"], **state["v"]}) for state in start]
    trained = [copied(w[i]) for i in setting.clients]
    kept: list[Weights] = [{} for _ in setting.clients]
    outcome = Outcome()
    for t in range(setting.rounds):
        eta = setting.training.lr if mutant == "rate not decayed" else setting.rate(t)
        rate = same_rate(W, eta)
        if mutant == "personal_lr on the head":
            rate = {**rate, **same_rate(V, setting.personal_rate(t))}
        for i in setting.clients:
            if not setting.active(t)[i] and mutant != "offline clients train":
                continue
            buffer = kept[i] if mutant == "momentum survives the round" else {}
            for epoch in range(setting.epochs(i, epochs)):
                for rows in batches(setting, i, t, 0, epoch, mutant):
                    g = gradient(setting, i, rows, w[i], W, mutant)
                    step(setting, w[i], w[i], g, buffer, rate, mutant)
            kept[i] = buffer
            trained[i] = copied(w[i])
        outcome.local.append([copied(trained[i]) for i in setting.clients])
        outcome.mixed.append([copied(w[i]) for i in setting.clients])
    outcome.state = [
        {"u": {n: w[i][n] for n in U}, "v": {n: w[i][n] for n in V}, "mu": 1.0}
        for i in setting.clients
    ]
    return outcome
