"""Compression: fewer bits of each number, or fewer numbers.

A leaf is cut into blocks of 96 numbers, each coded by itself, so that a layer of small weights is
coded as finely as one of large ones, and rows, ranks and peers code alike. `transmit` gives the
numbers that a receiver decodes; codec.py has the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor

from quiverfl.errors import QuiverError
from quiverfl.options import Fraction, check_options
from quiverfl.transforms.noise import BLOCK

Feedback = Literal["auto", "remainder", "replica"]
"""Handling of the part of a message that is not sent.

    remainder   it stays with its sender: u' = u - Q(u) + Σ P · Q(u), on every graph
    replica     clients send differences to a replica x̂ that neighbours keep, as in CHOCO-SGD:
                x̂ ← x̂ + Q(x - x̂), x ← x + step · (Σ P · x̂ - x̂), where the graph never changes
    auto        remainder for a method with a mass and on changing graphs, replica elsewhere
"""
SCALE_BYTES = 2
"""Bytes of a block's scale, a bfloat16."""
INDEX_BYTES = 1
SLACK = 1 + 2.0**-7
"""A scale is rounded to eight bits; so much larger, it is never too small for its block."""


class Compression(Protocol):
    """A frozen dataclass of options."""

    name: ClassVar[str]

    @property
    def is_random(self) -> bool:
        """Whether it needs dither."""

    @property
    def feedback(self) -> Feedback: ...
    @property
    def step(self) -> float | None: ...

    def for_replicas(self) -> Compression:
        """The same for differences to replicas: coding must bring replicas nearer."""

    def transmit(self, blocks: Tensor, dither: Tensor) -> Tensor:
        """Code and decode blocks [clients, blocks, numbers]; a new tensor."""

    def coded_bytes(self, numbers: int, element: int) -> int:
        """Bytes of a coded leaf of `numbers` numbers of `element` bytes each."""

    def replica_step(self) -> float:
        """The step towards the neighbours' replicas, unless `step` is given."""


@dataclass(frozen=True)
class Quantize:
    """A whole number of steps for every number, between -(2^(b-1) - 1) and 2^(b-1) - 1.

    Stochastic rounding goes up with the probability that makes it right on average. Replicas are
    followed with rounding to the nearest, which is never further off than sending nothing.
    """

    bits: Literal[8, 4, 2] = 8
    rounding: Literal["auto", "stochastic", "nearest"] = "auto"
    feedback: Feedback = "auto"
    step: Fraction | None = None

    name: ClassVar[str] = "quantize"

    def __post_init__(self) -> None:
        check_options(self, "compression")
        _check_step(self.feedback, self.step)

    @property
    def is_random(self) -> bool:
        return self.rounding != "nearest"

    def for_replicas(self) -> Quantize:
        return replace(self, rounding="nearest") if self.rounding == "auto" else self

    @property
    def levels(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    def scales(self, blocks: Tensor) -> Tensor:
        """The step of every block, [clients, blocks, 1], as it is sent."""
        largest = blocks.abs().amax(dim=-1, keepdim=True)  # vector_norm takes thirty times as long
        # Not zero, so that a block of zeros can be divided by it.
        largest = largest.mul_(SLACK / self.levels).clamp_min_(1e-30)
        return largest.bfloat16().to(blocks.dtype)

    def transmit(self, blocks: Tensor, dither: Tensor) -> Tensor:
        scales = self.scales(blocks)
        return self.codes(blocks, scales, dither).mul_(scales)

    def codes(self, blocks: Tensor, scales: Tensor, dither: Tensor) -> Tensor:
        """Every number as a whole number of steps."""
        steps = torch.mul(blocks, scales.reciprocal())
        return steps.add_(dither).floor_() if self.is_random else steps.round_()

    def coded_bytes(self, numbers: int, element: int) -> int:
        return SCALE_BYTES * -(-numbers // BLOCK) + -(-numbers * self.bits // 8)

    def replica_step(self) -> float:
        return 1.0 if self.bits > 2 else 0.5


@dataclass(frozen=True)
class _Sparse:
    """Sends a fraction of the numbers of every block, at least one, each as it is."""

    fraction: Fraction = 0.1
    feedback: Feedback = "auto"
    step: Fraction | None = None

    def __post_init__(self) -> None:
        check_options(self, "compression")
        _check_step(self.feedback, self.step)

    def for_replicas(self) -> Self:
        return self

    def count_block(self, numbers: int) -> int:
        """Numbers that are sent of a block."""
        return max(1, round(self.fraction * numbers))

    def count_leaf(self, numbers: int) -> int:
        """Numbers that are sent of a leaf."""
        whole, rest = divmod(numbers, BLOCK)
        return whole * self.count_block(BLOCK) + (self.count_block(rest) if rest else 0)

    def replica_step(self) -> float:
        return self.fraction


@dataclass(frozen=True)
class TopK(_Sparse):
    """The numbers of the largest magnitude, with their indices."""

    name: ClassVar[str] = "top_k"
    is_random = False

    def transmit(self, blocks: Tensor, dither: Tensor) -> Tensor:
        return _zero_others(blocks, self.select_indices(blocks))

    def select_indices(self, blocks: Tensor) -> Tensor:
        return blocks.abs().topk(self.count_block(blocks.shape[-1]), dim=-1).indices

    def coded_bytes(self, numbers: int, element: int) -> int:
        return self.count_leaf(numbers) * (element + INDEX_BYTES)


@dataclass(frozen=True)
class RandomK(_Sparse):
    """Numbers chosen at random. The receiver knows which ones, as it knows the seed."""

    name: ClassVar[str] = "random_k"
    is_random = True

    def transmit(self, blocks: Tensor, dither: Tensor) -> Tensor:
        return _zero_others(blocks, self.select_indices(dither))

    def select_indices(self, dither: Tensor) -> Tensor:
        return dither.topk(self.count_block(dither.shape[-1]), dim=-1).indices

    def coded_bytes(self, numbers: int, element: int) -> int:
        return self.count_leaf(numbers) * element


def _zero_others(blocks: Tensor, indices: Tensor) -> Tensor:
    return torch.zeros_like(blocks).scatter_(-1, indices, blocks.gather(-1, indices))


def _check_step(feedback: Feedback, step: float | None) -> None:
    if step is not None and feedback == "remainder":
        raise QuiverError(
            f"compression.step = {step}: what stays with its sender is not stepped "
            'towards; leave step out, or set feedback = "replica".'
        )
