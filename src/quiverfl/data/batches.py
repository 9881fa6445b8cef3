"""Batch order: a pure function of (seed, client, round, phase, epoch).

`batch_order` says it for one client and is what an independent transcription of a method uses;
`plan_batches` lays the batches of several clients out at once and agrees with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from quiverfl.seeds import Hashes, key_hashes
from quiverfl.types import Flags, Integers

ADAPT = 1 << 20
"""The phase number of fine-tuning before an evaluation; its round is always 0."""
TOGETHER = 1 << 16
"""Visits that are laid out together, of as many epochs as that makes: fewer calls."""


def batch_order(
    seed: int,
    client: int,
    round: int,
    phase: int,
    epoch: int,
    size: int,
) -> Integers:
    """The order in which a client visits its samples in an epoch; batches are cut from it."""
    keys = key_hashes(seed, "batches", client, round, phase, epoch, np.arange(size))
    return np.argsort(keys, kind="stable")


def sample_key_hashes(
    seed: int,
    client: object,
    round: object,
    phase: int,
    epoch: object,
    sample: object,
) -> Hashes:
    """64 random bits for one visit to one sample: what augmentation draws from."""
    return key_hashes(seed, "augment", client, round, phase, epoch, sample)


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The batches of several clients in a phase: sample numbers, step by step.

    samples[c, s, :counts[c, s]] are the client's own sample numbers in step s; epochs[c, s] is the
    epoch that step belongs to; client c has steps[c] steps. `group_counts` are the counts of all
    clients that are computed together, if some of them are elsewhere: a batch is as wide as the
    widest of them.
    """

    samples: Integers
    counts: Integers
    epochs: Integers
    steps: Integers
    group_counts: Integers

    def truncate(self, most: int) -> BatchPlan:
        """The first steps only."""
        cut = (self.samples[:, :most], self.counts[:, :most], self.epochs[:, :most])
        return BatchPlan(*cut, np.minimum(self.steps, most), self.group_counts[:, :most])

    def arrange(self, order: Integers, group_counts: Integers) -> BatchPlan:
        """The clients in another order, in batches as wide as those of the group."""
        samples, widest = self.samples[order], int(group_counts.max())
        if widest > samples.shape[2]:  # padded with the client's first sample, as all padding is
            narrow = samples
            samples = np.zeros((*narrow.shape[:2], widest), narrow.dtype)
            samples[:, :, : narrow.shape[2]] = narrow  # np.pad takes longer
        own = (self.counts[order], self.epochs[order], self.steps[order])
        return BatchPlan(samples, *own, group_counts)

    def split_in_halves(self) -> tuple[BatchPlan, BatchPlan]:
        """The first half of every batch of a client, and the rest; a single sample is both."""
        (begin, first), (begins, firsts) = _halve(self.counts), _halve(self.group_counts)
        second, seconds = self.counts - begin, self.group_counts - begins
        zeros = np.zeros_like(begin)
        return self._cut(zeros, first, firsts), self._cut(begin, second, seconds)

    def _cut(self, begin: Integers, counts: Integers, group_counts: Integers) -> BatchPlan:
        last = self._widths[: self.samples.shape[1], None] - 1
        places = np.minimum(begin[:, :, None] + np.arange(int(group_counts.max())), last)
        samples = np.take_along_axis(self.samples, places, axis=2)
        return BatchPlan(samples, counts, self.epochs, self.steps, group_counts)

    @cached_property
    def clients(self) -> list[int]:
        """Number of clients that take each step: the first ones, if they are ordered by steps."""
        steps = np.arange(int(self.steps.max(initial=0)))
        clients: list[int] = np.count_nonzero(self.steps[:, None] > steps, axis=0).tolist()
        return clients

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """Clients and samples of each batch."""
        # Others of the group may take more steps than those here.
        return list(zip(self.clients, self._widths.tolist(), strict=False))

    @cached_property
    def has_padding(self) -> Flags:
        """Whether each step pads the batch of at least one client of the group."""
        counts = self.group_counts
        flags: Flags = np.any((counts > 0) & (counts < self._widths), axis=0)
        return flags

    @cached_property
    def _widths(self) -> Integers:
        widths: Integers = self.group_counts.max(axis=0)
        return widths


def _halve(counts: Integers) -> tuple[Integers, Integers]:
    """The first sample of each second half, and the number of samples in each first half."""
    first = -(-counts // 2)
    return np.where(counts > 1, first, 0), first


def plan_batches(
    seed: int,
    clients: Integers,
    round: int | Integers,
    phase: int,
    epochs: Integers | None,
    sizes: Integers,
    batch_size: int | None,
    most_steps: int | None = None,
) -> BatchPlan:
    """The batches of a phase for clients with their own number of epochs and samples.

    `round` is one for all, or each client's own.
    Without a number of epochs: `most_steps` steps, of as many epochs as that takes.
    """
    batch, per_epoch, epochs = _count_epochs(epochs, sizes, batch_size, most_steps)
    steps = epochs * per_epoch
    count, width = int(steps.max(initial=0)), int(batch.max())
    samples = np.zeros((len(clients), count, width), dtype=np.int64)
    position, last = np.arange(sizes.max()), int(epochs.max(initial=0))
    inside = position < sizes[:, None]
    epochs_at_once = max(1, TOGETHER // inside.size)
    for begin in range(0, last, epochs_at_once):
        number = np.arange(begin, min(begin + epochs_at_once, last))
        visits = _order_samples(seed, clients, round, phase, number, position, inside, batch_size)
        if inside.all():  # a client alone, or clients of one size; no client reads behind its steps
            wide = np.zeros((len(clients), len(number), int(per_epoch[0]) * width), dtype=np.int64)
            wide[:, :, : len(position)] = visits
            rows = slice(begin * int(per_epoch[0]), (begin + len(number)) * int(per_epoch[0]))
            samples[:, rows] = wide.reshape(len(clients), -1, width)
            continue
        taken = inside[:, None, :] & (number < epochs[:, None])[:, :, None]
        client, epoch, place = np.nonzero(taken)
        at = place // batch[client] + (begin + epoch) * per_epoch[client]
        samples[client, at, place % batch[client]] = visits[taken]
    counts = _count_samples(steps, sizes, batch, per_epoch)
    whole = BatchPlan(samples, counts, np.arange(count) // per_epoch[:, None], steps, counts)
    return whole if most_steps is None else whole.truncate(most_steps)


def count_batches(
    epochs: Integers | None, sizes: Integers, batch_size: int | None, most_steps: int | None = None
) -> Integers:
    """Number of samples per client and step, as `plan_batches` lays them out.

    0 after the last step. It takes no data, so it is known of clients that are elsewhere, too.
    """
    batch, per_epoch, epochs = _count_epochs(epochs, sizes, batch_size, most_steps)
    return _count_samples(epochs * per_epoch, sizes, batch, per_epoch)[:, :most_steps]


def _count_epochs(
    epochs: Integers | None, sizes: Integers, batch_size: int | None, most_steps: int | None
) -> tuple[Integers, Integers, Integers]:
    """A whole batch, batches per epoch, and epochs, each per client."""
    batch = sizes if batch_size is None else np.minimum(batch_size, sizes)
    per_epoch = -(-sizes // batch)
    if epochs is None:
        assert most_steps is not None
        epochs = -(-most_steps // per_epoch)
    return batch, per_epoch, epochs


def _count_samples(
    steps: Integers, sizes: Integers, batch: Integers, per_epoch: Integers
) -> Integers:
    index = np.arange(int(steps.max(initial=0)))
    last = index % per_epoch[:, None] == per_epoch[:, None] - 1
    rest = (sizes - (per_epoch - 1) * batch)[:, None]
    counts: Integers = np.where(last, rest, batch[:, None])
    counts[index >= steps[:, None]] = 0
    return counts


def _order_samples(
    seed: int,
    clients: Integers,
    round: int | Integers,
    phase: int,
    epochs: Integers,
    position: Integers,
    inside: npt.NDArray[np.bool_],
    batch_size: int | None,
) -> Integers:
    """[clients, epochs, positions]; what is not inside comes last."""
    if batch_size is None:
        return np.broadcast_to(position, (len(clients), len(epochs), len(position)))
    round = round if isinstance(round, int) else round[:, None, None]
    among = (clients[:, None, None], round, phase, epochs[:, None], position)
    keys = key_hashes(seed, "batches", *among)
    if not inside.all():
        keys[~np.broadcast_to(inside[:, None], keys.shape)] = np.iinfo(np.uint64).max
    return np.argsort(keys, axis=2, kind="stable")
