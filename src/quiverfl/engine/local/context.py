"""The context of all phases of a shard: data, model, optimizer settings, modules to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quiverfl.engine.local.examples import Examples
from quiverfl.engine.local.programs import Executor, Program, ProgramPool
from quiverfl.seeds import key_hashes
from quiverfl.task import Task
from quiverfl.training import Training
from quiverfl.transforms.privacy import DPSGD
from quiverfl.types import Integers


@dataclass(frozen=True)
class FullGroup:
    """The whole vectorised group, including clients on other ranks, in client order.

    Numbers of examples decide how far batches are padded, and so the last bits of sums.
    """

    clients: Integers
    train: Integers
    """Training examples per client; `test` has the test examples."""
    test: Integers
    epochs: Integers | None
    """Epochs per client, if they differ from the phase's."""


@dataclass(frozen=True)
class ClientGroup:
    """Clients computed together: their rows in the shard and their numbers in the federation.

    `full_group` is set when part of the group is on other ranks.
    """

    rows: Integers
    ids: Integers
    full_group: FullGroup | None = None


@dataclass(frozen=True)
class PhaseIndex:
    """Number of the phase and its round, and the fraction of all clients that trains in it.

    If clients do not wait for each other, `round` has one entry per client.
    """

    round: int | Integers
    number: int
    active_fraction: float = 1.0


@dataclass(eq=False)
class PhaseContext:
    """Everything a phase needs that is the same for all phases, rounds and clients."""

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
    """How gradients are clipped and noised, if they are."""
    by_sample: bool = False
    """Whether gradients of several samples can be computed at once, each apart."""
    secret: bytes = b""
    """Secret that the noise is drawn from, if other clients know the run's seed."""
    programs: ProgramPool = field(init=False)
    program: Callable[..., Program] = field(init=False)
    """slot → a module of this worker's own, as a module is bound to one model at a time."""

    def __post_init__(self) -> None:
        template = Program.of(self.task, self.dtype, self.device)
        factors = self.examples.byte_factors
        if factors is not None:
            reader: Any = template.module
            reader.read_bytes(*factors)
        self.programs = ProgramPool(template)
        self.program = self.programs.take

    def draw_keys(
        self, clients: Integers, index: PhaseIndex, steps: int | Integers
    ) -> Tensor | None:
        """The keys of the clients' models in some steps, on the CPU; None if they draw nothing."""
        if not self.draws:
            return None
        round = index.round if isinstance(index.round, int) else index.round[clients]
        hashes = key_hashes(self.seed, "draws", clients, round, index.number, steps)
        return torch.from_numpy(hashes.view(np.int64))
