"""Partitions: disjoint, complete, of the promised sizes and proportions, a function of the seed."""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quiverfl.data.dataset import Dataset
from quiverfl.data.partition import PARTITIONS, Partition, make_partition, proportional_counts
from quiverfl.data.partition import partition_options as resolved
from quiverfl.data.partitioners import _fill_up, count_classes
from quiverfl.errors import QuiverError
from quiverfl.seeds import stream

DRAWN = ["dirichlet", "dirichlet_by_class", "pathological", "iid"]


def dataset(
    train: list[int], test: list[int], owners: tuple[list[int], list[int] | None] | None = None
) -> Dataset:
    """So many examples of each class; inputs that nobody looks at."""
    train_y = np.repeat(np.arange(len(train)), train)
    test_y = np.repeat(np.arange(len(test)), test)
    train_y = stream(1, "shuffle").permutation(train_y)
    names = tuple(str(label) for label in range(len(train)))
    whose: dict[str, Any] = {}
    if owners is not None:
        whose["train_owner"] = np.array(owners[0])
        whose["test_owner"] = None if owners[1] is None else np.array(owners[1])
    return Dataset(
        "made",
        np.zeros((len(train_y), 1), np.float32),
        train_y,
        np.zeros((len(test_y), 1), np.float32),
        test_y,
        len(train),
        names,
        **whose,
    )


CIFAR = dataset([5000] * 10, [1000] * 10)
TINY = dataset([500] * 200, [50] * 200)


def check(data: Dataset, shares: Partition) -> None:
    """What holds for every partition."""
    everyone = np.concatenate(shares.train)
    assert len(np.unique(everyone)) == len(everyone)
    for client in range(shares.clients):
        train, test = shares.train[client], shares.test[client]
        assert len(train) >= 1
        assert len(np.unique(test)) == len(test)
        counts = np.bincount(data.train_y[train], minlength=data.classes)
        assert (shares.train_counts[client] == counts).all()
        labels = data.train_y if shares.held_out else data.test_y
        counts = np.bincount(labels[test], minlength=data.classes)
        assert (shares.test_counts[client] == counts).all()


def check_test_follows_train(data: Dataset, shares: Partition) -> None:
    have = np.bincount(data.test_y, minlength=data.classes) > 0
    for train, test in zip(shares.train_counts, shares.test_counts, strict=True):
        known = np.where(have, train, 0)
        if known.sum():
            exact = known / known.sum() * test.sum()
            assert (np.abs(test - exact) < 1).all()


@settings(max_examples=60, deadline=None)
@given(
    train=st.lists(st.integers(1, 60), min_size=2, max_size=6),
    test_size=st.integers(0, 20),
    name=st.sampled_from(DRAWN),
    clients=st.integers(1, 12),
    alpha=st.floats(0.01, 10),
    chosen=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_invariants(
    train: list[int],
    test_size: int,
    name: str,
    clients: int,
    alpha: float,
    chosen: int,
    seed: int,
) -> None:
    data = dataset(train, [test_size] * len(train))
    options: dict[str, Any] = {
        "dirichlet": {"alpha": alpha},
        "dirichlet_by_class": {"alpha": alpha, "min_samples": 1},
        "pathological": {"classes_per_client": chosen},
        "iid": {},
    }[name]
    try:
        shares = make_partition(data, name, clients, seed, **options)
    except QuiverError:
        per_class = clients * chosen > sum(min(clients, size) for size in train)
        assert clients > sum(train) or (
            name == "pathological" and (chosen > len(train) or per_class)
        )
        return
    assert shares.clients == clients
    check(data, shares)
    check_test_follows_train(data, shares)
    sizes = shares.train_counts.sum(axis=1)
    if name != "dirichlet_by_class":
        assert (sizes == sizes[0]).all()
    if name in ("dirichlet", "iid"):
        assert sizes[0] == sum(train) // clients
    if name == "dirichlet_by_class":
        assert (shares.train_counts.sum(axis=0) == train).all()
    if name == "pathological":
        assert ((shares.train_counts > 0).sum(axis=1) == chosen).all()
        held = shares.train_counts[shares.train_counts > 0]
        assert (held == held[0]).all()


@pytest.mark.parametrize("name", DRAWN)
def test_the_seed_decides_and_nothing_else(name: str) -> None:
    first, again = (make_partition(CIFAR, name, 20, 3) for _ in range(2))
    other = make_partition(CIFAR, name, 20, 4)
    for part in ("train", "test"):
        pairs = list(zip(getattr(first, part), getattr(again, part), strict=True))
        assert all(np.array_equal(a, b) for a, b in pairs)
        pairs = list(zip(getattr(first, part), getattr(other, part), strict=True))
        assert not all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("data", [CIFAR, TINY], ids=["10 classes", "200 classes"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dirichlet", {"alpha": 0.1}),
        ("dirichlet", {"alpha": 0.001}),
        ("dirichlet_by_class", {"alpha": 0.1}),
        ("pathological", {"classes_per_client": 2}),
        ("iid", {}),
    ],
)
def test_a_thousand_clients_take_seconds(name: str, options: dict[str, Any], data: Dataset) -> None:
    start = time.process_time()
    shares = make_partition(data, name, 1000, 0, **options)
    assert time.process_time() - start < 5
    check(data, shares)
    check_test_follows_train(data, shares)


def test_the_papers_dirichlet_gives_equal_sizes_and_uses_everything() -> None:
    shares = make_partition(CIFAR, "dirichlet", 100, 0, alpha=0.3)
    assert (shares.train_counts.sum(axis=1) == 500).all()
    assert (shares.train_counts.sum(axis=0) == 5000).all()
    assert (shares.test_counts.sum(axis=1) == 100).all()


def test_smaller_alpha_is_more_unlike() -> None:
    measured = [
        make_partition(CIFAR, "dirichlet", 100, 0, alpha=alpha).heterogeneity()
        for alpha in (0.1, 0.3, 1.0, 100.0)
    ]
    assert measured == sorted(measured, reverse=True)
    assert measured[0] > 0.6
    assert measured[-1] < 0.1


def test_dirichlet_follows_the_priors_when_nothing_runs_short() -> None:
    """With few samples of many, a client's shares are those of Dir(alpha): mean 1/K, variance as
    it should be with the multinomial draw on top."""
    classes, samples, alpha = 10, 100, 0.5
    counts = make_partition(
        dataset([50_000] * classes, [1] * classes),
        "dirichlet",
        2000,
        0,
        alpha=alpha,
        samples_per_client=samples,
    ).train_counts
    shares = counts / samples
    mean = 1 / classes
    prior = mean * (1 - mean) / (classes * alpha + 1)
    expected = prior + (mean * (1 - mean) - prior) / samples
    assert shares.mean(axis=0) == pytest.approx(mean, abs=0.015)
    assert shares.var(axis=0).mean() == pytest.approx(expected, rel=0.05)


def test_dirichlet_by_class_gives_unequal_sizes_but_never_too_few() -> None:
    shares = make_partition(CIFAR, "dirichlet_by_class", 500, 0, alpha=0.05, min_samples=20)
    sizes = shares.train_counts.sum(axis=1)
    assert sizes.min() >= 20
    assert sizes.max() > 3 * sizes.min()
    assert (shares.train_counts.sum(axis=0) == 5000).all()


def test_dirichlet_by_class_at_the_edge() -> None:
    """Everyone must get exactly the average: the filling up still ends."""
    shares = make_partition(
        dataset([50] * 2, [5] * 2), "dirichlet_by_class", 10, 0, alpha=0.01, min_samples=10
    )
    assert (shares.train_counts.sum(axis=1) == 10).all()


@pytest.mark.parametrize("alpha", [0.3, 1.0, 10.0])
@pytest.mark.parametrize("spare", [0, 1, 3])
def test_filling_up_takes_from_nobody_what_that_client_needs_itself(
    spare: int, alpha: float
) -> None:
    """Where hardly anybody has much to spare, nobody who gives ends with too few."""
    data = dataset([45, 35, 40], [5] * 3)
    for seed in range(10):
        shares = make_partition(
            data, "dirichlet_by_class", 8, seed, alpha=alpha, min_samples=15 - spare
        )
        check(data, shares)
        assert shares.train_counts.sum(axis=1).min() >= 15 - spare


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [
        # The largest gives half of what it has above 8: 2, then the other one 1, and so on.
        ([[12, 0], [0, 11], [1, 0]], [8, 8, 8]),
        # 20 have 12 to spare, of which half are 6: enough for the five that are missing.
        ([[20, 0], [0, 9], [0, 3]], [15, 9, 8]),
    ],
)
def test_filling_up_by_hand(counts: list[list[int]], sizes: list[int]) -> None:
    moved = np.array(counts)
    _fill_up(moved, 8, stream(0, "fill"))
    assert moved.sum(axis=1).tolist() == sizes
    assert moved.sum(axis=0).tolist() == np.sum(counts, axis=0).tolist()
    assert (moved >= 0).all()


def test_a_class_that_runs_short_is_shared_out_by_lot() -> None:
    """Twenty clients wish for ten each of a class of twenty: no place in the order is luckier."""
    data = dataset([20, 400], [5, 5])
    taken = np.zeros(20)
    for seed in range(60):
        shares = make_partition(data, "dirichlet", 20, seed, alpha=100.0, samples_per_client=20)
        assert shares.train_counts[:, 0].sum() == 20
        assert shares.train_counts[:, 0].max() <= 6
        taken += shares.train_counts[:, 0]
    # 1,200 examples, by lot 60 for each client: eight standard deviations of 7.5 are not reached.
    assert taken.min() > 30
    assert taken.max() < 90
    assert abs(taken[:10].sum() - taken[10:].sum()) < 140  # four deviations of 35


@settings(max_examples=80, deadline=None)
@given(
    train=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    clients=st.integers(1, 5),
    chosen=st.integers(1, 3),
)
def test_pathological_gives_the_most_that_unequal_classes_allow(
    train: list[int], clients: int, chosen: int
) -> None:
    """The smallest portion is the largest of all ways to share the places out, tried one by one."""
    chosen = min(chosen, len(train))
    places = [
        takers
        for takers in product(range(clients + 1), repeat=len(train))
        if sum(takers) == clients * chosen
    ]
    best = max(
        min(size // count for size, count in zip(train, takers, strict=True) if count)
        for takers in places
    )
    assume(best >= 1 and clients <= sum(train))
    shares = make_partition(
        dataset(train, [5] * len(train)), "pathological", clients, 0, classes_per_client=chosen
    )
    assert (shares.train_counts.sum(axis=1) == chosen * best).all()


@pytest.mark.parametrize(
    ("classes", "chosen", "size"), [([10, 3], 1, 3), ([60, 20, 20], 2, 20), ([9, 9, 1], 1, 4)]
)
def test_larger_classes_have_more_clients(classes: list[int], chosen: int, size: int) -> None:
    """10 and 3 among four: three clients have 3 of the one class, one has 3 of the other."""
    shares = make_partition(
        dataset(classes, [5] * len(classes)), "pathological", 4, 0, classes_per_client=chosen
    )
    assert (shares.train_counts.sum(axis=1) == size).all()


@pytest.mark.parametrize(("classes", "chosen"), [(10, 2), (10, 5), (200, 10), (200, 20)])
def test_the_papers_pathological_splits(classes: int, chosen: int) -> None:
    data = CIFAR if classes == 10 else TINY
    shares = make_partition(data, "pathological", 100, 0, classes_per_client=chosen)
    size = len(data.train_y) // 100
    assert (shares.train_counts.sum(axis=0) == count_classes(data)).all()
    assert set(np.unique(shares.train_counts)) == {0, size // chosen}


def test_pathological_with_a_size_that_does_not_divide() -> None:
    shares = make_partition(
        CIFAR, "pathological", 10, 0, classes_per_client=3, samples_per_client=100
    )
    for row in shares.train_counts:
        assert sorted(row[row > 0]) == [33, 33, 34]


@pytest.mark.parametrize("name", ["dirichlet", "pathological", "iid"])
def test_few_samples(name: str) -> None:
    shares = make_partition(CIFAR, name, 50, 0, samples_per_client=20, test_per_client=40)
    check(CIFAR, shares)
    check_test_follows_train(CIFAR, shares)
    assert (shares.train_counts.sum(axis=1) == 20).all()
    assert (shares.test_counts.sum(axis=1) == 40).all()


def test_few_samples_on_average_where_sizes_differ() -> None:
    shares = make_partition(CIFAR, "dirichlet_by_class", 50, 0, samples_per_client=40)
    assert shares.train_counts.sum() == 50 * 40


@pytest.mark.parametrize("name", DRAWN)
def test_validation_is_taken_from_the_training_examples(name: str) -> None:
    whole = make_partition(CIFAR, name, 20, 5)
    shares = make_partition(CIFAR, name, 20, 5, validation=0.2)
    check(CIFAR, shares)
    assert shares.held_out
    for kept, held, together in zip(shares.train, shares.test, whole.train, strict=True):
        assert np.array_equal(np.sort(np.concatenate([kept, held])), together)
        assert len(held) == round(0.2 * len(together))
    exact = 0.2 * whole.train_counts
    assert (np.abs(shares.test_counts - exact) < 1.5).all()


def test_natural_follows_the_owners() -> None:
    data = dataset([4, 4], [2, 2], ([7, 3, 7, 3, 9, 9, 7, 3], [9, 3, 7, 7]))
    shares = make_partition(data, "natural", None, 0)
    assert [rows.tolist() for rows in shares.train] == [[1, 3, 7], [0, 2, 6], [4, 5]]
    assert [rows.tolist() for rows in shares.test] == [[1], [2, 3], [0]]
    check(data, shares)


def test_natural_takes_a_few_of_every_kind_of_an_owners_test_examples() -> None:
    owners = [0] * 40 + [1] * 40
    data = dataset([40, 40], [40, 40], (owners, [0] * 20 + [1] * 20 + [0] * 20 + [1] * 20))
    shares = make_partition(data, "natural", None, 0, test_per_client=10)
    assert shares.test_counts.tolist() == [[5, 5], [5, 5]]
    again = make_partition(data, "natural", None, 1, test_per_client=10)
    assert any(not np.array_equal(a, b) for a, b in zip(shares.test, again.test, strict=True))


def test_natural_with_fewer_clients_and_samples() -> None:
    owners = np.repeat(np.arange(10), 10).tolist()
    data = dataset([50, 50], [10, 10], (owners, None))
    shares = make_partition(data, "natural", 4, 0, samples_per_client=3)
    check(data, shares)
    check_test_follows_train(data, shares)
    whose = [np.unique(np.array(owners)[rows]) for rows in shares.train]
    assert all(len(owner) == 1 for owner in whose)
    assert len(np.unique(whose)) == 4
    assert all(len(rows) == 3 for rows in shares.train)


@pytest.mark.parametrize(
    ("name", "clients", "options", "message"),
    [
        ("dirichlet", 101, {}, "data.clients = 101, but made has 100 training examples"),
        ("iid", 0, {}, "at least one client"),
        ("iid", None, {}, "needs data.clients"),
        ("pathological", 5, {"classes_per_client": 5}, "made has 4 classes"),
        ("pathological", 5, {"classes_per_client": 0}, "made has 4 classes"),
        ("pathological", 90, {"classes_per_client": 3}, "too few examples of some class"),
        ("pathological", 10, {"samples_per_client": 11}, "so it can be 1 … 10"),
        ("pathological", 10, {"samples_per_client": 1}, "can have 2 … 10"),
        ("dirichlet", 10, {"samples_per_client": 11}, "needs 110 training examples"),
        ("dirichlet", 10, {"alpha": 0.0}, "data.alpha = 0.0"),
        ("dirichlet", 10, {"alpha": float("nan")}, "data.alpha = nan"),
        ("dirichlet", 10, {"beta": 1.0}, "no option 'beta'.*nown are alpha"),
        ("dirichlet_by_class", 20, {"min_samples": 6}, "5 training examples each on average"),
        ("dirichlet_by_class", 20, {"min_samples": 0}, "at least 1"),
        ("natural", 2, {}, "does not"),
        ("dirchlet", 10, {}, "did you mean 'dirichlet'"),
        ("iid", 10, {"validation": 1.0}, "between 0 and 1"),
        ("iid", 100, {"validation": 0.5}, "single training example"),
        ("iid", 10, {"test_per_client": 0}, "data.test_per_client = 0"),
    ],
)
def test_impossible_partitions_are_refused_with_the_reason(
    name: str, clients: int | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(QuiverError, match=message):
        make_partition(dataset([25] * 4, [5] * 4), name, clients, 0, **options)


def test_too_many_natural_clients_are_refused() -> None:
    data = dataset([2, 2], [1, 1], ([0, 0, 1, 1], None))
    with pytest.raises(QuiverError, match="has 2 owners"):
        make_partition(data, "natural", 3, 0)


def test_proportions_are_kept_when_test_examples_run_short() -> None:
    counts = proportional_counts(np.array([90, 10]), np.array([18, 50]), 100, stream(0, "t"))
    assert counts.tolist() == [18, 2]


def test_a_class_without_test_examples_is_left_out() -> None:
    counts = proportional_counts(np.array([50, 25, 25]), np.array([0, 9, 9]), 10, stream(0, "t"))
    assert counts.tolist() == [0, 5, 5]


def test_heterogeneity_by_hand() -> None:
    data = dataset([2, 2], [1, 1], ([0, 0, 0, 0], None))
    rows = [np.flatnonzero(data.train_y == label) for label in (0, 1)]
    counts = np.array([[2, 0], [0, 2]])
    apart = Partition(tuple(rows), tuple(rows), counts, counts)
    assert apart.heterogeneity() == 0.5
    same = Partition(tuple(rows), tuple(rows), np.ones((2, 2), int), counts)
    assert same.heterogeneity() == 0.0


def test_arrays_for_a_file() -> None:
    shares = make_partition(CIFAR, "dirichlet_by_class", 7, 0)
    arrays = shares.arrays()
    for part in ("train", "test"):
        offsets = arrays[f"{part}_offsets"]
        for client, rows in enumerate(getattr(shares, part)):
            mine = arrays[f"{part}_indices"][offsets[client] : offsets[client + 1]]
            assert np.array_equal(mine, rows)
    assert all(array.dtype == np.int64 for array in arrays.values())


def test_options_with_their_defaults() -> None:
    assert resolved("dirichlet", {}) == {"alpha": 0.3}
    assert resolved("dirichlet_by_class", {"alpha": 1.0}) == {"alpha": 1.0, "min_samples": 10}
    assert set(PARTITIONS) == {*DRAWN, "natural"}
