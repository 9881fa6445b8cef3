"""What tables and arrays of one's own hold by mistake: mapped, shown, warned of or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import quiverfl as qv
from data_files import images, write_image
from quiverfl.data.dataset import Dataset
from quiverfl.data.sources import load_dataset
from quiverfl.errors import QuiverError, QuiverWarning


def own(name: str, path: Path, **options: Any) -> Dataset:
    return load_dataset(name, path.parent / "root", path=path, **options)


def written(folder: Path, frame: pd.DataFrame, name: str = "mine.csv") -> Path:
    frame.to_csv(folder / name, index=False)
    return folder / name


def numbers(rows: int = 12, **more: Any) -> pd.DataFrame:
    random = np.random.default_rng(0)
    columns = {"height": random.normal(size=rows), "width": random.normal(size=rows)}
    return pd.DataFrame({**columns, "label": np.arange(rows) % 2, **more})


def doubts(load: Callable[[], Any]) -> list[str]:
    """What is warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load()
    return [str(one.message) for one in caught if one.category is QuiverWarning]


# Labels


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ([999, 10, 20], ("10", "20", "999")),
        ([1, 2, 3], ("1", "2", "3")),
        ([-1, 1], ("-1", "1")),
        ([-2, 0, 1], ("-2", "0", "1")),
        ([0, 2, 5], ("0", "2", "5")),
    ],
)
@pytest.mark.parametrize("source", ["table", "npz", "torch"])
def test_whole_numbers_are_numbered_as_text_is(
    source: str, values: list[int], names: tuple[str, ...], tmp_path: Path
) -> None:
    labels = np.resize(np.array(values), 12)
    x = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)

    def load() -> Dataset:
        if source == "table":
            return own("table", written(tmp_path, numbers(label=labels)), test_share=0.25)
        if source == "npz":
            np.savez(tmp_path / "mine.npz", x=x, y=labels)
            return own("npz", tmp_path / "mine.npz", test_share=0.25)
        return qv.from_torch([(x[i], int(labels[i])) for i in range(12)], test_share=0.25)

    found = load()
    assert found.classes == len(names)
    assert found.class_names == names
    both = np.concatenate([found.train_y, found.test_y])
    assert sorted(np.array(names)[both].tolist()) == sorted(str(label) for label in labels)
    (note,) = [text for text in found.notes if "labels" in text]
    assert f"the labels {', '.join(names)} are numbered 0 … {len(names) - 1}" in note


def test_labels_from_nought_on_stay_as_they_are(tmp_path: Path) -> None:
    labels = np.array([2, 0, 1] * 4)
    path = written(tmp_path, numbers(label=labels))
    found = own("table", path, features=["height", "width"], test_share=0.0)
    assert found.train_y.tolist() == labels.tolist()
    assert found.class_names == ("0", "1", "2")
    assert found.notes == ()
    # The hash of these arrays as versions 0.1 and 0.2 have it: runs on such data go on.
    assert found.digest == "72a7b0c982fcd12a6437ce0f5411d851"


def test_stated_classes_take_whole_numbers_as_they_stand(tmp_path: Path) -> None:
    path = written(tmp_path, numbers(label=[1, 3] * 6))
    found = own("table", path, classes=5, test_share=0.0)
    assert found.train_y.tolist() == [1, 3] * 6
    assert found.class_names == ("0", "1", "2", "3", "4")
    with pytest.raises(QuiverError, match=r"label 3 is out of range.*Leave it out to have the lab"):
        own("table", path, classes=2)


def test_minus_one_beside_all_others_may_mean_that_there_is_no_label(tmp_path: Path) -> None:
    path = written(tmp_path, numbers(label=[-1, 0, 1] * 4))
    with pytest.raises(QuiverError, match=r"mine.csv: label -1 .*no label.*as text"):
        own("table", path)


@pytest.mark.parametrize("column", ["label", "who"])
def test_names_that_differ_in_case_or_spaces_alone(column: str, tmp_path: Path) -> None:
    frame = numbers(label=["a", "b"] * 6, who=["u", "v", "w"] * 4)
    frame[column] = ["Cat", "cat ", "cat", "dog"] * 3
    path = written(tmp_path, frame)
    what = "classes" if column == "label" else "owners"
    for _ in range(2):  # read, and from the cache
        (doubt,) = doubts(lambda: own("table", path, owner="who"))
        assert f"'Cat', 'cat', 'cat ' count as 3 {what}" in doubt


def one_class(folder: Path) -> Path:
    return written(folder, numbers(label=["sick"] * 12))


def test_one_class_alone_is_warned_of(tmp_path: Path) -> None:
    found = own("table", one_class(tmp_path))
    (doubt,) = doubts(lambda: qv.partition(found, "iid", clients=2))
    assert "all labels are 'sick'" in doubt
    assert doubts(lambda: qv.partition("digits", "iid", clients=2)) == []
    pairs = [(np.zeros((4, 2), np.float32), np.full(4, 3))] * 2
    (doubt,) = doubts(lambda: qv.FederatedData.from_arrays(pairs, pairs))
    assert "all labels are 3" in doubt


def test_labels_that_begin_at_one_are_to_be_lowered() -> None:
    pairs = [(np.zeros((6, 2), np.float32), np.array([1, 2, 3] * 2))] * 2
    data = qv.FederatedData.from_arrays(pairs, pairs)
    task = qv.Task(lambda: nn.Sequential(nn.Linear(2, 3)), personal=())
    with pytest.raises(QuiverError, match=r"begin at 1: subtract 1 .* or give the model 4 outp"):
        qv.simulate(
            task,
            data,
            method=qv.FedAvg(),
            topology=qv.star(clients=2, sampled=2),
            training=qv.Training(lr=0.1),
            rounds=1,
        )


# Columns


def test_the_columns_that_are_inputs_are_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In Python nothing is printed or warned of: the log and the data set's card have it."""
    path = written(tmp_path, numbers(who=["u", "v"] * 6))
    caplog.set_level("INFO", "quiverfl.data")
    assert doubts(lambda: own("table", path, owner="who")) == []
    found = own("table", path, owner="who")  # from the cache
    (note,) = found.notes
    assert [record.getMessage() for record in caplog.records] == [note, note]
    assert note in repr(found)
    assert note.startswith(f"{path}: the inputs are 2 columns, height, width;")
    assert own("table", path, features=["height"]).notes == ()


def test_a_long_list_of_columns_is_shortened(tmp_path: Path) -> None:
    wide = numbers(**{f"c{i}": np.random.default_rng(i).normal(size=12) for i in range(30)})
    (note,) = own("table", written(tmp_path, wide)).notes
    assert "the inputs are 32 columns, height, width, c0, " in note
    assert " c7, …, c20, " in note
    assert ", c29 (32);" in note


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("Unnamed: 0", np.arange(12) + 0.5),
        ("patient_id", np.arange(12) * 7),
        ("userId", np.arange(12) * 7),
        ("ID", np.arange(12) * 7),
        ("serial", np.arange(12)),
        ("serial", np.arange(12)[::-1] + 1),
    ],
)
def test_a_column_that_looks_like_an_index_is_warned_of(
    column: str, values: np.ndarray, tmp_path: Path
) -> None:
    path = written(tmp_path, numbers(**{column: values}))
    (doubt,) = doubts(lambda: own("table", path))
    assert f"column '{column}' looks like" in doubt
    assert f'data.options.exclude = ["{column}"]' in doubt
    assert doubts(lambda: own("table", path, exclude=[column])) == []
    chosen = ["height", column]
    assert doubts(lambda: own("table", path, features=chosen)) == []


@pytest.mark.parametrize(("column", "values"), [("paid", [7, 9] * 6), ("grid", [3, 1, 1] * 4)])
def test_a_column_of_counts_is_no_index(column: str, values: list[int], tmp_path: Path) -> None:
    path = written(tmp_path, numbers(**{column: values}))
    assert doubts(lambda: own("table", path)) == []


def test_text_beside_numbers_may_be_the_owner(tmp_path: Path) -> None:
    path = written(tmp_path, numbers(who=["u", "v"] * 6))
    with pytest.raises(QuiverError, match=r"column 'who' holds text.*owner = 'who'\.$"):
        own("table", path)


# Cells and files


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.inf, "inf is too large"),
        (-np.inf, "-inf is too large"),
        (1e39, r"1e\+39 is too large, and float32 ends at 3.4e38"),
    ],
)
def test_a_number_that_is_too_large_is_named_with_its_place(
    value: float, words: str, tmp_path: Path
) -> None:
    frame = numbers()
    frame.loc[4, "width"] = value
    path = written(tmp_path, frame)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(QuiverError, match=rf"mine.csv, column 'width', line 6: {words}"):
            own("table", path)


@pytest.mark.parametrize("value", [np.inf, np.nan, 1e39])
def test_arrays_with_infinity_are_refused_without_numpys_words(
    value: float, tmp_path: Path
) -> None:
    np.savez(tmp_path / "mine.npz", x=np.array([[1.0], [value], [2.0]]), y=np.array([0, 1, 0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(QuiverError, match=r"the inputs hold NaN or infinity"):
            own("npz", tmp_path / "mine.npz", test_share=0.0)


def test_a_target_that_is_too_large_is_refused_without_numpys_words(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.ones((3, 1)), y=np.array([0.5, 1e39, 2.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(QuiverError, match=r"the targets hold NaN or infinity"):
            own("npz", tmp_path / "mine.npz", test_share=0.0, targets="numbers")


def test_a_missing_cell_is_named_by_its_line_of_the_file(tmp_path: Path) -> None:
    """Empty lines and cells of two lines count, as in an editor."""
    path = tmp_path / "mine.csv"
    path.write_text('a,note,label\n1,"two\nlines",x\n\n  \n2,one,y\n,one,x\n')
    lines = path.read_text().splitlines()
    assert lines[6] == ",one,x"
    with pytest.raises(
        QuiverError, match=r"mine.csv, column 'a', line 7: there is no value\. Fill"
    ):
        own("table", path, exclude="note")


def test_a_word_that_is_no_part_is_named_by_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, numbers(part=["train", "tset"] + ["test"] * 10))
    with pytest.raises(QuiverError, match=r"column 'part', line 3: 'tset' is neither"):
        own("table", path, split="part")


def test_a_folder_of_images_without_classes_says_what_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "pets"
    for number, pixels in enumerate(images(20, (3, 6, 5), seed=0)):
        write_image(folder / f"{number:02d}.png", pixels)
    words = r"holds 20 images \(00.png, 01.png, …\) and no folders"
    with pytest.raises(QuiverError, match=words):
        own("folder", folder)


def test_a_misspelt_path_is_recognised() -> None:
    with pytest.raises(QuiverError, match="no option 'paht'; did you mean 'path'"):
        load_dataset("table", paht="mine.csv")


# Test data


@pytest.mark.parametrize("options", [{"test_share": 0}, {"owner": "who"}])
def test_data_on_which_nobody_can_be_tested_is_refused(
    options: dict[str, Any], tmp_path: Path
) -> None:
    path = written(tmp_path, numbers(who=[f"p{i}" for i in range(12)]))
    found = own("table", path, features=["height", "width"], **options)
    ways = {"name": "natural"} if "owner" in options else {"name": "iid", "clients": 3}
    with pytest.raises(QuiverError, match=r"none of the \d+ clients has test data.*test_share"):
        qv.partition(found, **ways)
    given = {"data": {"partition": ways["name"], "clients": ways.get("clients")}}
    with pytest.raises(QuiverError, match=r"none of the \d+ clients has test data.*test_share"):
        qv.Experiment.of(given, found)


# Arrays in Python


def test_tables_of_pandas_are_arrays() -> None:
    frame = numbers(9)
    x, y = frame[["height", "width"]], frame["label"]
    pairs = [(x.iloc[:4], y.iloc[:4]), (x.iloc[4:], y.iloc[4:])]
    found = qv.FederatedData.from_arrays(pairs, pairs)
    plain = [(np.array(a), np.array(b)) for a, b in pairs]
    same = qv.FederatedData.from_arrays(plain, plain)
    assert torch.equal(found.train.x, same.train.x)
    assert torch.equal(found.train.y, same.train.y)
    assert found.train.sizes.tolist() == [4, 5]
    assert found.classes == 2
    text = [(frame.assign(note="x"), y)]
    with pytest.raises(QuiverError, match="client 0: text or objects"):
        qv.FederatedData.from_arrays(text, text)
