"""Batch order: a pure function of (seed, client, round, phase, epoch).

`batch_order` says it for one client and is what an independent transcription of a method uses;
`plan` lays the batches of several clients out at once and agrees with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quiverfl.seeds import Hashes, hashed

Integers = npt.NDArray[np.int64]

ADAPT = 1 << 20
"""The phase number of fine-tuning before an evaluation; its round is always 0."""
AT_ONCE = 1 << 16
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
    keys = hashed(seed, "batches", client, round, phase, epoch, np.arange(size))
    return np.argsort(keys, kind="stable")


def sample_keys(
    seed: int,
    client: object,
    round: int,
    phase: int,
    epoch: object,
    sample: object,
) -> Hashes:
    """64 random bits for one visit to one sample: what augmentation draws from."""
    return hashed(seed, "augment", client, round, phase, epoch, sample)


@dataclass(frozen=True)
class Plan:
    """Batches of several clients, step by step.

    samples[c, s, :counts[c, s]] are the client's own sample numbers in step s; epochs[c, s] is the
    epoch that step belongs to; client c has steps[c] steps.
    """

    samples: Integers
    counts: Integers
    epochs: Integers
    steps: Integers

    def first(self, most: int) -> Plan:
        """The first steps only."""
        cut = (self.samples[:, :most], self.counts[:, :most], self.epochs[:, :most])
        return Plan(*cut, np.minimum(self.steps, most))


def plan(
    seed: int,
    clients: Integers,
    round: int,
    phase: int,
    epochs: Integers | None,
    sizes: Integers,
    batch_size: int | None,
    at_most: int | None = None,
) -> Plan:
    """The batches of a phase for clients with their own number of epochs and samples.

    Without a number of epochs: `at_most` steps, of as many epochs as that takes.
    """
    batch, per_epoch, epochs = _rhythm(epochs, sizes, batch_size, at_most)
    steps = epochs * per_epoch
    count, width = int(steps.max(initial=0)), int(batch.max())
    samples = np.zeros((len(clients), count, width), dtype=np.int64)
    position, last = np.arange(sizes.max()), int(epochs.max(initial=0))
    inside = position < sizes[:, None]
    some = max(1, AT_ONCE // inside.size)
    for begin in range(0, last, some):
        number = np.arange(begin, min(begin + some, last))
        visits = _orders(seed, clients, round, phase, number, position, inside, batch_size)
        if inside.all():  # a client alone, or clients of one size; nobody reads behind one's steps
            wide = np.zeros((len(clients), len(number), int(per_epoch[0]) * width), dtype=np.int64)
            wide[:, :, : len(position)] = visits
            rows = slice(begin * int(per_epoch[0]), (begin + len(number)) * int(per_epoch[0]))
            samples[:, rows] = wide.reshape(len(clients), -1, width)
            continue
        taken = inside[:, None, :] & (number < epochs[:, None])[:, :, None]
        client, epoch, place = np.nonzero(taken)
        at = place // batch[client] + (begin + epoch) * per_epoch[client]
        samples[client, at, place % batch[client]] = visits[taken]
    counts = _counts(steps, sizes, batch, per_epoch)
    whole = Plan(samples, counts, np.arange(count) // per_epoch[:, None], steps)
    return whole if at_most is None else whole.first(at_most)


def batch_counts(
    epochs: Integers | None, sizes: Integers, batch_size: int | None, at_most: int | None = None
) -> Integers:
    """How many samples every step of every client has, as `plan` lays them out; 0 after the last.

    It takes no data, so it can be known of clients whose examples are elsewhere.
    """
    batch, per_epoch, epochs = _rhythm(epochs, sizes, batch_size, at_most)
    return _counts(epochs * per_epoch, sizes, batch, per_epoch)[:, :at_most]


def _rhythm(
    epochs: Integers | None, sizes: Integers, batch_size: int | None, at_most: int | None
) -> tuple[Integers, Integers, Integers]:
    """A whole batch, batches per epoch, and epochs, each per client."""
    batch = sizes if batch_size is None else np.minimum(batch_size, sizes)
    per_epoch = -(-sizes // batch)
    if epochs is None:
        assert at_most is not None
        epochs = -(-at_most // per_epoch)
    return batch, per_epoch, epochs


def _counts(steps: Integers, sizes: Integers, batch: Integers, per_epoch: Integers) -> Integers:
    index = np.arange(int(steps.max(initial=0)))
    last = index % per_epoch[:, None] == per_epoch[:, None] - 1
    rest = (sizes - (per_epoch - 1) * batch)[:, None]
    counts: Integers = np.where(last, rest, batch[:, None])
    counts[index >= steps[:, None]] = 0
    return counts


def _orders(
    seed: int,
    clients: Integers,
    round: int,
    phase: int,
    epochs: Integers,
    position: Integers,
    inside: npt.NDArray[np.bool_],
    batch_size: int | None,
) -> Integers:
    """[clients, epochs, positions]; what is not inside comes last."""
    if batch_size is None:
        return np.broadcast_to(position, (len(clients), len(epochs), len(position)))
    among = (clients[:, None, None], round, phase, epochs[:, None], position)
    keys = hashed(seed, "batches", *among)
    if not inside.all():
        keys[~np.broadcast_to(inside[:, None], keys.shape)] = np.iinfo(np.uint64).max
    return np.argsort(keys, axis=2, kind="stable")
