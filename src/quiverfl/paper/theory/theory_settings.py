"""How much is run: enough to see it all, or just enough to see that it works."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TheorySettings:
    rounds: tuple[int, ...]
    """The T of the rate."""
    part_rounds: tuple[int, ...]
    """The T of its parts: start, noise and diversity alone."""
    seeds: int
    connectivity_rounds: int
    mixing_rounds: int
    limit_rounds: int
    steps: tuple[float, ...]
    """η_u · L_u · K_u of the limits."""


FULL = TheorySettings(
    rounds=(16, 64, 256, 1024),
    part_rounds=(16, 48, 144),
    seeds=3,
    connectivity_rounds=128,
    mixing_rounds=40,
    limit_rounds=120,
    steps=(0.4, 0.2, 0.1),
)
QUICK = TheorySettings(
    rounds=(8, 24, 72),
    part_rounds=(4, 12),
    seeds=2,
    connectivity_rounds=14,
    mixing_rounds=10,
    limit_rounds=16,
    steps=(0.4,),
)
