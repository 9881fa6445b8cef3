"""Data that comes with its clients: files per client, folders by owner, LEAF and FedScale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import quiverfl as qv
from data_files import images, write_image
from quiverfl.data.dataset import Dataset
from quiverfl.data.sources import load_dataset
from quiverfl.errors import QuiverError, QuiverWarning


def own(name: str, path: Path, **options: Any) -> Dataset:
    return load_dataset(name, path.parent / "root", path=path, **options)


def rows(seed: int, count: int = 5) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "age": draw.integers(20, 80, count),
            "dose": draw.random(count).round(3),
            "label": np.where(np.arange(count) % 2, "ill", "well"),
        }
    )


def write_clients(folder: Path, clients: list[int], shift: int = 0) -> None:
    folder.mkdir(parents=True)
    for client in clients:
        rows(client + shift).to_csv(folder / f"client_{client:03}.csv", index=False)


# A file per client.


def test_a_file_per_client_is_what_one_table_with_an_owner_column_is(tmp_path: Path) -> None:
    write_clients(tmp_path / "wards", [3, 11, 7])
    found = own("table", tmp_path / "wards", test_share=0.4)
    together = pd.concat(
        [rows(client).assign(owner=f"client_{client:03}") for client in (3, 7, 11)]
    )
    together.to_csv(tmp_path / "one.csv", index=False)
    one = own("table", tmp_path / "one.csv", owner="owner", test_share=0.4)
    assert found.digest == one.digest
    assert found.owner_names == ("client_003", "client_007", "client_011")
    assert found.columns == ("age", "dose")
    assert found.name == "wards"
    assert qv.partition(found, "natural").names == found.owner_names


def test_train_and_test_of_a_client_are_two_files(tmp_path: Path) -> None:
    write_clients(tmp_path / "wards" / "train", [1, 2])
    write_clients(tmp_path / "wards" / "test", [1, 2], shift=100)
    data = own("table", tmp_path / "wards")
    assert data.train_owner is not None
    assert data.train_owner.tolist() == [0] * 5 + [1] * 5
    raw = np.concatenate([rows(s)[["age", "dose"]].to_numpy() for s in (101, 102)])
    np.testing.assert_allclose(data.test_x, raw, rtol=1e-6)


def test_a_column_may_still_say_whose_a_row_is(tmp_path: Path) -> None:
    folder = tmp_path / "months"
    folder.mkdir()
    for month in ("may", "june"):
        rows(1, 6).assign(ward=["a", "b"] * 3).to_csv(folder / f"{month}.csv", index=False)
    data = own("table", folder, owner="ward", test_share=0.0)
    assert data.owner_names == ("a", "b")
    assert data.columns == ("age", "dose")


def test_a_wrong_cell_is_named_by_file_and_line(tmp_path: Path) -> None:
    write_clients(tmp_path / "wards", [1, 2])
    file = tmp_path / "wards" / "client_002.csv"
    lines = file.read_text().splitlines()
    lines[3] = lines[3].split(",")[0] + ",,ill"
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(QuiverError, match=r"wards, column 'dose', client_002.csv, line 4: "):
        own("table", tmp_path / "wards")


def test_files_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    def broken(name: str, change: Any) -> str:
        folder = tmp_path / name
        write_clients(folder, [1, 2])
        change(folder)
        with pytest.raises(QuiverError) as caught:
            own("table", folder, **({"split": "age"} if name == "split" else {}))
        return str(caught.value)

    def rename(folder: Path) -> None:
        rows(2).rename(columns={"dose": "amount"}).to_csv(folder / "client_002.csv", index=False)

    def words(folder: Path) -> None:
        rows(2).assign(dose="much").to_csv(folder / "client_002.csv", index=False)

    assert "client_001.csv (amount, dose): files of clients must have" in broken("other", rename)
    assert "column 'dose' holds text, and in" in broken("text", words)
    note = broken("note", lambda f: (f / "readme.txt").write_text("hello"))
    assert "readme.txt is no table" in note
    twice = broken("twice", lambda f: rows(1).to_csv(f / "client_001.tsv", sep="\t", index=False))
    assert "two files of the client 'client_001'" in twice
    assert "beside train there must be a folder test" in broken(
        "half", lambda f: write_clients(f / "train", [1])
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(QuiverError, match="holds no tables"):
        own("table", empty)


# Images by owner and class.


@pytest.mark.parametrize("layout", ["owner/class", "class/owner"])
def test_a_folder_of_images_by_owner_and_class(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "pets"
    pictures = images(12, (3, 6, 5))
    for number, (owner, label) in enumerate(
        [("ann", "cat"), ("ann", "dog"), ("bob", "cat"), ("bob", "dog")]
    ):
        place = path / owner / label if layout == "owner/class" else path / label / owner
        for i in range(3):
            write_image(place / f"{i}.png", pictures[3 * number + i])
    data = own("folder", path, layout=layout, test_share=0.0)
    assert data.class_names == ("cat", "dog")
    assert data.owner_names == ("ann", "bob")
    order = [0, 1, 2, 3] if layout == "owner/class" else [0, 2, 1, 3]
    expected = np.concatenate([pictures[3 * n : 3 * n + 3] for n in order])
    assert np.array_equal(data.train_x, expected)
    assert data.train_owner is not None
    pairs = {(int(o), int(y)) for o, y in zip(data.train_owner, data.train_y, strict=True)}
    assert pairs == {(0, 0), (0, 1), (1, 0), (1, 1)}
    with pytest.raises(QuiverError, match=r'set data.options.layout = "owner/class"'):
        own("folder", path)
    with pytest.raises(QuiverError, match="did you mean"):
        own("folder", path, layout="owner/clas")


def test_train_and_test_folders_by_owner(tmp_path: Path) -> None:
    path = tmp_path / "pets"
    for part, labels in (("train", ("cat", "dog")), ("test", ("dog",))):
        for owner in ("ann", "bob"):
            for label in labels:
                write_image(path / part / owner / label / "0.png", images(1, (3, 6, 5))[0])
    data = own("folder", path, layout="owner/class")
    assert len(data.train_y) == 4
    assert data.test_y.tolist() == [1, 1]
    write_image(path / "test" / "ann" / "fox" / "0.png", images(1, (3, 6, 5))[0])
    with pytest.raises(QuiverError, match="the class fox is in the test images alone"):
        own("folder", path, layout="owner/class")


# LEAF.


def write_leaf(file: Path, users: dict[str, tuple[list[Any], list[Any]]], **more: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
        **more,
    }
    file.write_text(json.dumps(content))


def test_leaf_of_numbers(tmp_path: Path) -> None:
    path = tmp_path / "femnist"
    draw = np.random.default_rng(0).random((5, 4)).round(3)
    write_leaf(path / "train" / "all_data_0.json", {"f2": (draw[:2].tolist(), [3, 1])})
    write_leaf(path / "train" / "all_data_1.json", {"f1": (draw[2:3].tolist(), [1.0])})
    write_leaf(path / "test" / "all_data_0.json", {"f2": (draw[3:].tolist(), [1, 3])})
    data = own("leaf", path, shape=[1, 2, 2], classes=5)
    assert data.owner_names == ("f1", "f2")
    assert data.classes == 5
    assert data.train_y.tolist() == [1, 3, 1]
    assert data.train_x.shape == (3, 1, 2, 2)
    np.testing.assert_allclose(data.train_x.reshape(3, 4), draw[[2, 0, 1]], rtol=1e-6)
    assert data.test_owner is not None
    assert data.test_owner.tolist() == [1, 1]
    numbered = own("leaf", path)
    assert numbered.class_names == ("1", "3")
    assert numbered.train_x.shape == (3, 4)


def test_leaf_of_characters(tmp_path: Path) -> None:
    users = {"MACBETH": (["so foul", "and fai"], ["-", "r"]), "WITCH": (["fair is"], [" "])}
    write_leaf(tmp_path / "plays" / "all.json", users, hierarchies=["MACBETH", "WITCH"])
    data = own("leaf", tmp_path / "plays", test_share=0.0)
    letters = "".join(sorted(set("so fouland faifair is")))
    assert data.is_ids
    read = ["".join(letters[i] for i in row) for row in data.train_x]
    assert read == ["so foul", "and fai", "fair is"]
    assert data.class_names == (" ", "-", "r")
    assert any(f"of {len(letters)} kinds" in note for note in data.notes)


def test_leaf_with_other_users_in_its_test_part(tmp_path: Path) -> None:
    path = tmp_path / "by_user"
    write_leaf(path / "train" / "a.json", {"a": ([[0.5]] * 5, [0, 1, 0, 1, 0])})
    write_leaf(path / "test" / "b.json", {"b": ([[0.25]] * 5, [0, 1, 0, 1, 0])})
    with pytest.warns(QuiverWarning, match="no client of its test part has training data"):
        own("leaf", path)
    data = own("leaf", path, test_share=0.2)
    assert data.owner_names == ("a",)
    assert (len(data.train_y), len(data.test_y)) == (4, 1)
    assert any("test part is not used" in note for note in data.notes)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not readable JSON"),
        ("[1]", "is not LEAF's"),
        ('{"users": ["a"], "user_data": {}}', "user 'a' has no lists x and y of one length"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1]], "y": []}}}', "of one length"),
        (
            '{"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [[1]], "y": [0]}}}',
            "has 1 examples, and num_samples says 2",
        ),
        (
            '{"users": ["a"], "num_samples": [2, 1], "user_data": {}}',
            "1 users but 2 num_samples",
        ),
        ('{"users": [], "user_data": {}}', "holds no examples"),
        (
            '{"users": ["a"], "user_data": {"a": {"x": [[1], [1, 2]], "y": [0, 1]}}}',
            "not every x has the same length",
        ),
        (
            '{"users": ["a"], "user_data": {"a": {"x": ["ab", "abc"], "y": [0, 1]}}}',
            "texts of 2 to 3 characters",
        ),
        (
            '{"users": ["a"], "user_data": {"a": {"x": [["7", "a tweet"]], "y": [0]}}}',
            "reads numbers and texts of one length",
        ),
        ('{"users": ["a"], "user_data": {"a": {"x": [null], "y": [0]}}}', "text or objects"),
        (
            '{"users": ["a"], "user_data": {"a": {"x": ["01.jpg", "02.jpg"], "y": [0, 1]}}}',
            "x are names of images, such as '01.jpg', as LEAF's CelebA has them",
        ),
    ],
)
def test_what_is_not_leaf_is_one_sentence(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "leaf").mkdir()
    (tmp_path / "leaf" / "a.json").write_text(content)
    with pytest.raises(QuiverError) as caught:
        own("leaf", tmp_path / "leaf")
    assert words in str(caught.value)


def test_a_shape_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    write_leaf(tmp_path / "leaf" / "a.json", {"a": ([[1.0, 2.0]] * 2, [0, 1])})
    with pytest.raises(QuiverError, match=r"shape = \[1, 3\]: an input of .* has 2 numbers"):
        own("leaf", tmp_path / "leaf", shape=[1, 3])
    (tmp_path / "none").mkdir()
    with pytest.raises(QuiverError, match=r"holds no .json files"):
        own("leaf", tmp_path / "none")


# FedScale.


def write_fedscale(path: Path, listed: dict[str, list[tuple[str, str, int]]], **header: Any) -> Any:
    pictures = images(sum(map(len, listed.values())), (3, 4, 4), seed=5)
    number = 0
    for part, samples in listed.items():
        lines = ["client_id,sample_path,label_name,label_id"]
        for client, label, label_id in samples:
            name = f"{part}_{number}.png"
            place = path / part / name if number % 2 else path / name  # both are looked through
            write_image(place, pictures[number])
            lines.append(f"{client},{name},{label},{label_id}")
            number += 1
        file = path / "client_data_mapping" / f"{part}.csv"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n")
    return pictures


def test_fedscale_lists_images_by_client(tmp_path: Path) -> None:
    path = tmp_path / "openImg"
    listed = {
        "train": [("7", "Tree", 4), ("7", "Car", 2), ("12", "Tree", 4)],
        "test": [("7", "Car", 2)],
    }
    pictures = write_fedscale(path, listed)
    data = own("fedscale", path)
    assert np.array_equal(data.train_x, pictures[:3])
    assert np.array_equal(data.test_x, pictures[3:])
    assert data.class_names == ("Car", "Tree")
    assert data.train_y.tolist() == [1, 0, 1]
    assert data.owner_names == ("12", "7")
    assert data.train_owner is not None
    assert data.train_owner.tolist() == [1, 1, 0]
    own_share = own("fedscale", path, test_share=0.5, classes=6, size=2)
    assert own_share.class_names == ("0", "1", "Car", "3", "Tree", "5")
    assert own_share.train_x.shape[1:] == (3, 2, 2)
    assert len(own_share.train_y) + len(own_share.test_y) == 3
    assert any("test.csv is not used" in note for note in own_share.notes)


def test_what_is_not_fedscale_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "openImg"
    write_fedscale(path, {"train": [("7", "Tree", 4), ("8", "Car", 2)]})
    mapping = path / "client_data_mapping" / "train.csv"
    text = mapping.read_text()
    for old, new, words in (
        ("label_id", "label", "its first line must name the columns"),
        ("Tree,4", "Tree,four", "line 2: it should have 4 columns and a whole number"),
        ("train_0.png", "gone.png", "line 2: there is no"),
        ("train_0.png", "../../secret.png", "leads out of"),
        ("train_0.png", "/etc/secret.png", "leads out of"),
        ("\n8,", "\n,", "line 3: it has no client_id"),
        ("\n8,", "\n\n,", "line 4: it has no client_id"),
    ):
        mapping.write_text(text.replace(old, new))
        with pytest.raises(QuiverError) as caught:
            own("fedscale", path)
        assert words in str(caught.value)
    mapping.write_bytes(text.replace("Tree", "B\u00e4ume").encode("cp1252"))
    with pytest.raises(QuiverError, match=r"is no readable list .* write it as UTF-8"):
        own("fedscale", path)
    mapping.write_text(text.splitlines()[0])
    with pytest.raises(QuiverError, match="lists no samples"):
        own("fedscale", path)
    mapping.unlink()
    with pytest.raises(QuiverError, match=r"train.csv is missing: data.options.path is the folder"):
        own("fedscale", path)


def test_fedscale_class_names_that_differ_between_clients_are_pointed_out(tmp_path: Path) -> None:
    path = tmp_path / "openImg"
    write_fedscale(path, {"train": [("7", "Tree", 4), ("7", "Car", 2), ("8", "Bush", 4)]})
    data = own("fedscale", path, test_share=0.0)
    (doubt,) = [text for text in data.doubts if "label_id" in text]
    assert "label_id 4 is called 'Tree'" in doubt
    assert "train.csv, line 2) and 'Bush'" in doubt
    assert "train.csv, line 4)" in doubt
    assert set(data.class_names).isdisjoint({"Tree", "Bush"})
