"""What the phases of a shard work with: data, model, optimizer settings, modules to compute on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.engine.examples import Examples
from quiverfl.engine.programs import Executor, Program
from quiverfl.engine.workers import worker_place
from quiverfl.seeds import hashed
from quiverfl.task import Task
from quiverfl.training import Training
from quiverfl.transforms.privacy import DPSGD

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Company:
    """All clients that one process would compute together, wherever they are, in their order.

    How many examples they have decides how far batches are padded, and so the last bits of sums.
    """

    train: Integers
    test: Integers
    epochs: Integers | None
    """Each client's own, where they are not the phase's."""


@dataclass(frozen=True)
class ClientGroup:
    """Clients computed together: their rows in the shard and their numbers in the federation.

    `company` is given where some of those who belong to the group are on other ranks.
    """

    rows: Integers
    ids: Integers
    company: Company | None = None


@dataclass(frozen=True)
class Place:
    """Which phase of which round it is, and which share of all clients trains in that round."""

    round: int
    number: int
    share: float = 1.0


@dataclass(eq=False)
class PhaseContext:
    """The same for all phases, rounds and clients."""

    task: Task
    examples: Examples
    training: Training
    executor: Executor
    dtype: torch.dtype
    device: torch.device
    seed: int
    rounds: int
    draws: bool = False
    """Whether the model draws random numbers in training, as dropout does."""
    private: DPSGD | None = None
    """How gradients are clipped and blurred, if they are."""
    by_sample: bool = False
    """Whether gradients of several samples can be computed at once, each apart."""
    secret: bytes = b""
    """What their noise is drawn from where others know the seed."""
    _template: Program = field(init=False)
    _programs: dict[tuple[int, int], Program] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._template = Program.of(self.task, self.dtype, self.device)
        factors = self.examples.byte_factors
        if factors is not None:
            reader: Any = self._template.module
            reader.read_bytes(*factors)

    def draw_keys(self, clients: Integers, place: Place, step: int) -> Tensor | None:
        """What the clients' models draw from in a step, [clients], on the CPU; None if they draw
        nothing."""
        if not self.draws:
            return None
        found = hashed(self.seed, "draws", clients, place.round, place.number, step)
        return torch.from_numpy(found.view(np.int64))

    def program(self, slot: int = 0) -> Program:
        """The worker's own, as a module can be bound to one model at a time."""
        here = (worker_place(), slot)
        if here not in self._programs:
            # Of one that nobody computes on: a copy made meanwhile would be of a model in use.
            self._programs[here] = self._template.another()
        return self._programs[here]
