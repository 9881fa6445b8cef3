"""One's own data: image folders, .npz, tables, a function; and what is embedded or made up."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from data_files import images, write_image
from quiverfl.data.dataset import Dataset, compute_channel_statistics
from quiverfl.data.partition import make_partition
from quiverfl.data.sources import load_dataset
from quiverfl.errors import QuiverError
from quiverfl.laws.problem import quadratics


def own(name: str, path: Path, **options: Any) -> Dataset:
    return load_dataset(name, path.parent / "root", path=path, **options)


def write_classes(folder: Path, counts: dict[str, int], shape: tuple[int, ...] = (3, 6, 5)) -> None:
    for number, (name, count) in enumerate(counts.items()):
        for i, pixels in enumerate(images(count, shape, seed=number)):
            write_image(folder / name / f"{i}.png", pixels)


def test_a_folder_with_train_and_test(tmp_path: Path) -> None:
    path = tmp_path / "pets"
    write_classes(path / "train", {"dog": 3, "cat": 2})
    write_classes(path / "test", {"dog": 1})
    data = own("folder", path)
    assert data.name == "pets"
    assert data.class_names == ("cat", "dog")
    assert data.train_y.tolist() == [0, 0, 1, 1, 1]
    assert data.test_y.tolist() == [1]
    assert np.array_equal(data.train_x[2:], images(3, (3, 6, 5), seed=0))


def test_one_tree_is_split_always_the_same(tmp_path: Path) -> None:
    path = tmp_path / "pets"
    write_classes(path, {"dog": 10, "cat": 5})
    first = own("folder", path)
    again = load_dataset("folder", tmp_path / "other", path=path)
    assert np.bincount(first.train_y).tolist() == [4, 8]
    assert np.bincount(first.test_y).tolist() == [1, 2]
    assert np.array_equal(first.train_x, again.train_x)
    assert len(own("folder", path, test_share=0.0).test_y) == 0


def test_sizes_and_colours(tmp_path: Path) -> None:
    path = tmp_path / "pets"
    write_classes(path, {"dog": 2}, (3, 6, 5))
    write_classes(path, {"cat": 2}, (1, 9, 4))
    with pytest.raises(QuiverError, match=r"0.png is \d×\d, .*data.options.size"):
        own("folder", path)
    assert own("folder", path, size=8).input_shape == (3, 8, 8)
    assert own("folder", path, size=[4, 7], color="grey").input_shape == (1, 4, 7)


def test_sixteen_bits_are_brought_to_eight_and_unknown_ranges_refused(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    (tmp_path / "deep" / "a").mkdir(parents=True)
    for number in range(2):
        Image.fromarray(ramp).save(tmp_path / "deep" / "a" / f"{number}.png")
    found = own("folder", tmp_path / "deep", color="grey", test_share=0.0).train_x
    assert np.array_equal(found[0, 0].ravel(), np.arange(256))
    assert len(np.unique(own("folder", tmp_path / "deep", test_share=0.0).train_x)) == 256
    Image.fromarray(ramp.astype(np.float32)).save(tmp_path / "deep" / "a" / "0.tiff")
    with pytest.raises(QuiverError, match=r"0.tiff .*floats of an unknown range"):
        own("folder", tmp_path / "deep")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"color": "gray"}, "did you mean 'grey'"),
        ({"size": [1, 2, 3]}, "height and width"),
        ({"classes": 3}, r"pets holds 2 classes, not data.options.classes = 3: cat, dog"),
        ({"test_share": 1.0}, "test_share = 1.0"),
    ],
)
def test_options_of_a_folder(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_classes(tmp_path / "pets", {"dog": 2, "cat": 2})
    with pytest.raises(QuiverError, match=message):
        own("folder", tmp_path / "pets", **options)


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "pets"
    with pytest.raises(QuiverError, match="no such file or folder"):
        own("folder", path)
    with pytest.raises(QuiverError, match=r"needs data.options.path"):
        load_dataset("folder", tmp_path)
    path.mkdir()
    with pytest.raises(QuiverError, match="pets is empty"):
        own("folder", path)
    write_classes(path / "train", {"dog": 1})
    with pytest.raises(QuiverError, match="neither test nor val"):
        own("folder", path)
    write_classes(path / "test", {"fish": 1})
    with pytest.raises(QuiverError, match=r"test/fish is a class that .*train does not have"):
        own("folder", path)
    (path / "train" / "cat").mkdir()
    with pytest.raises(QuiverError, match=r"train/cat holds no images"):
        own("folder", path)
    (path / "train" / "cat" / "0.png").write_bytes(b"\x89PNG but not really")
    with pytest.raises(QuiverError, match=r"train/cat/0.png is not a readable image"):
        own("folder", path)
    assert not (tmp_path / "root" / ".quiver-cache").exists()


def test_npz_with_both_parts_under_either_name(tmp_path: Path) -> None:
    x, y = images(6, (4, 4)), np.array([0, 1, 2, 0, 1, 2])
    np.savez(tmp_path / "a.npz", train_x=x[:4], train_y=y[:4], test_x=x[4:], test_y=y[4:])
    np.savez(tmp_path / "b.npz", x_train=x[:4], y_train=y[:4], x_test=x[4:], y_test=y[4:])
    for name in ("a", "b"):
        data = own("npz", tmp_path / f"{name}.npz")
        assert np.array_equal(data.train_x, x[:4, None])
        assert np.array_equal(data.test_y, y[4:])
        assert data.classes == 3


def test_npz_channels_last_and_other_numbers(tmp_path: Path) -> None:
    x = images(4, (6, 5, 3))
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(4))
    data = own("npz", tmp_path / "a.npz", test_share=0.0)
    assert np.array_equal(data.train_x, x.transpose(0, 3, 1, 2))
    np.savez(tmp_path / "f.npz", x=x / np.float32(255), y=np.arange(4))
    assert own("npz", tmp_path / "f.npz", test_share=0.0).input_shape == (3, 6, 5)
    values = np.arange(12.0).reshape(4, 3)
    np.savez(tmp_path / "b.npz", x=values, y=np.array(["b", "a", "b", "c"]))
    data = own("npz", tmp_path / "b.npz", test_share=0.0)
    assert data.train_x.dtype == np.float32
    assert data.train_y.tolist() == [1, 0, 1, 2]
    assert data.class_names == ("a", "b", "c")
    assert data.mean == pytest.approx(values.mean(axis=0))


def test_npz_with_owners_splits_every_owner(tmp_path: Path) -> None:
    owner = np.array(["ann", "bob"] * 10)
    np.savez(tmp_path / "a.npz", x=np.zeros((20, 2)), y=np.arange(20) % 2, owner=owner)
    data = own("npz", tmp_path / "a.npz", test_share=0.3)
    assert data.owner_names == ("ann", "bob")
    assert np.bincount(data.train_owner).tolist() == [7, 7]
    assert np.bincount(data.test_owner).tolist() == [3, 3]
    shares = make_partition(data, "natural", None, 0)
    assert [len(rows) for rows in shares.train] == [7, 7]
    assert [len(rows) for rows in shares.test] == [3, 3]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros(3)}, "has no array 'x'; it has a"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(2, int)}, "3 examples and 'y' 2"),
        ({"x": np.zeros(3), "y": np.zeros(3, int)}, r"shape \[3\]"),
        ({"x": np.zeros((3, 2)), "y": np.zeros((3, 1), int)}, "not \\[n\\]"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(3)}, "whole numbers or text"),
        ({"x": np.full((3, 2), np.nan), "y": np.zeros(3, int)}, "NaN or infinity"),
        ({"x": np.array([["a"], ["b"]]), "y": np.zeros(2, int)}, "must be numbers"),
        ({"x": np.zeros((3, 2)), "y": np.array([0, 1, -1])}, "label -1 is out of range"),
        ({"x": np.zeros((2, 2)), "y": np.array([{}, {}])}, "Python objects"),
    ],
)
def test_npz_errors_name_the_file(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, **arrays)
    with pytest.raises(QuiverError, match=f"mine.*{message}"):
        own("npz", path, test_share=0.0)


@pytest.mark.parametrize("labels", [np.array([1.9, 0.0]), np.array(["a", "b"])])
def test_labels_of_both_parts_are_of_one_kind(labels: Any, tmp_path: Path) -> None:
    x, whole = np.zeros((2, 3)), np.array([0, 1])
    np.savez(tmp_path / "mine.npz", train_x=x, train_y=whole, test_x=x, test_y=labels)
    with pytest.raises(QuiverError, match=r"mine.*(whole numbers or text|must be of one kind)"):
        own("npz", tmp_path / "mine.npz")


def test_a_truncated_npz_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, x=np.zeros((50, 20)), y=np.zeros(50, int))
    content = path.read_bytes()
    for cut in (0, 30, len(content) // 2, len(content) - 10):
        path.write_bytes(content[:cut])
        with pytest.raises(QuiverError, match=r"mine.npz is not a readable .npz"):
            own("npz", path)


def test_classes_can_be_stated(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, x=np.zeros((4, 2)), y=np.arange(4))
    assert own("npz", path, classes=7).classes == 7
    with pytest.raises(QuiverError, match="label 3 is out of range; labels are 0 … 2"):
        own("npz", path, classes=3, test_share=0.0)


def table(**more: Any) -> pd.DataFrame:
    columns = {
        "height": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        "width": [10, 20, 30, 40, 50, 60],
        "label": ["a", "b", "a", "b", "a", "b"],
        "client": [7, 7, 7, 3, 3, 3],
    }
    return pd.DataFrame(columns | more)


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_a_table_with_owners(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"measured.{suffix}"
    frame = table()
    frame.to_parquet(path) if suffix == "parquet" else frame.to_csv(path, index=False)
    data = own("table", path, owner="client", test_share=0.34)
    assert data.input_shape == (2,)
    assert data.owner_names == ("3", "7")
    assert np.bincount(data.train_owner).tolist() == [2, 2]
    assert np.bincount(data.test_owner).tolist() == [1, 1]
    shares = make_partition(data, "natural", None, 0)
    rows = data.train_x[shares.train[0]]
    assert set(rows[:, 0]) < {4.0, 5.0, 6.0}
    assert data.class_names == ("a", "b")


def test_a_table_with_a_split_column_and_chosen_features(tmp_path: Path) -> None:
    path = tmp_path / "measured.parquet"
    table(part=["train"] * 4 + ["test"] * 2).to_parquet(path)
    data = own("table", path, split="part", features=["width"])
    assert data.train_x.tolist() == [[10], [20], [30], [40]]
    assert data.test_y.tolist() == [0, 1]
    assert data.train_owner is None


def wide(**more: Any) -> pd.DataFrame:
    pixels = {f"px{i}": np.arange(6.0) + i for i in range(12)}
    return pd.DataFrame(pixels | {"label": [0, 1] * 3, "row": np.arange(6), "note": "x"} | more)


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({"features": ["px*"]}, [f"px{i}" for i in range(12)]),
        ({"features": "px?"}, [f"px{i}" for i in range(10)]),
        ({"features": ["px1", "px*"]}, ["px1", "px0", *(f"px{i}" for i in range(2, 12))]),
        ({"exclude": ["row", "note"]}, [f"px{i}" for i in range(12)]),
        ({"exclude": "*o*"}, [f"px{i}" for i in range(12)]),
        ({"features": ["*"], "exclude": ["note", "px*"]}, ["row"]),
    ],
)
def test_columns_by_pattern(options: dict[str, Any], columns: list[str], tmp_path: Path) -> None:
    """What is the label, the owner or the split is never meant by a pattern."""
    path = tmp_path / "wide.csv"
    wide().to_csv(path, index=False)
    data = own("table", path, test_share=0.0, **options)
    assert np.array_equal(data.train_x, wide()[columns].to_numpy(np.float32))


def test_a_column_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    path = tmp_path / "wide.parquet"
    wide(**{"px[0]": 7.0}).to_parquet(path)
    assert (own("table", path, test_share=0.0, features=["px[0]"]).train_x == 7).all()


def test_a_table_with_lists(tmp_path: Path) -> None:
    path = tmp_path / "lists.parquet"
    nested = [[[i, i + 1], [i + 2, i + 3]] for i in range(4)]
    pd.DataFrame({"x": nested, "label": [0, 1, 0, 1]}).to_parquet(path)
    data = own("table", path, test_share=0.0)
    assert np.array_equal(data.train_x, np.array(nested, np.float32))
    pd.DataFrame({"x": [[1, 2], [3]], "label": [0, 1]}).to_parquet(path)
    with pytest.raises(QuiverError, match=r"lists.parquet, column 'x', row 1"):
        own("table", path, test_share=0.0)


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(buffer, "png")
    return buffer.getvalue()


def test_a_table_with_images_as_the_hub_stores_them(tmp_path: Path) -> None:
    path = tmp_path / "hub.parquet"
    x = images(4, (3, 5, 6))
    cells = [{"bytes": png(pixels), "path": None} for pixels in x]
    pd.DataFrame({"image": cells, "label": [0, 1, 0, 1]}).to_parquet(path)
    data = own("table", path, features="image", test_share=0.0)
    assert np.array_equal(data.train_x, x)
    cells[2] = {"bytes": b"broken", "path": None}
    pd.DataFrame({"image": cells, "label": [0, 1, 0, 1]}).to_parquet(path)
    with pytest.raises(QuiverError, match=r"hub.parquet, column 'image', row 2: not a readable"):
        own("table", path, features="image")


@pytest.mark.parametrize(
    ("frame", "options", "message"),
    [
        (table(), {"label": "lable"}, "no column 'lable'; did you mean 'label'"),
        (table(), {"owner": "whose"}, "no column 'whose'"),
        (table(), {"split": "label"}, "row 0: 'a' is neither 'train' nor 'test'"),
        (table(note="x"), {}, "column 'note' holds .*data.options.features.*data.options.exclude"),
        (table(), {"features": ["px*"]}, r"no column matches 'px\*' of data.options.features"),
        (table(), {"exclude": ["hight"]}, "no column 'hight'; did you mean 'height'"),
        (table(), {"exclude": ["*"]}, "no column left"),
        (table(label=["a", None] * 3), {}, "column 'label', row 1: there is no value"),
        (table(height=[1.0, None] * 3), {}, "column 'height', row 1: there is no value"),
        (table()[:0], {}, "has no rows"),
        (table()[["label"]], {}, "no column left"),
        (table(), {"classes": 3}, "holds 2 classes"),
    ],
)
def test_table_errors(
    frame: pd.DataFrame, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.parquet"
    frame.to_parquet(path)
    with pytest.raises(QuiverError, match=f"mine.parquet.*{message}"):
        own("table", path, **options)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    for name in ("mine.parquet", "mine.csv", "mine.xlsx"):
        (tmp_path / name).write_bytes(b"\x00\x01")
    (tmp_path / "mine.csv").write_bytes(b"")
    with pytest.raises(QuiverError, match=r"mine.parquet is not a readable table"):
        own("table", tmp_path / "mine.parquet")
    with pytest.raises(QuiverError, match=r"mine.csv is not a readable table"):
        own("table", tmp_path / "mine.csv")
    with pytest.raises(QuiverError, match=r"mine.xlsx: tables are"):
        own("table", tmp_path / "mine.xlsx")


OWN = """
import numpy as np
from quiverfl.data.dataset import Dataset

def load(count=4):
    x, y = np.ones((count, 2), np.float32), np.zeros(count, np.int64)
    return Dataset("mine", x, y, x, y, 1, ("only",))

def wrong():
    return 3
"""


def test_ones_own_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"own_data_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert len(load_dataset(f"{name}:load", count=6).train_y) == 6
    with pytest.raises(QuiverError, match="no option 'size'"):
        load_dataset(f"{name}:load", size=6)
    with pytest.raises(QuiverError, match="returned a int"):
        load_dataset(f"{name}:wrong")


def test_digits() -> None:
    data = load_dataset("digits")
    assert data.train_x.shape == (1347, 1, 8, 8)
    assert data.test_x.shape == (450, 1, 8, 8)
    assert (data.train_x.min(), data.train_x.max()) == (0, 1)
    assert np.bincount(data.test_y).tolist() == [44, 46, 44, 46, 45, 46, 45, 45, 44, 45]
    again = load_dataset("digits")
    assert np.array_equal(data.train_x, again.train_x)


def test_synthetic_is_as_asked_for_and_depends_on_its_seed() -> None:
    data = load_dataset("synthetic", shape=[3, 4, 4], classes=5, train=50, test=10)
    assert data.train_x.shape == (50, 3, 4, 4)
    assert np.bincount(data.train_y).tolist() == [10] * 5
    same = load_dataset("synthetic", shape=[3, 4, 4], classes=5, train=50, test=10)
    other = load_dataset("synthetic", shape=[3, 4, 4], classes=5, train=50, test=10, data_seed=1)
    assert np.array_equal(data.train_x, same.train_x)
    assert not np.array_equal(data.train_x, other.train_x)


@pytest.mark.parametrize("shape", [(2,), (3, 32, 32)])
def test_synthetic_classes_lie_as_far_apart_in_every_shape(shape: tuple[int, ...]) -> None:
    data = load_dataset("synthetic", shape=shape, classes=40, train=40, test=0, spread=0.0)
    flat = data.train_x.reshape(40, -1)
    squares = ((flat[:, None] - flat[None]) ** 2).sum(axis=2)
    assert np.sqrt(squares.sum() / (40 * 39)) == pytest.approx(4.0, rel=0.25)


@pytest.mark.parametrize("options", [{"classes": 0}, {"train": 0}, {"test": -1}, {"shape": []}])
def test_synthetic_refuses_nonsense(options: dict[str, Any]) -> None:
    with pytest.raises(QuiverError, match=r"data\.options\."):
        load_dataset("synthetic", **options)


def test_quadratics_have_the_optima_they_claim() -> None:
    made = quadratics(clients=5, dimension=3, samples=8, spread=2.0, seed=1)
    total = np.zeros(3)
    for client in range(5):
        x, y = (part.numpy() for part in made.data.train.of_client(client))
        own_gradient = x.T @ (x @ made.optima[client] - y[:, 0]) / len(x)
        assert np.abs(own_gradient).max() < 1e-12
        total += x.T @ (x @ made.optimum - y[:, 0]) / len(x)
    assert np.abs(total).max() < 1e-12
    assert made.data.classes is None
    with pytest.raises(QuiverError, match="as many samples as dimensions"):
        quadratics(clients=2, dimension=9, samples=4)


def test_channel_statistics_equal_numpys() -> None:
    x = images(30, (2, 5, 5))
    mean, std = compute_channel_statistics(x)
    assert mean == pytest.approx((x / 255).mean(axis=(0, 2, 3)), abs=1e-12)
    assert std == pytest.approx((x / 255).std(axis=(0, 2, 3)), abs=1e-12)
    assert compute_channel_statistics(np.full((3, 2), 5.0, np.float32)) == ((5.0, 5.0), (1.0, 1.0))


def test_the_writers_of_the_digits_are_natural_clients() -> None:
    """14 forms of about 128 digits; each is tested on digits of its own."""
    from sklearn.datasets import load_digits

    data = load_dataset("digits")
    share = make_partition(data, "natural", None, 0)
    assert share.clients == 14
    assert share.names[0] == "form 1"
    assert share.names[-1] == "form 14"
    sizes = share.train_counts.sum(axis=1) + share.test_counts.sum(axis=1)
    starts = [0, 130, 256, 386, 516, 646, 776, 906, 1029, 1157, 1287, 1415, 1545, 1667, 1797]
    assert sizes.tolist() == np.diff(starts).tolist()
    third = (load_digits().images[256:386, None] / 16).astype(np.float32)
    own = np.concatenate([data.train_x[share.train[2]], data.test_x[share.test[2]]])
    assert sorted(map(bytes, own)) == sorted(map(bytes, third))


def test_the_digits_are_the_data_they_were_before_their_writers_were_known() -> None:
    assert load_dataset("digits").digest == "3acb9a7a8f0b0e3262724876d4600691"
