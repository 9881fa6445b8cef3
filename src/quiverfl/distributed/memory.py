"""What a configuration needs on this many ranks: memory of each, bytes between them."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from quiverfl.data.dataset import Dataset
from quiverfl.data.federated import make_federated
from quiverfl.distributed.columns import BLOCK_BYTES
from quiverfl.distributed.ranks import Placement
from quiverfl.distributed.simulation import work_of
from quiverfl.engine.memory import training_bytes
from quiverfl.engine.shard import Shard
from quiverfl.methods.state import select_fields
from quiverfl.runs.config import Config
from quiverfl.runs.experiment import (
    load_data,
    make_method,
    make_run_topology,
    make_task,
    partition_data,
)
from quiverfl.topologies.graph import Graph
from quiverfl.trees import tree_leaves
from quiverfl.types import Integers

PROCESS = 350_000_000
"""Bytes that Python, torch and the rest of a process take before the first client."""
BLOCKS = 6
"""Blocks of columns that are on their way at a time: three, sent and received."""


@dataclass(frozen=True, eq=False)
class RankNeeds:
    """Bytes of one client, but for `examples`, which are each client's."""

    work: Integers
    """Samples that each client visits in an epoch or more: what placement goes by."""
    state: int
    kept: int
    """Its model from before the last communication, where that is kept."""
    message: int
    shared: int
    training: int
    """While it trains: its model, gradient, momentum, and the activations of a batch."""
    chunk: int
    """Clients that train at the same time."""
    examples: Integers
    graph: Graph
    copies: int = 0
    """Copies of a client's message that are kept, or made on its way."""
    view: int = 0
    """What all clients know of each other, which every rank keeps."""

    @property
    def clients(self) -> int:
        return len(self.examples)

    def memory(self, ranks: int) -> int:
        """Bytes that the rank with the highest need takes."""
        placement = Placement.balance(self.work, ranks)
        blocks = 0 if ranks == 1 else BLOCKS * BLOCK_BYTES
        counts = np.array(placement.counts)
        examples = np.add.reduceat(self.examples, placement.cuts[:-1])
        states = counts * (self.state + self.copies + self.kept)
        training = np.minimum(counts, self.chunk) * self.training
        return PROCESS + self.view + blocks + int((examples + states + training).max())

    def traffic(self, ranks: int) -> int:
        """Bytes that a rank sends in a round so that messages are mixed."""
        apart = (ranks - 1) / ranks**2
        if self.graph.one_row:
            scattered = len(self.graph.senders) * self.message * apart
            return int(scattered + self.message * (ranks - 1) / ranks)
        return int(2 * self.clients * self.message * apart)

    def measuring(self, ranks: int) -> int:
        """Bytes that a rank sends in an evaluated round so that consensus can be measured."""
        return int(self.clients * self.shared * (ranks - 1) / ranks**2)

    def ranks_for(self, available: int) -> int | None:
        """The fewest ranks that fit, each on a machine with so much memory; None: none do."""
        if self.memory(self.clients) > available:  # a client on each: there is no less
            return None
        fit = (n for n in range(1, self.clients + 1) if self.memory(n) <= available)
        return next(fit, None)


def predict_rank_memory(config: Config) -> RankNeeds:
    """From the data, and from the state and message of one client."""
    dataset, method = load_data(config), make_method(config)
    partition, task = partition_data(config, dataset), make_task(config, dataset)
    settings = config.run.for_clients(partition.clients)
    first = replace(
        partition, train=partition.train[:1], test=partition.test[:1], names=partition.names[:1]
    )
    epochs = settings.epochs_per_client
    alone = replace(settings, epochs_per_client=epochs and epochs[:1])
    data, training = make_federated(dataset, first), config.training
    shard = Shard(task, data, method, training, alone)
    shared = next(iter(select_fields(shard.state, "shared").values()), None)
    model = (task.shared_layout.size + task.personal_layout.size) * settings.dtype.itemsize
    train, test = (np.array([len(s) for s in part]) for part in (partition.train, partition.test))
    message = sum(leaf.nbytes for leaf in shard.outbox().values())
    topology = make_run_topology(config, method, partition.clients)
    as_here = replace(alone, threads=alone.threads or torch.get_num_threads())
    each, chunk = training_bytes(task, data, training, as_here, int(train.max()))
    return RankNeeds(
        work=work_of(train, settings),
        state=sum(leaf.nbytes for leaf in shard.state),
        kept=model if settings.keep_local else 0,
        copies=config.transforms().copies * message,
        message=message,
        shared=0 if shared is None else shared.nbytes,
        training=each,
        chunk=chunk,
        examples=(train + test) * _example(config, dataset),
        graph=topology(0),
        view=0 if topology.reports is None else topology.reports.memory(partition.clients),
    )


def _example(config: Config, dataset: Dataset) -> int:
    """Bytes of one; inputs that stay on disk take none."""
    inputs = 0 if config.data.mapped else sum(x[:1].nbytes for _, x in tree_leaves(dataset.train_x))
    return int(inputs + dataset.train_y[:1].nbytes)


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
