"""Which samples batches are made of, on the device before the first step of a phase.

A batch plan is small and is drawn on the CPU. Moved step by step, a device would wait for every
piece of it; so that of a whole phase is moved together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.seeds import Hashes
from quiverfl.transforms.noise import Noise

Integers = npt.NDArray[np.int64]


class Picks(NamedTuple):
    """One batch of stacked clients."""

    places: Tensor
    """Where its samples lie in their source, [k, n]."""
    inside: Tensor | None = None
    """True for samples, False for padding, [k, n]; None where nothing is padded."""
    draws: Tensor | None = None
    """Of every client, for what its model draws, [k]."""
    keys: Hashes | None = None
    """64 random bits per sample, for augmentation on the CPU or of one's own."""
    elsewhere: Integers | None = None
    """Where the inputs lie, [k · n], if they stay on disk and are fetched step by step."""
    cuts: tuple[Tensor, ...] = ()
    """What augmentation draws in place of the keys, each [k · n]."""
    noise: Noise | None = None
    """What private gradients are blurred with, if they are."""

    def weights(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.inside is None else self.inside.to(dtype)


def moved(picks: Iterable[Picks], device: torch.device) -> Iterable[Picks]:
    """The batches of a phase on a device, in as few copies as there are kinds of tensors."""
    if device.type == "cpu":
        return picks  # one by one, as they are asked for
    every = list(picks)
    places = _together([one.places for one in every], device)
    insides = iter(_together([one.inside for one in every if one.inside is not None], device))
    draws = iter(_together([one.draws for one in every if one.draws is not None], device))
    kinds = zip(*(one.cuts for one in every), strict=True)
    cuts = list(zip(*(_together(kind, device) for kind in kinds), strict=True))
    return [
        one._replace(
            places=there,
            inside=None if one.inside is None else next(insides),
            draws=None if one.draws is None else next(draws),
            cuts=cuts[number] if cuts else (),
        )
        for number, (one, there) in enumerate(zip(every, places, strict=True))
    ]


def _together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    if not tensors:
        return []
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device)
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def padding(counts: Integers, among: Integers) -> Tensor | None:
    """Which samples count, up to the largest number `among` them; None where nobody is padded."""
    width = int(among.max())
    if len(among) == 1 or (among == width).all():
        return None
    return torch.from_numpy(np.arange(width) < counts[:, None])


def weights_of(counts: Integers, among: Integers, like: Tensor) -> Tensor | None:
    """1 for samples, 0 for padding; None where nobody is padded."""
    inside = padding(counts, among)
    return None if inside is None else inside.to(dtype=like.dtype, device=like.device)
