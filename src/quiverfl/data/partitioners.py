"""Ways of sharing training examples out between clients (docs/reference/methods.md).

Each is a function (dataset, clients, samples, seed, **options) → one array of example numbers per
client. No example goes to two clients. `samples` is how many a client gets (None: all there are,
shared equally); where sizes are unequal by nature it is their mean, or for `natural` the most.
"""

from __future__ import annotations

import numpy as np

from quiverfl.data.dataset import Dataset
from quiverfl.errors import QuiverError
from quiverfl.seeds import stream
from quiverfl.types import Floats, Integers

ClientRows = list[Integers]


def iid(dataset: Dataset, clients: int | None, samples: int | None, seed: int) -> ClientRows:
    """Equal parts of all examples, shuffled."""
    clients = _require_clients(clients, "iid")
    size = examples_per_client(dataset, clients, samples)
    order = stream(seed, "partition-iid").permutation(len(dataset.train_y))
    return [np.sort(order[i * size : (i + 1) * size]) for i in range(clients)]


def dirichlet(
    dataset: Dataset, clients: int | None, samples: int | None, seed: int, alpha: float = 0.3
) -> ClientRows:
    """The paper's: equally many for every client, classes by its own prior from Dir(alpha).

    All clients ask at once for as many of each class as their prior says. Where a class runs
    short, a fair draw decides whose wish is granted, and the rest is asked for again among the
    classes that are left. Every further turn has lost a class, so there are at most as many turns
    as classes.
    """
    clients = _require_clients(clients, "dirichlet")
    _check_alpha(alpha)
    size = examples_per_client(dataset, clients, samples)
    left = count_classes(dataset)
    generator = stream(seed, "partition-dirichlet")
    priors = generator.dirichlet(np.full(dataset.classes, alpha), clients)
    counts = np.zeros((clients, dataset.classes), dtype=np.int64)
    while (missing := size - counts.sum(axis=1)).any():
        wishes = generator.multinomial(missing, _draw_class(priors, left))
        for label in np.flatnonzero(wishes.sum(axis=0) > left):
            wishes[:, label] = generator.multivariate_hypergeometric(wishes[:, label], left[label])
        counts += wishes
        left -= wishes.sum(axis=0)
    return deal_examples(dataset, counts, seed)


def dirichlet_by_class(
    dataset: Dataset,
    clients: int | None,
    samples: int | None,
    seed: int,
    alpha: float = 0.3,
    min_samples: int = 10,
) -> ClientRows:
    """Most libraries': each class is divided by Dir(alpha) over the clients; unequal sizes.

    A client that gets fewer than `min_samples` is filled up from the largest one, instead of
    drawing everything again until everyone has enough.
    """
    clients = _require_clients(clients, "dirichlet_by_class")
    _check_alpha(alpha)
    if min_samples < 1:
        raise QuiverError(f"data.min_samples = {min_samples}: every client needs at least 1.")
    size = examples_per_client(dataset, clients, samples)
    if size < min_samples:
        raise QuiverError(
            f"data.min_samples = {min_samples}, but {clients} clients have {size} training "
            "examples each on average: lower it, or take fewer clients."
        )
    generator = stream(seed, "partition-dirichlet-by-class")
    pool = count_classes(dataset)
    if samples is not None:
        pool = generator.multivariate_hypergeometric(pool, clients * size)
    counts = np.empty((clients, dataset.classes), dtype=np.int64)
    for label, available in enumerate(pool):
        fractions = generator.dirichlet(np.full(clients, alpha))
        cuts = np.round(np.cumsum(fractions)[:-1] * available).astype(np.int64)
        counts[:, label] = np.diff(cuts, prepend=0, append=available)
    _fill_up(counts, min_samples, generator)
    return deal_examples(dataset, counts, seed)


def pathological(
    dataset: Dataset,
    clients: int | None,
    samples: int | None,
    seed: int,
    classes_per_client: int = 2,
) -> ClientRows:
    """Every client has the same number of classes, equally many of each, and the same size."""
    clients = _require_clients(clients, "pathological")
    chosen = classes_per_client
    if not 1 <= chosen <= dataset.classes:
        raise QuiverError(
            f"data.classes_per_client = {chosen}: {dataset.name} has {dataset.classes} classes, "
            f"so a client can have 1 … {dataset.classes} of them."
        )
    examples_per_client(dataset, clients, samples)
    generator = stream(seed, "partition-pathological")
    available = count_classes(dataset)
    takers = _count_takers(available, clients, chosen)
    holds = _choose_classes(takers, clients, chosen, generator)
    portion = int((available[takers > 0] // takers[takers > 0]).min())
    if portion < 1:
        raise QuiverError(
            f"{clients} clients with {chosen} classes each: {dataset.name} has too few examples of "
            "some class; take fewer clients or fewer classes per client."
        )
    if samples is None:
        samples = chosen * portion
    if samples < chosen or -(-samples // chosen) > portion:
        raise QuiverError(
            f"{clients} clients with {chosen} classes each can have {chosen} … {chosen * portion} "
            f"training examples of {dataset.name}, not data.samples_per_client = {samples}: "
            "change it, or take fewer clients."
        )
    counts = holds * (samples // chosen)
    # What does not divide evenly goes to some of a client's classes, one each.
    order = np.argsort(np.where(holds, generator.random(holds.shape), 2.0), axis=1)
    np.put_along_axis(counts, order[:, : samples % chosen], samples // chosen + 1, axis=1)
    return deal_examples(dataset, counts, seed)


def natural(dataset: Dataset, clients: int | None, samples: int | None, seed: int) -> ClientRows:
    """Every owner in the data is a client; if fewer clients are wanted, they are drawn."""
    if dataset.train_owner is None:
        raise QuiverError(
            f"partition 'natural' needs data that says whose each example is, and {dataset.name} "
            "does not: set data.options.owner to the column of a table that says it, or take "
            "another partition."
        )
    chosen = choose_owners(dataset, clients, seed)
    held = find_rows_by_owner(dataset.train_owner, chosen)
    if samples is None:
        return held
    return [_limit_rows(rows, samples, seed, int(i)) for i, rows in zip(chosen, held, strict=True)]


def choose_owners(dataset: Dataset, clients: int | None, seed: int) -> Integers:
    """Choose the owners that become clients in the `natural` partition."""
    assert dataset.train_owner is not None
    everyone = np.unique(dataset.train_owner)
    if clients is None:
        return everyone
    if not 1 <= clients <= len(everyone):
        raise QuiverError(
            f"data.clients = {clients}, but {dataset.name} has {len(everyone)} owners of training "
            "examples: take at most that many, or leave it out to take them all."
        )
    return np.sort(stream(seed, "partition-natural").choice(everyone, clients, replace=False))


def find_rows_by_owner(owner: Integers, chosen: Integers) -> ClientRows:
    """The positions of each chosen owner's examples."""
    order = np.argsort(owner, kind="stable")
    starts = np.searchsorted(owner[order], chosen, side="left")
    ends = np.searchsorted(owner[order], chosen, side="right")
    return [order[start:end] for start, end in zip(starts, ends, strict=True)]


def examples_per_client(dataset: Dataset, clients: int, samples: int | None) -> int:
    """Number of examples per client when all clients get the same."""
    total = len(dataset.train_y)
    if clients < 1:
        raise QuiverError(f"data.clients = {clients}: there must be at least one client.")
    if clients > total:
        raise QuiverError(
            f"data.clients = {clients}, but {dataset.name} has {total} training examples: "
            "every client needs at least one."
        )
    if samples is None:
        return total // clients
    if samples < 1 or samples * clients > total:
        raise QuiverError(
            f"data.samples_per_client = {samples} with {clients} clients needs "
            f"{samples * clients} training examples; {dataset.name} has {total}, so it can be "
            f"1 … {total // clients}."
        )
    return samples


def count_classes(dataset: Dataset) -> Integers:
    return np.bincount(dataset.train_y, minlength=dataset.classes)


def deal_examples(dataset: Dataset, counts: Integers, seed: int) -> ClientRows:
    """Deal examples: counts[i, k] of class k to client i, in an order drawn for each class."""
    given: list[list[Integers]] = [[] for _ in counts]
    for label in range(dataset.classes):
        members = np.flatnonzero(dataset.train_y == label)
        order = stream(seed, "partition-deal", label).permutation(members)
        cuts = np.cumsum(counts[:, label])
        for client in np.flatnonzero(counts[:, label]):
            given[client].append(order[cuts[client] - counts[client, label] : cuts[client]])
    return [np.sort(np.concatenate(parts)) for parts in given]


def _draw_class(priors: Floats, left: Integers) -> Floats:
    """Priors over the classes that are left; what is left decides where a prior gives nothing."""
    open_ = np.where(left > 0, priors, 0.0)
    sums = open_.sum(axis=1, keepdims=True)
    rest = np.broadcast_to(left / left.sum(), priors.shape)
    return np.where(sums > 1e-12, open_ / np.maximum(sums, 1e-12), rest)


def _fill_up(counts: Integers, least: int, generator: np.random.Generator) -> None:
    """Moves examples from the largest clients, in place, until everyone has the least."""
    sizes = counts.sum(axis=1)
    for client in np.flatnonzero(sizes < least):
        while sizes[client] < least:
            donor = int(sizes.argmax())
            spare = max(1, (int(sizes[donor]) - least) // 2)
            amount = min(spare, least - int(sizes[client]))
            transfer = generator.multivariate_hypergeometric(counts[donor], amount)
            counts[donor] -= transfer
            counts[client] += transfer
            sizes[donor] -= amount
            sizes[client] += amount


def _count_takers(available: Integers, clients: int, chosen: int) -> Integers:
    """Number of clients that hold each class: in proportion to its size, at most all of them.

    Handed out one at a time to the class that then has most examples per holder, which makes the
    smallest portion as large as it can be.
    """
    takers = np.zeros(len(available), dtype=np.int64)
    for _ in range(clients * chosen):
        portion = np.where(takers < clients, available / (takers + 1), -1.0)
        takers[portion.argmax()] += 1
    return takers


def _choose_classes(
    takers: Integers, clients: int, chosen: int, generator: np.random.Generator
) -> Integers:
    """A 0/1 matrix [clients, classes] with these column sums and `chosen` in every row.

    Each client takes the classes with most places left, ties by lot. This never runs into a corner:
    a class with as many places as there are clients to come is always among those taken.
    """
    left = takers.copy()
    holds = np.zeros((clients, len(takers)), dtype=np.int64)
    for client in range(clients):
        order = np.lexsort((generator.random(len(left)), -left))
        holds[client, order[:chosen]] = 1
        left -= holds[client]
    return generator.permutation(holds)


def _limit_rows(rows: Integers, most: int, seed: int, owner: int) -> Integers:
    if most < 1:
        raise QuiverError(f"data.samples_per_client = {most}: it must be at least 1.")
    order = stream(seed, "partition-natural-samples", owner).permutation(rows)
    return np.sort(order[:most])


def _require_clients(clients: int | None, name: str) -> int:
    if clients is None:
        raise QuiverError(f"partition {name!r} needs data.clients: say how many clients there are.")
    return clients


def _check_alpha(alpha: float) -> None:
    number = isinstance(alpha, int | float | np.number) and not isinstance(alpha, bool)
    if not (number and alpha > 0 and np.isfinite(alpha)):
        raise QuiverError(f"data.alpha = {alpha!r}: it must be a positive number.")
