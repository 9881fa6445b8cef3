"""Dis-PFL: personal sparse masks, averaged where neighbours keep a weight, pruned and regrown."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quiverfl.seeds import stream
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


def dispfl(
    setting: Setting,
    start: list[State],
    *,
    epochs: int,
    prune_rate: float,
    regrow: str = "random",
    mutant: str | None = None,
) -> Outcome:
    U, V, W = setting.parts
    w = [copied({**state["u"], **state["v"]}) for state in start]
    mask = [
        {n: m.double() for n, m in {**state["mask_u"], **state["mask_v"]}.items()}
        for state in start
    ]
    sent_before = [copied(mask[i]) for i in setting.clients]
    trained = [copied(w[i]) for i in setting.clients]
    outcome = Outcome()
    for t in range(setting.rounds):
        p, active = setting.weights(t), setting.active(t)
        if mutant == "transposed":
            p = p.T
        rate = same_rate(W, setting.rate(t))
        new_mask = [copied(mask[i]) for i in setting.clients]
        for i in setting.clients:
            if not active[i]:
                continue
            buffer: Weights = {}
            for epoch in range(setting.epochs(i, epochs)):
                for rows in batches(setting, i, t, 0, epoch):
                    g = gradient(setting, i, rows, w[i], W)
                    if mutant not in ("gradient not masked before clipping", "masked at the end"):
                        g = {n: g[n] * mask[i][n] for n in W}
                    step(setting, w[i], w[i], g, buffer, rate)
                    if mutant != "masked at the end":
                        w[i] = {n: w[i][n] * mask[i][n] for n in W}
            w[i] = {n: w[i][n] * mask[i][n] for n in W}
            trained[i] = copied(w[i])
            last = t == setting.rounds - 1
            if not (mutant == "masks stay in the last round" and last):
                new_mask[i] = _updated(setting, i, t, w[i], mask[i], prune_rate, regrow, mutant)
        local = trained
        if mutant == "new mask at the local stage":
            local = [{n: trained[i][n] * new_mask[i][n] for n in W} for i in setting.clients]
        outcome.local.append([copied(local[i]) for i in setting.clients])

        sent = mask
        if mutant == "masks exchanged one round late":
            sent = sent_before
        if mutant == "the new mask is sent":
            sent = new_mask
        received: list[Weights] = []
        for i in setting.clients:
            merged: Weights = {}
            for n in W:
                above = torch.zeros_like(w[i][n])
                below = torch.zeros_like(w[i][n])
                for j in setting.clients:
                    weight = float(p[i, j])
                    if mutant == "neighbours counted alike":
                        weight = float(weight > 0)
                    above = above + weight * sent[j][n] * w[j][n]
                    below = below + weight * sent[j][n]
                kept = below > 0
                mean = torch.where(kept, above / torch.where(kept, below, 1.0), 0.0)
                if mutant == "plain average":
                    mean = above
                if mutant == "regrown from zero":
                    mean = mean * mask[i][n]
                own = mask[i][n] if mutant == "the old mask applied" else new_mask[i][n]
                merged[n] = mean if mutant == "own mask not applied" else mean * own
            received.append(merged)
        sent_before = [copied(mask[i]) for i in setting.clients]
        w, mask = received, new_mask
        outcome.mixed.append([copied(w[i]) for i in setting.clients])
    outcome.state = [
        {
            "u": {n: w[i][n] for n in U},
            "v": {n: w[i][n] for n in V},
            "mask_u": {n: mask[i][n] for n in U},
            "mask_v": {n: mask[i][n] for n in V},
            "mu": 1.0,
        }
        for i in setting.clients
    ]
    return outcome


def _updated(
    setting: Setting,
    i: int,
    t: int,
    w: Weights,
    mask: Weights,
    prune_rate: float,
    regrow: str,
    mutant: str | None,
) -> Weights:
    """Per tensor: prune the smallest, regrow as many, those inactive before first."""
    _, _, W = setting.parts
    rate = prune_rate / 2 * (1 + math.cos(math.pi * t / setting.rounds))
    if mutant == "prune rate constant":
        rate = prune_rate
    scores = _scores(setting, i, t, w, mask, regrow, mutant)
    if mutant == "pruned over all tensors":
        names = list(W)
        sizes = [w[n].numel() for n in names]
        flat = _one_tensor(
            torch.cat([w[n].flatten() for n in names]),
            torch.cat([mask[n].flatten() for n in names]),
            torch.cat([scores[n].flatten() for n in names]),
            rate,
            mutant,
        )
        pieces = torch.split(flat, sizes)
        return {n: piece.view(w[n].shape) for n, piece in zip(names, pieces, strict=True)}
    return {
        n: _one_tensor(w[n].flatten(), mask[n].flatten(), scores[n].flatten(), rate, mutant).view(
            w[n].shape
        )
        for n in W
    }


def _one_tensor(
    weights: Tensor, mask: Tensor, scores: Tensor, rate: float, mutant: str | None
) -> Tensor:
    w, kept, score = weights.tolist(), mask.tolist(), scores.tolist()
    on = [k for k in range(len(w)) if kept[k] != 0]
    off = [k for k in range(len(w)) if kept[k] == 0]
    count = math.ceil(rate * len(on) - 1e-9)
    if mutant == "no allowance for rounding":
        count = math.ceil(rate * len(on))
    if mutant == "pruned count rounded down":
        count = math.floor(rate * len(on))
    smallest_first = sorted(on, key=lambda k: (abs(w[k]), k))
    if mutant == "largest pruned":
        smallest_first.reverse()
    pruned = smallest_first[:count]
    by_score = sorted(off, key=lambda k: (-score[k], k))
    again = sorted(pruned, key=lambda k: (-score[k], k))
    if mutant == "the just pruned regrown by index":
        again = sorted(pruned)
    candidates = by_score + again
    if mutant == "regrown among all alike":
        candidates = sorted(off + pruned, key=lambda k: (-score[k], k))
    if mutant == "lowest score regrown":
        candidates = by_score[::-1] + again
    grown = [] if mutant == "pruned and not regrown" else candidates[:count]
    new = torch.zeros_like(mask)
    for k in on:
        new[k] = 1.0
    for k in pruned:
        new[k] = 0.0
    for k in grown:
        new[k] = 1.0
    return new


def _scores(
    setting: Setting,
    i: int,
    t: int,
    w: Weights,
    mask: Weights,
    regrow: str,
    mutant: str | None,
) -> Weights:
    _, _, W = setting.parts
    if regrow == "gradient":
        first = next(batches(setting, i, t, 1, 0))
        if mutant == "gradient on the whole set":
            first = slice(None)
        g = gradient(setting, i, first, w, W)
        if mutant == "regrowth gradient masked":
            g = {n: g[n] * mask[n] for n in W}
        return {n: g[n].abs() for n in W}
    drawn_in = 0 if mutant == "the same draw every round" else t
    sizes = [w[n].numel() for n in W]
    noise = torch.from_numpy(stream(setting.seed, "noise", i, drawn_in).random(sum(sizes)))
    pieces = torch.split(noise, sizes)
    return {n: piece.view(w[n].shape) for n, piece in zip(W, pieces, strict=True)}
