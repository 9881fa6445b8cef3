"""Readers of the published formats, on tiny files of the same form, whole and damaged."""

from __future__ import annotations

import gzip
import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_files import (
    idx_bytes,
    write_cifar10_binary,
    write_cifar10_python,
    write_cifar100_binary,
    write_cifar100_python,
    write_idx,
    write_image,
    write_pickle,
    write_tiny_imagenet,
)
from quiverfl.data.sources import idx, load_dataset
from quiverfl.data.sources.cifar import load_pickle
from quiverfl.errors import QuiverError


def nothing_left(root: Path) -> bool:
    cache = root / ".quiver-cache"
    return not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize("write", [write_cifar10_binary, write_cifar10_python])
def test_cifar10_binary_and_python_versions(write: Any, tmp_path: Path) -> None:
    x, y = write(tmp_path)
    data = load_dataset("cifar10", tmp_path, verify=False)
    assert np.array_equal(data.train_x, x[:20])
    assert np.array_equal(data.train_y, y[:20])
    assert np.array_equal(data.test_x, x[20:])
    assert np.array_equal(data.test_y, y[20:])
    assert data.train_x.dtype == np.uint8
    assert data.input_shape == (3, 32, 32)
    assert data.class_names == tuple(f"class{label}" for label in range(10))
    scaled = x[:20] / 255
    assert data.mean == pytest.approx(scaled.mean(axis=(0, 2, 3)), abs=1e-12)
    assert data.std == pytest.approx(scaled.std(axis=(0, 2, 3)), abs=1e-12)


def test_cifar100_fine_and_coarse(tmp_path: Path) -> None:
    x, coarse, fine = write_cifar100_binary(tmp_path)
    data = load_dataset("cifar100", tmp_path, verify=False)
    assert np.array_equal(data.train_y, fine[:6])
    assert np.array_equal(data.test_x, x[6:])
    assert (data.classes, data.class_names[99]) == (100, "fine99")
    above = load_dataset("cifar100", tmp_path, verify=False, labels="coarse")
    assert np.array_equal(above.test_y, coarse[6:])
    assert (above.classes, above.class_names[19]) == (20, "coarse19")
    with pytest.raises(QuiverError, match="did you mean 'coarse'"):
        load_dataset("cifar100", tmp_path, verify=False, labels="corse")


def test_cifar100_python(tmp_path: Path) -> None:
    x, fine = write_cifar100_python(tmp_path)
    data = load_dataset("cifar100", tmp_path, verify=False)
    assert np.array_equal(data.train_x, x[:6])
    assert np.array_equal(data.test_y, fine[6:])
    assert data.class_names[3] == "fine3"


def test_checksums_are_held_against_the_published_ones(tmp_path: Path) -> None:
    write_cifar10_binary(tmp_path)
    with pytest.raises(QuiverError, match=r"data_batch_1.bin has the wrong checksum.*5dd7e06a"):
        load_dataset("cifar10", tmp_path)
    assert nothing_left(tmp_path)


def test_a_truncated_binary_is_called_that(tmp_path: Path) -> None:
    write_cifar10_binary(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(QuiverError, match=r"data_batch_3.bin is truncated: 12291 bytes"):
        load_dataset("cifar10", tmp_path, verify=False)
    path.write_bytes(b"")
    with pytest.raises(QuiverError, match=r"data_batch_3.bin is truncated: 0 bytes"):
        load_dataset("cifar10", tmp_path, verify=False)
    assert nothing_left(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write_cifar10_binary(tmp_path)
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").unlink()
    with pytest.raises(QuiverError, match=r"test_batch.bin is missing"):
        load_dataset("cifar10", tmp_path, verify=False)


def test_a_wrong_number_of_classes(tmp_path: Path) -> None:
    write_cifar10_binary(tmp_path)
    folder = tmp_path / "cifar-10-batches-bin"
    content = bytearray((folder / "data_batch_2.bin").read_bytes())
    content[0] = 10
    (folder / "data_batch_2.bin").write_bytes(content)
    with pytest.raises(QuiverError, match=r"data_batch_2.bin holds the label 10.*10 classes"):
        load_dataset("cifar10", tmp_path, verify=False)
    write_cifar100_binary(tmp_path)
    (tmp_path / "cifar-100-binary" / "fine_label_names.txt").write_text("one\ntwo\n")
    with pytest.raises(
        QuiverError, match=r"fine_label_names.txt names 2 classes; cifar100 has 100"
    ):
        load_dataset("cifar100", tmp_path, verify=False)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1, 2], "holds a list"),
        ({b"data": 3, b"labels": [1]}, "not a CIFAR batch"),
        ({b"data": np.zeros((2, 3072), np.uint8)}, "not a CIFAR batch"),
        ({b"data": np.zeros((2, 9), np.uint8), b"labels": [1, 2]}, r"shape \[2, 9\]"),
        ({b"data": np.zeros((1, 3072)), b"labels": [1]}, "float64"),
    ],
)
def test_a_pickle_that_is_no_batch(batch: Any, message: str, tmp_path: Path) -> None:
    write_cifar10_python(tmp_path)
    write_pickle(tmp_path / "cifar-10-batches-py" / "data_batch_4", batch)
    with pytest.raises(QuiverError, match=f"data_batch_4 .*{message}"):
        load_dataset("cifar10", tmp_path, verify=False)


class Evil:
    """What an attacker would put into a pickle: run on loading."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def test_a_pickle_cannot_run_anything(tmp_path: Path) -> None:
    write_cifar10_python(tmp_path)
    trap = tmp_path / "sprung"
    for evil in (Evil(trap), {b"data": Evil(trap), b"labels": [1]}):
        write_pickle(tmp_path / "cifar-10-batches-py" / "data_batch_1", evil)
        with pytest.raises(QuiverError, match=r"data_batch_1.*asks for \w+\.mkdir.*not loaded"):
            load_dataset("cifar10", tmp_path, verify=False)
    assert not trap.exists()
    pickle.loads(pickle.dumps(Evil(trap)))
    assert trap.exists()  # the trap does work where pickles are trusted


def test_a_truncated_pickle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    content = pickle.dumps({b"data": np.arange(100)}, protocol=2)
    for cut in (0, 1, 10, 50, len(content) - 1):
        path.write_bytes(content[:cut])
        with pytest.raises(QuiverError, match=r"batch is (truncated|not a pickle)"):
            load_pickle(path)


def test_a_pickle_as_python_2_wrote_it(tmp_path: Path) -> None:
    """The published files: byte strings without `_codecs`, numpy under its old name."""
    path = tmp_path / "batch"
    head = b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\n"
    build = b"ndarray\nq\x04K\x00\x85U\x01b\x87R(K\x01K\x03\x85cnumpy\ndtype\nU\x02u1K\x00K\x01\x87"
    state = b"R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x03\x07\x08\xfftb"
    path.write_bytes(head + build + state + b"U\x06labels]K\x05au.")
    value = load_pickle(path)
    assert value[b"labels"] == [5]
    assert value[b"data"].tolist() == [7, 8, 255]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("name", "folder"),
    [("mnist", "mnist"), ("mnist", "MNIST/raw"), ("fashion_mnist", "fashion-mnist")],
)
def test_idx_files(name: str, folder: str, packed: bool, tmp_path: Path) -> None:
    x, y = write_idx(tmp_path / folder, packed)
    data = load_dataset(name, tmp_path, verify=False)
    assert np.array_equal(data.train_x, x[:12, None])
    assert np.array_equal(data.test_y, y[12:])
    assert data.input_shape == (1, 28, 28)
    assert data.classes == 10


def test_damaged_idx_files_are_named(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist", packed=True)
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    good = path.read_bytes()
    plain = gzip.decompress(good)
    cases = {
        good[:-20]: "truncated or damaged",
        good[: len(good) // 2]: "truncated or damaged",
        b"not gzip at all": "truncated or damaged",
        gzip.compress(plain[:-5]): "truncated: its",
        gzip.compress(plain[:9]): "truncated: its",
        gzip.compress(b"\x00\x00\x08\x01" + plain[4:]): "not an IDX file",
    }
    for content, message in cases.items():
        path.write_bytes(content)
        with pytest.raises(QuiverError, match=f"train-images-idx3-ubyte.gz.*{message}"):
            load_dataset("mnist", tmp_path, verify=False)
    path.write_bytes(good)
    with pytest.raises(QuiverError, match=r"train-images-idx3-ubyte.gz has the wrong checksum"):
        load_dataset("mnist", tmp_path)
    assert nothing_left(tmp_path)


def test_what_is_packed_counts_and_not_how_it_was_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian ships Fashion-MNIST compressed by another program: other files, the same bytes."""
    folder = tmp_path / "fashion-mnist"
    _, y = write_idx(folder, packed=True)
    published = {}
    for path in folder.iterdir():
        content = gzip.decompress(path.read_bytes())
        published[path.stem] = hashlib.md5(content).hexdigest()
        path.write_bytes(gzip.compress(content, compresslevel=1, mtime=1))
    monkeypatch.setattr(idx, "FASHION_MNIST_UNPACKED", published)
    assert np.array_equal(load_dataset("fashion_mnist", tmp_path).test_y, y[12:])
    labels = folder / "train-labels-idx1-ubyte.gz"
    changed = gzip.decompress(labels.read_bytes())[:-1] + b"\x00"
    labels.write_bytes(gzip.compress(changed))
    with pytest.raises(QuiverError, match=r"train-labels-idx1.*md5 of the unpacked file"):
        load_dataset("fashion_mnist", tmp_path)


def test_idx_labels_must_fit(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist", packed=False)
    labels = tmp_path / "mnist" / "train-labels-idx1-ubyte"
    labels.write_bytes(idx_bytes(np.arange(11)))
    with pytest.raises(QuiverError, match=r"holds 12 images and .* 11 labels"):
        load_dataset("mnist", tmp_path)
    labels.write_bytes(idx_bytes(np.arange(12)))
    with pytest.raises(QuiverError, match=r"train-labels-idx1-ubyte holds the label 11"):
        load_dataset("mnist", tmp_path)


def test_tiny_imagenet(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path)
    data = load_dataset("tiny_imagenet", tmp_path)
    assert data.train_x.shape == (9, 3, 64, 64)
    assert data.train_y.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert data.test_y.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.class_names == ("goldfish", "bullfrog", "n03")
    # The grey JPEG came in as three equal channels of its value; flat JPEGs are exact to 2.
    first = data.train_x[0].astype(int)
    assert (first[0] == first[1]).all()
    assert abs(first - 20).max() <= 2
    assert abs(data.test_x[5].astype(int) - 85).max() <= 2


def test_a_corrupt_image_is_named(tmp_path: Path) -> None:
    folder = write_tiny_imagenet(tmp_path)
    path = folder / "train" / "n02" / "images" / "n02_1.JPEG"
    good = path.read_bytes()
    for content in (b"", b"no image", good[: len(good) // 2]):
        path.write_bytes(content)
        with pytest.raises(QuiverError, match=r"n02_1.JPEG is not a readable image"):
            load_dataset("tiny_imagenet", tmp_path)
    path.unlink()
    (folder / "val" / "images" / "val_3.JPEG").unlink()
    with pytest.raises(QuiverError, match=r"val_3.JPEG is not a readable image.*No such file"):
        load_dataset("tiny_imagenet", tmp_path)
    assert nothing_left(tmp_path)


def test_tiny_imagenet_with_wrong_classes_or_empty_folders(tmp_path: Path) -> None:
    folder = write_tiny_imagenet(tmp_path)
    (folder / "wnids.txt").write_text("n01\nn02\nn03\nn04\n")
    with pytest.raises(QuiverError, match=r"lists 4 classes and .* holds 3: .*n04.*missing"):
        load_dataset("tiny_imagenet", tmp_path)
    (folder / "wnids.txt").write_text("n01\nn02\n")
    with pytest.raises(QuiverError, match=r"lists 2 classes and .* holds 3: .*n03"):
        load_dataset("tiny_imagenet", tmp_path)
    (folder / "wnids.txt").write_text("n01\nn02\nn03\n")
    for path in (folder / "train" / "n03" / "images").iterdir():
        path.unlink()
    with pytest.raises(QuiverError, match=r"n03/images holds no images"):
        load_dataset("tiny_imagenet", tmp_path)
    assert nothing_left(tmp_path)


def test_tiny_imagenet_annotations_must_name_known_classes(tmp_path: Path) -> None:
    folder = write_tiny_imagenet(tmp_path)
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\nval_1.JPEG\tn99\n")
    with pytest.raises(QuiverError, match=r"val_annotations.txt, line 2: .*n99"):
        load_dataset("tiny_imagenet", tmp_path)


def test_images_of_other_sizes_are_named(tmp_path: Path) -> None:
    folder = write_tiny_imagenet(tmp_path)
    write_image(folder / "train" / "n02" / "images" / "n02_9.JPEG", np.zeros((3, 32, 64), np.uint8))
    with pytest.raises(QuiverError, match=r"n02_9.JPEG is 32×64, .* is 64×64"):
        load_dataset("tiny_imagenet", tmp_path)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "tiny_imagenet", "mnist", "fashion_mnist"])
def test_data_that_is_not_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(QuiverError, match=f"{name} is not there: run 'quiver data fetch {name}"):
        load_dataset(name, tmp_path)


def test_names_and_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(QuiverError, match="unknown data 'cifar-10'; did you mean 'cifar10'"):
        load_dataset("cifar-10", tmp_path)
    with pytest.raises(QuiverError, match="no option 'verfy'; did you mean 'verify'"):
        load_dataset("cifar10", tmp_path, verfy=False)


def test_the_root_can_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar10_binary(tmp_path)
    monkeypatch.setenv("QUIVER_DATA", str(tmp_path))
    assert len(load_dataset("cifar10", verify=False).train_y) == 20
