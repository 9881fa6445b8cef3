"""Tables as spreadsheets write them: separators, decimal commas, encodings, gaps and categories."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import quiverfl as qv
from quiverfl.data.dataset import Dataset
from quiverfl.data.sources import load_dataset
from quiverfl.errors import QuiverError

FRAME = pd.DataFrame(
    {
        "age": [51, 38, 44, 60, 29, 71],
        "dose": [0.5, 1.25, 2.0, 0.75, 1.5, 3.125],
        "state": ["ill", "gut", "ill", "gut", "ill", "gut"],
        "ward": ["süd", "ost", "süd", "ost", "süd", "ost"],
    }
)


def own(path: Path, **options: Any) -> Dataset:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_dataset("table", path.parent / "root", path=path, **options)


def wards(path: Path, **options: Any) -> Dataset:
    return own(path, label="state", owner="ward", test_share=0.0, **options)


def plain(tmp_path: Path) -> Dataset:
    FRAME.to_csv(tmp_path / "plain.csv", index=False)
    return wards(tmp_path / "plain.csv")


@pytest.mark.parametrize(
    ("name", "style", "guess"),
    [
        ("a.csv", {"sep": ";"}, "columns separated by semicolons"),
        ("a.csv", {"sep": ";", "decimal": ","}, "separated by semicolons, decimal commas"),
        ("a.csv", {"sep": "\t", "decimal": ","}, "separated by tabs, decimal commas"),
        ("a.csv", {"sep": "|"}, "columns separated by vertical bars"),
        ("a.csv", {"encoding": "cp1252"}, "encoding cp1252"),
        ("a.csv", {"encoding": "utf-16"}, "encoding utf-16"),
        ("a.csv", {"sep": ";", "decimal": ",", "encoding": "latin-1"}, "commas, encoding cp1252"),
        ("a.csv", {"encoding": "utf-8-sig"}, ""),
        ("a.csv.gz", {}, ""),
        ("a.csv.xz", {"sep": ";", "decimal": ","}, "separated by semicolons, decimal commas"),
        ("a.tsv", {"sep": "\t"}, ""),
        ("a.tsv.bz2", {"sep": "\t", "decimal": ",", "encoding": "cp1252"}, "decimal commas, enc"),
        ("a.tsv", {"sep": ","}, "columns separated by commas"),
    ],
)
def test_a_text_file_is_read_as_it_looks(
    name: str, style: dict[str, str], guess: str, tmp_path: Path
) -> None:
    FRAME.to_csv(tmp_path / name, index=False, **style)
    dataset = wards(tmp_path / name)
    assert dataset.digest == plain(tmp_path).digest
    assert dataset.owner_names == ("ost", "süd")
    assert dataset.name == "a"
    assert dataset.columns == ("age", "dose")
    guesses = [note for note in dataset.notes if "as it looks" in note]
    assert len(guesses) == bool(guess)
    assert all(guess in note and "data.options.separator" in note for note in guesses)


def test_what_is_said_is_not_guessed(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    FRAME.to_csv(path, index=False, sep=";", decimal=",", encoding="cp1252")
    dataset = wards(path, separator=";", decimal=",", encoding="cp1252")
    assert dataset.digest == plain(tmp_path).digest
    assert not any("as it looks" in note for note in dataset.notes)
    FRAME.to_csv(tmp_path / "b.csv", index=False)
    with pytest.raises(QuiverError, match=r"decimal = ',' also separates the columns"):
        wards(tmp_path / "b.csv", decimal=",")


def test_decimal_commas_between_commas_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    FRAME.to_csv(path, index=False, decimal=",")
    with pytest.raises(QuiverError, match=r"'dose' holds numbers with decimal commas, such as 0,5"):
        wards(path)


def test_points_and_commas_in_one_file_are_not_guessed(tmp_path: Path) -> None:
    """A column of codes such as 1,2 beside one of decimal points."""
    path = tmp_path / "a.csv"
    codes = [f"{n},{n}" for n in range(6)]
    FRAME.assign(code=codes).to_csv(path, index=False, sep=";")
    assert wards(path, exclude="code").digest == plain(tmp_path).digest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"separator": ";;"}, r"separator = ';;': write one character, or 'tab'"),
        ({"decimal": "x"}, r"decimal = 'x': write '\.' or ','"),
        ({"encoding": "utf-9"}, r"encoding = 'utf-9': unknown; usual ones are 'utf-8'"),
        ({"encoding": "ascii"}, r"a.csv is not ascii: give another data.options.encoding"),
        ({"missing": "mode"}, r"missing = 'mode': known are drop, mean"),
        ({"missing": True}, r"missing = True: write 'refuse'"),
        ({"missing": float("nan")}, r"missing = nan: it must be finite"),
        ({"categories": "onehot"}, r"categories = 'onehot'.*'one-hot'"),
        ({"categories": {"colour": "one-hot"}}, r"categories names 'colour', which is no input"),
        ({"categories": {"age": "text"}}, r"categories.age = 'text'"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    FRAME.to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(QuiverError, match=message):
        wards(tmp_path / "a.csv", **options)


def test_options_of_text_files_are_refused_elsewhere(tmp_path: Path) -> None:
    FRAME.to_parquet(tmp_path / "a.parquet")
    with pytest.raises(QuiverError, match=r"data.options.decimal: .*a.parquet is a Parquet file"):
        wards(tmp_path / "a.parquet", decimal=",")
    with pytest.raises(QuiverError, match=r"from_pandas has no option 'separator'"):
        qv.from_pandas(FRAME, "state", separator=";")


# Missing cells.

GAPS = FRAME.assign(
    age=[51.0, np.nan, 44.0, 60.0, np.nan, 71.0],
    dose=[0.5, 1.25, np.nan, 0.75, 1.5, 3.125],
    part=["train", "train", "train", "train", "test", "train"],
)


def gaps(tmp_path: Path, frame: pd.DataFrame = GAPS, **options: Any) -> Dataset:
    frame.to_csv(tmp_path / "gaps.csv", index=False)
    return own(tmp_path / "gaps.csv", label="state", owner="ward", split="part", **options)


def test_rows_with_gaps_are_left_out(tmp_path: Path) -> None:
    dataset = gaps(tmp_path, missing="drop")
    assert dataset.train_x.tolist() == [[51, 0.5], [60, 0.75], [71, 3.125]]
    assert len(dataset.test_y) == 0
    (note,) = [note for note in dataset.notes if "lack" in note]
    assert "3 of 6 rows lack a value (age 2, dose 1) and were left out" in note


def test_a_gap_in_a_column_that_is_not_used_drops_nothing(tmp_path: Path) -> None:
    dataset = gaps(tmp_path, missing="drop", exclude="age")
    assert len(dataset.train_y) + len(dataset.test_y) == 5


def test_the_mean_is_that_of_the_training_rows(tmp_path: Path) -> None:
    """(51 + 44 + 60 + 71) / 4 for the second row, and for the test row."""
    frame = GAPS.assign(age=[51.0, np.nan, 44.0, 60.0, np.nan, 71.0])
    dataset = gaps(tmp_path, frame, missing="mean")
    assert dataset.train_x[:, 0].tolist() == [51, 56.5, 44, 60, 71]
    assert dataset.test_x.tolist() == [[56.5, 1.5]]
    assert dataset.train_x[2, 1] == np.float32((0.5 + 1.25 + 0.75 + 3.125) / 4)  # without 1.5
    (note,) = [note for note in dataset.notes if "filled" in note]
    assert "age 2 × 56.5, dose 1 × 1.40625" in note


def test_a_number_fills_gaps_of_inputs_alone(tmp_path: Path) -> None:
    dataset = gaps(tmp_path, missing=-1)
    assert dataset.train_x[:, 0].tolist() == [51, -1, 44, 60, 71]
    assert dataset.test_x.tolist() == [[-1, 1.5]]
    for column in ("state", "ward", "part"):
        frame = GAPS.assign(**{column: [None, *GAPS[column][1:]]})
        with pytest.raises(QuiverError, match=rf"column '{column}', line 2: there is no value"):
            gaps(tmp_path, frame, missing=0)


def test_whole_labels_beside_gaps_stay_whole(tmp_path: Path) -> None:
    """pandas reads whole numbers beside a gap as floats, which are no labels."""
    frame = GAPS.assign(state=[0, 1, np.nan, 1, 0, 1], ward=[7, 8, 7, np.nan, 8, 7])
    dataset = gaps(tmp_path, frame, missing="drop")
    assert dataset.class_names == ("0", "1")
    assert dataset.owner_names == ("7",)


def test_refusals_name_the_remedy_and_the_line(tmp_path: Path) -> None:
    with pytest.raises(QuiverError, match=r"column 'age', line 3: .*data.options.missing: 'drop'"):
        gaps(tmp_path)
    with pytest.raises(QuiverError, match=r"every row lacks a value"):
        gaps(tmp_path, GAPS.assign(age=np.nan), missing="drop")
    with pytest.raises(QuiverError, match=r"column 'age' has no value in any training row"):
        gaps(tmp_path, GAPS.assign(age=[*[np.nan] * 4, 3.0, np.nan]), missing="mean")


def test_lines_count_the_rows_that_were_left_out(tmp_path: Path) -> None:
    frame = GAPS.assign(dose=[0.5, 1.25, np.nan, 0.75, 1.5, 1e39])
    with pytest.raises(QuiverError, match=r"column 'dose', line 7: 1e\+39 is too large"):
        gaps(tmp_path, frame, missing="drop")


# Categories.

KINDS = FRAME.assign(
    colour=["red", "blue", "red", "green", "blue", "red"], grade=[3, 1, 3, 7, 1, 3]
)


def kinds(tmp_path: Path, frame: pd.DataFrame = KINDS, **options: Any) -> Dataset:
    frame.to_csv(tmp_path / "kinds.csv", index=False)
    return wards(tmp_path / "kinds.csv", **options)


def test_text_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(QuiverError, match=r"'colour' holds text.*categories = 'one-hot' or 'numb"):
        kinds(tmp_path)


def test_one_hot_makes_a_column_of_each_value(tmp_path: Path) -> None:
    dataset = kinds(tmp_path, categories="one-hot")
    assert dataset.columns == (
        *("age", "dose", "colour=blue", "colour=green", "colour=red", "grade"),
    )
    assert dataset.train_x[0].tolist() == [51, 0.5, 0, 0, 1, 3]
    assert dataset.train_x[:, 2:5].argmax(axis=1).tolist() == [2, 0, 2, 1, 0, 2]
    assert dataset.categories == {}
    (note,) = [note for note in dataset.notes if "categories" in note]
    assert "column 'colour' holds 3 categories, a column each: blue, green, red" in note


def test_numbers_are_those_of_the_sorted_values(tmp_path: Path) -> None:
    options = {"colour": "numbers", "grade": "one-hot"}
    for _ in range(2):  # read, and from the cache
        dataset = kinds(tmp_path, categories=options)
        assert dataset.columns == ("age", "dose", "colour", "grade=1", "grade=3", "grade=7")
        assert dataset.train_x[:, 2].tolist() == [2, 0, 2, 1, 0, 2]
        assert dataset.train_x[3, 3:].tolist() == [0, 0, 1]
        assert dict(dataset.categories) == {"colour": ["blue", "green", "red"]}


def test_categories_as_ids_are_looked_up(tmp_path: Path) -> None:
    dataset = kinds(tmp_path, features="colour", categories="numbers", inputs="ids")
    assert dataset.train_x.dtype == np.int64
    assert dataset.train_x.tolist() == [[2], [0], [2], [1], [0], [2]]


def test_a_missing_category_is_one_of_its_own_or_the_row_goes(tmp_path: Path) -> None:
    frame = KINDS.assign(colour=["red", None, "red", "green", "blue", "red"])
    with pytest.raises(QuiverError, match=r"column 'colour', line 3: there is no value"):
        kinds(tmp_path, frame, categories="one-hot")
    dataset = kinds(tmp_path, frame, categories="one-hot", missing="mean")
    assert dataset.columns[2:6] == (
        *("colour=blue", "colour=green", "colour=red", "colour=(missing)"),
    )
    assert dataset.train_x[1, 2:6].tolist() == [0, 0, 0, 1]
    assert len(kinds(tmp_path, frame, categories="one-hot", missing="drop").train_y) == 5


def test_too_many_values_for_a_column_each(tmp_path: Path) -> None:
    frame = pd.DataFrame({"who": [f"n{n}" for n in range(1200)], "y": [0, 1] * 600})
    frame.to_parquet(tmp_path / "many.parquet")
    with pytest.raises(QuiverError, match=r"'who' has 1,200 different values, too many"):
        own(tmp_path / "many.parquet", label="y", categories="one-hot")


# Frames.


def test_a_frame_gives_what_its_file_gives(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    KINDS.to_parquet(path)
    frame = KINDS.set_index(np.arange(6) + 40)  # whatever its index says
    options: dict[str, Any] = {"label": "state", "owner": "ward", "categories": "one-hot"}
    dataset = qv.from_pandas(frame, name="a", **options)
    assert dataset.digest == load_dataset("table", tmp_path, path=path, **options).digest
    assert dataset.name == "a"
    assert len(frame.columns) == 6  # and it is left as it was
    with pytest.raises(QuiverError, match=r"give a pandas DataFrame, not a list"):
        qv.from_pandas([1], "state")  # type: ignore[arg-type]


def test_kinds_of_pandas_own_are_numbers_too() -> None:
    frame = FRAME.assign(
        age=FRAME["age"].astype("Int64"), ok=pd.array([True, False] * 3, dtype="boolean")
    )
    dataset = qv.from_pandas(frame, "state", owner="ward", test_share=0.0)
    assert dataset.columns == ("age", "dose", "ok")
    assert dataset.train_x[0].tolist() == [51, 0.5, 1]
