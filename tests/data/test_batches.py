"""Batch order and random streams: pure functions of their coordinates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiverfl.data.batches import batch_order, plan_batches
from quiverfl.seeds import key_hashes, stream


def test_a_stream_depends_on_every_argument_and_on_nothing_else() -> None:
    arguments: list[tuple[int, str, tuple[int, ...]]] = [
        *((0, "a", ()), (1, "a", ()), (0, "b", ())),
        *((0, "a", (0,)), (0, "a", (0, 1)), (0, "a", (1, 0))),
    ]
    draws = {
        tuple(stream(seed, purpose, *coordinates).integers(0, 2**62, 4))
        for seed, purpose, coordinates in arguments
    }
    assert len(draws) == 6
    np.random.seed(1)  # noqa: NPY002 - to show that it is not read
    assert tuple(stream(0, "a").integers(0, 2**62, 4)) in draws


def test_neighbouring_coordinates_give_unrelated_orders() -> None:
    """Seeding with round + client would make client i at round t equal client i - 1 at t + 1."""
    assert not np.array_equal(batch_order(0, 3, 5, 0, 0, 40), batch_order(0, 2, 6, 0, 0, 40))
    bits = key_hashes(0, "x", np.arange(4096))
    ones = np.unpackbits(bits.view(np.uint8)).mean()
    assert ones == pytest.approx(0.5, abs=0.01)
    assert len(np.unique(bits)) == 4096


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4))
def test_a_number_is_hashed_as_an_array_of_it_is(coordinates: list[int]) -> None:
    arrays = [np.array([number]) for number in coordinates]
    assert key_hashes(3, "x", *coordinates) == key_hashes(3, "x", *arrays)[0]
    assert key_hashes(3, "x", *coordinates).dtype == np.uint64


@given(
    sizes=st.lists(st.integers(1, 23), min_size=1, max_size=5),
    epochs=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    batch=st.one_of(st.none(), st.integers(1, 9)),
    at_once=st.sampled_from([1, 100, 1 << 16]),
)
def test_the_plan_of_many_clients_is_the_batch_order_of_each(
    sizes: list[int], epochs: list[int], batch: int | None, at_once: int
) -> None:
    """However many epochs are laid out together: one at a time, some, all."""
    clients = np.arange(len(sizes)) + 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quiverfl.data.batches.TOGETHER", at_once)
        found = plan_batches(
            3, clients, 2, 1, np.array(epochs[: len(sizes)]), np.array(sizes), batch
        )
    for place, (client, size) in enumerate(zip(clients, sizes, strict=True)):
        expected = []
        for epoch in range(epochs[place]):
            order = np.arange(size)
            if batch is not None:
                order = batch_order(3, int(client), 2, 1, epoch, size)
            width = batch or size
            expected += [(epoch, order[k : k + width].tolist()) for k in range(0, size, width)]
        got = [
            (
                int(found.epochs[place, s]),
                found.samples[place, s, : found.counts[place, s]].tolist(),
            )
            for s in range(int(found.steps[place]))
        ]
        assert got == expected
        assert (found.counts[place, int(found.steps[place]) :] == 0).all()


@given(st.integers(1, 60), st.integers(0, 100))
def test_an_epoch_visits_every_sample_once(size: int, client: int) -> None:
    assert sorted(batch_order(0, client, 0, 0, 0, size)) == list(range(size))
