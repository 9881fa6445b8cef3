"""What the clients hold: the right examples, bytes until used, normalised like everyone does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import quiverfl as qv
from data_files import images
from quiverfl.data.augmentation import CropFlip, Normalize
from quiverfl.data.dataset import Dataset, compute_channel_statistics
from quiverfl.data.federated import make_federated
from quiverfl.data.partition import make_partition
from quiverfl.data.sources import load_dataset
from quiverfl.errors import QuiverError
from quiverfl.seeds import key_hashes


@pytest.fixture(scope="module")
def pictures() -> Dataset:
    train, test = images(60, (3, 6, 6)), images(30, (3, 6, 6), seed=1)
    labels = np.arange(60) % 3
    names = ("a", "b", "c")
    statistics = compute_channel_statistics(train)
    return Dataset("made", train, labels, test, labels[:30], 3, names, *statistics)


def test_every_client_gets_its_own_examples(pictures: Dataset) -> None:
    shares = make_partition(pictures, "dirichlet", 5, 0)
    data = make_federated(pictures, shares)
    assert data.clients == 5
    assert data.classes == 3
    for client in range(5):
        x, y = data.train.of_client(client)
        assert np.array_equal(x.numpy(), pictures.train_x[shares.train[client]])
        assert np.array_equal(y.numpy(), pictures.train_y[shares.train[client]])
        x, y = data.test.of_client(client)
        assert np.array_equal(x.numpy(), pictures.test_x[shares.test[client]])
        assert np.array_equal(y.numpy(), pictures.test_y[shares.test[client]])


def test_held_out_examples_come_from_the_training_part(pictures: Dataset) -> None:
    shares = make_partition(pictures, "iid", 4, 0, validation=0.25)
    data = make_federated(pictures, shares)
    x, y = data.test.of_client(2)
    assert np.array_equal(x.numpy(), pictures.train_x[shares.test[2]])
    assert np.array_equal(y.numpy(), pictures.train_y[shares.test[2]])


def test_images_stay_bytes_and_are_normalised_when_used(pictures: Dataset) -> None:
    data = make_federated(pictures, make_partition(pictures, "iid", 1, 0))
    assert data.train.x.dtype == torch.uint8
    assert data.prepare is not None
    before = data.train.x.clone()
    prepared = data.prepare(data.train.x)
    assert torch.equal(data.train.x, before)
    assert prepared.dtype == torch.float32
    expected = (before.double() / 255 - torch.tensor(pictures.mean).view(3, 1, 1)) / torch.tensor(
        pictures.std
    ).view(3, 1, 1)
    assert (prepared - expected).abs().max() < 1e-5
    assert prepared.mean(dim=(0, 2, 3)).abs().max() < 1e-5
    assert (prepared.std(dim=(0, 2, 3), unbiased=False) - 1).abs().max() < 1e-5


def test_the_default_dtype_does_not_matter(pictures: Dataset) -> None:
    normalize = Normalize(pictures.mean, pictures.std)
    x = torch.from_numpy(pictures.train_x[:4].copy())
    expected = normalize(x)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(normalize(x), expected)
        assert normalize(x).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_small_float_sets_are_normalised_at_once() -> None:
    digits = load_dataset("digits")
    data = make_federated(digits, make_partition(digits, "iid", 1, 0))
    assert data.prepare is None
    assert data.train.x.mean().abs() < 1e-5
    assert (data.train.x.std() - 1).abs() < 1e-3


def test_data_without_statistics_is_left_alone() -> None:
    made = load_dataset("synthetic", shape=[5], classes=2, train=20, test=4)
    data = make_federated(made, make_partition(made, "iid", 1, 0))
    assert np.array_equal(data.train.x.numpy(), made.train_x)
    assert data.prepare is None


def test_padding_is_black_as_on_raw_images(pictures: Dataset) -> None:
    """Augmenting normalised images equals normalising augmented raw ones."""
    data = make_federated(pictures, make_partition(pictures, "iid", 1, 0), "crop_flip")
    assert data.prepare is not None
    assert data.augment is not None
    keys = key_hashes(0, "test", np.arange(60))
    usual = CropFlip()(data.train.x, keys)
    assert torch.allclose(
        data.augment(data.prepare(data.train.x), keys), data.prepare(usual), atol=1e-6
    )
    assert not torch.equal(usual, data.train.x)


def test_augmentation_is_checked(pictures: Dataset) -> None:
    shares = make_partition(pictures, "iid", 1, 0)
    with pytest.raises(QuiverError, match="did you mean 'crop_flip'"):
        make_federated(pictures, shares, "cropflip")
    assert make_federated(pictures, shares, "none").augment is None
    made = load_dataset("synthetic", shape=[5], classes=2, train=20, test=4)
    with pytest.raises(QuiverError, match=r"need images.*\[5\]"):
        make_federated(made, make_partition(made, "iid", 1, 0), "crop_flip")


def test_ones_own_augmentation(pictures: Dataset) -> None:
    shares = make_partition(pictures, "iid", 1, 0)
    assert make_federated(pictures, shares, lambda x, keys: -x).augment is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_y": np.arange(59) % 3}, "60 inputs but 59 labels"),
        ({"test_y": np.full(30, 3)}, "label 3 is out of range"),
        ({"class_names": ("a",)}, "1 class names for 3 classes"),
        ({"train_x": np.zeros((60, 4))}, "inputs are float64"),
        ({"train_x": np.zeros((60, 4), np.uint8)}, "must be images"),
        ({"test_x": np.zeros((30, 3, 5, 5), np.uint8)}, "they must be the same"),
        ({"train_owner": np.zeros(3, int)}, "3 owners for 60 examples"),
        ({"train_owner": np.full(60, 2), "owner_names": ("a", "b")}, "owner 2 has no name"),
    ],
)
def test_a_dataset_is_checked(pictures: Dataset, change: dict[str, object], message: str) -> None:
    values = {key: getattr(pictures, key) for key in pictures.__dataclass_fields__}
    with pytest.raises(QuiverError, match=message):
        Dataset(**(values | change))


def _end_to_end(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple:
    offsets = np.cumsum([0, *(len(y) for _, y in pairs)])
    return (*(np.concatenate(parts) for parts in zip(*pairs, strict=True)), offsets)


def test_arrays_end_to_end_are_the_same_clients_as_a_pair_for_each() -> None:
    x, y = np.random.default_rng(0).normal(size=(9, 3)).astype("float32"), np.arange(9) % 4
    train = [(x[:2], y[:2]), (x[2:7], y[2:7]), (x[7:], y[7:])]
    test = [(x[:1], y[:1]), (x[:0], y[:0]), (x[1:3], y[1:3])]
    pairs = qv.FederatedData.from_arrays(train, test)
    whole = qv.FederatedData.from_offsets(_end_to_end(train), _end_to_end(test))
    assert whole.classes == pairs.classes == 4
    for one, other in ((whole.train, pairs.train), (whole.test, pairs.test)):
        assert one.offsets.tolist() == other.offsets.tolist()
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.y, other.y)
    shared = _end_to_end(train)
    kept = qv.FederatedData.from_offsets(shared, _end_to_end(test)).train.x
    assert kept.data_ptr() == shared[0].ctypes.data


@pytest.mark.parametrize(
    ("offsets", "tests", "said"),
    [
        ([0, 2, 5], [0, 1, 5], r"offsets are whole numbers .* \(4\)"),
        ([1, 2, 4], [0, 1, 4], "from 0 to the number of rows"),
        ([0, 3, 2, 4], [0, 1, 2, 4], "never fall"),
        ([0.0, 2.0, 4.0], [0, 2, 4], "whole numbers"),
        ([0, 4, 4], [0, 2, 4], "client 1 has no training data"),
        ([0, 2, 4], [0, 1, 2, 4], "train has 2 clients and test has 3"),
        (None, [0, 2, 4], r"give \(inputs, targets, offsets\)"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(offsets: list | None, tests: list, said: str) -> None:
    x, y = np.zeros((4, 2), "float32"), np.arange(4) % 2
    train = (x, y) if offsets is None else (x, y, offsets)
    with pytest.raises(qv.QuiverError, match=said):
        qv.FederatedData.from_offsets(train, (x, y, tests))
