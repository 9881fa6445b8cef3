"""What a configuration needs on so many ranks: memory of each, bytes between them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quiverfl.config import Config
from quiverfl.data.federated import federate
from quiverfl.data.partition import Partition
from quiverfl.distributed.columns import BLOCK_BYTES
from quiverfl.distributed.placement import Placement
from quiverfl.distributed.rank_simulation import federation_of
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.shard import Shard
from quiverfl.experiment import (
    load_data,
    make_method,
    make_task,
    settings_of,
    share_out,
    topology_for,
)
from quiverfl.methods.state import fields_of
from quiverfl.topologies.graph import Graph

Integers = npt.NDArray[np.int64]

PROCESS = 350_000_000
"""Bytes that Python, torch and the rest of a process take before the first client."""
TOGETHER = 6
"""Copies of the parameters of the clients that are trained together: values, gradients, momentum
and what the backward pass keeps, which depends on the model and is not counted."""


@dataclass(frozen=True, eq=False)
class Needs:
    """Bytes, of every client."""

    federation: Placement
    state: int
    kept: int
    """Its model from before the last communication, where that is kept."""
    message: int
    shared: int
    model: int
    chunk: int
    """Clients that are trained together."""
    examples: Integers
    graph: Graph

    def memory(self, placement: Placement) -> int:
        """Of the rank that needs most."""
        each = [self.examples[placement.on(r)].sum() for r in range(placement.ranks)]
        several = 0 if placement.ranks == 1 else 6 * BLOCK_BYTES
        return (
            PROCESS
            + several
            + max(
                int(examples)
                + count * (self.state + self.kept)
                + min(count, self.chunk) * self.work
                for examples, count in zip(each, placement.counts, strict=True)
            )
        )

    @property
    def work(self) -> int:
        return TOGETHER * self.model

    def traffic(self, ranks: int) -> int:
        """Bytes that a rank sends in a round: messages there and back, once more for consensus."""
        clients, apart = self.federation.clients, (ranks - 1) / ranks**2
        if self.graph.one_row:
            sent = len(self.graph.senders) * self.message * apart
            back = self.message * (ranks - 1) / ranks
            return int(sent + back)
        return int(2 * clients * self.message * apart)

    def measuring(self, ranks: int) -> int:
        """Bytes that a rank sends in an evaluated round so that consensus can be measured."""
        return int(self.federation.clients * self.shared * (ranks - 1) / ranks**2)

    def ranks_for(self, available: int) -> int | None:
        """The fewest ranks that fit, each on a machine with so much memory; None: none do."""
        for ranks in range(1, self.federation.clients + 1):
            if self.memory(self._placed(ranks)) <= available:
                return ranks
        return None

    def _placed(self, ranks: int) -> Placement:
        return Placement.balanced(self.examples, ranks)


def needs_of(config: Config, ranks: int) -> tuple[Needs, Placement]:
    """From the data, and from the state and message of one client."""
    dataset, method = load_data(config), make_method(config)
    shares = share_out(config, dataset)
    settings = settings_of(config, shares.clients)
    task = make_task(config, dataset)
    train, test = (np.array([len(s) for s in part]) for part in (shares.train, shares.test))
    placement = federation_of(train, test, settings, ranks).placement
    shard = _one(config, shares, settings)
    model = (task.shared_layout.size + task.personal_layout.size) * settings.dtype.itemsize
    outbox = shard.outbox()
    sample = dataset.train_x[:1]
    shared = next(iter(fields_of(shard.state, "shared").values()), None)
    needs = Needs(
        placement,
        state=sum(leaf.nbytes for leaf in shard.state),
        kept=model if settings.keep_local else 0,
        message=sum(leaf.nbytes for leaf in outbox.values()),
        shared=0 if shared is None else shared.nbytes,
        model=model,
        chunk=shard.together,
        examples=(train + test) * (sample.nbytes + 8),
        graph=topology_for(config, method, shares.clients)(0),
    )
    return needs, placement


def _one(config: Config, shares: Partition, settings: RunSettings) -> Shard:
    from dataclasses import replace

    dataset, method = load_data(config), make_method(config)
    first = replace(shares, train=shares.train[:1], test=shares.test[:1], names=shares.names[:1])
    epochs = settings.epochs_per_client
    own = replace(settings, epochs_per_client=epochs and epochs[:1])
    task, data = make_task(config, dataset), federate(dataset, first)
    return Shard(task, data, method, config.training.training(), own)


def available_memory() -> int | None:
    """Bytes that can be had on this machine now; None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
