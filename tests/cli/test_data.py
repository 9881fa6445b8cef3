"""`quiver data`, `quiver data fetch` and `quiver partition show`, as a person calls them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner, Result

from data_files import write_cifar10_binary, write_tiny_imagenet
from quiverfl.cli.data import app, partition_app
from quiverfl.data.partition import make_partition
from quiverfl.data.sources import SOURCES, load_dataset
from quiverfl.errors import QuiverError
from quiverfl.results.pictures import draw_partition

quiver = typer.Typer()
quiver.add_typer(app, name="data")
quiver.add_typer(partition_app, name="partition")


def call(*arguments: str) -> Result:
    result = CliRunner().invoke(quiver, arguments)
    if isinstance(result.exception, QuiverError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_the_list_says_what_is_there(tmp_path: Path) -> None:
    write_cifar10_binary(tmp_path)
    states = {
        row["name"]: row
        for row in json.loads(call("data", "--root", str(tmp_path), "--json").stdout)
    }
    assert set(states) == set(SOURCES)
    assert states["digits"]["state"] == "ready"
    assert states["cifar10"]["state"] == "there"
    assert states["cifar10"]["where"] == str(tmp_path / "cifar-10-batches-bin")
    assert states["mnist"]["state"] == "missing"
    assert states["mnist"]["where"] == str(tmp_path / "mnist")
    load_dataset("cifar10", tmp_path, verify=False)
    text = call("data", "--root", str(tmp_path)).stdout
    assert any(line.split()[:3] == ["cifar10", "there,", "cached"] for line in text.splitlines())


def test_fetch_refuses_what_cannot_be_fetched(tmp_path: Path) -> None:
    with pytest.raises(QuiverError, match="comes with Quiver"):
        call("data", "fetch", "digits")
    with pytest.raises(QuiverError, match="your own data"):
        call("data", "fetch", "npz")
    with pytest.raises(QuiverError, match="did you mean 'cifar10'"):
        call("data", "fetch", "cifar")


def test_fetch_leaves_alone_what_is_there(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path)
    for arguments in (
        ["fetch", "tiny_imagenet", "--root", str(tmp_path)],
        ["--root", str(tmp_path), "fetch", "tiny_imagenet"],
    ):
        assert "already there" in call("data", *arguments).stdout


def test_fetch_does_not_call_damaged_files_there(tmp_path: Path) -> None:
    write_cifar10_binary(tmp_path)
    folder = tmp_path / "cifar-10-batches-bin"
    with pytest.raises(QuiverError, match=f"wrong checksum.* Delete the folder {folder}"):
        call("data", "fetch", "cifar10", "--root", str(tmp_path))
    (folder / "data_batch_1.bin").unlink()
    with pytest.raises(QuiverError, match=r"data_batch_1.bin is missing. Delete the folder"):
        call("data", "fetch", "cifar10", "--root", str(tmp_path))


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    place = tmp_path / "none" / "x.png"
    with pytest.raises(QuiverError, match=f"--picture {place}: cannot be written"):
        call("partition", "show", "--data", "digits", "--clients", "5", "--picture", str(place))


def test_show_prints_sizes_labels_and_heterogeneity() -> None:
    shown = call("partition", "show", "--data", "digits", "--clients", "20", "--alpha", "0.5")
    assert "digits: dirichlet, alpha 0.5, 20 clients, seed 0" in shown.stdout
    assert "67 each; 1,340 of 1,347 used" in shown.stdout
    shares = make_partition(load_dataset("digits"), "dirichlet", 20, 0, alpha=0.5)
    assert f"heterogeneity      {shares.heterogeneity():.3f}" in shown.stdout
    rows = [line for line in shown.stdout.splitlines() if line.endswith("|")]
    for counts, row in zip(shares.train_counts, rows, strict=True):
        cells = row.split("|")[1][::2]
        assert [cell == " " for cell in cells] == [count == 0 for count in counts]


def test_show_as_json() -> None:
    arguments = ["--data", "digits", "--partition", "pathological", "--clients", "10"]
    shown = call(
        "partition", "show", *arguments, "--classes-per-client", "3", "--json", "--seed", "4"
    )
    facts = json.loads(shown.stdout)
    shares = make_partition(load_dataset("digits"), "pathological", 10, 4, classes_per_client=3)
    assert facts["labels_per_client"] == [3] * 10
    assert facts["train_counts"] == shares.train_counts.tolist()
    assert facts["test_sizes"] == shares.test_counts.sum(axis=1).tolist()
    assert facts["heterogeneity"] == shares.heterogeneity()


def test_show_says_whose_the_clients_are(tmp_path: Path) -> None:
    owner = np.array(["hosp-3", "hosp-7"] * 10)
    x = np.random.default_rng(0).normal(size=(20, 2))
    np.savez(tmp_path / "notes.npz", x=x, y=np.arange(20) // 2 % 2, owner=owner)
    arguments = ["--data", "npz", "--partition", "natural", "--root", str(tmp_path)]
    arguments += ["--option", f"path={tmp_path / 'notes.npz'}"]
    shown = call("partition", "show", *arguments).stdout.splitlines()
    assert [line.split()[-1] for line in shown[-2:]] == ["hosp-3", "hosp-7"]
    facts = json.loads(call("partition", "show", *arguments, "--json").stdout)
    assert facts["names"] == ["hosp-3", "hosp-7"]


@pytest.mark.parametrize(
    ("dtype", "options", "words"),
    [
        (np.int64, [], "inputs             ids (int64), shape 3, kept as they are"),
        (np.float64, [], "inputs             numbers (float32), shape 3, standardised per channel"),
        (np.int64, ["inputs=numbers"], "all are whole numbers: if they are ids"),
    ],
)
def test_show_says_what_the_inputs_are_taken_for(
    dtype: type, options: list[str], words: str, tmp_path: Path
) -> None:
    x = np.random.default_rng(0).normal(0, 100, size=(20, 3)).astype(dtype)
    np.savez(tmp_path / "words.npz", x=x, y=np.arange(20) % 2)
    arguments = ["--data", "npz", "--partition", "iid", "--clients", "2", "--root", str(tmp_path)]
    for option in [f"path={tmp_path / 'words.npz'}", *options]:
        arguments += ["--option", option]
    shown = call("partition", "show", *arguments).stdout
    assert words in shown
    assert ("data.options.inputs" in shown) == bool(options)


def test_show_takes_options_of_the_source() -> None:
    options = ["--option", "classes=60", "--option", "shape=[4]", "--option", "train=120"]
    shown = call(
        "partition",
        "show",
        "--data",
        "synthetic",
        "--partition",
        "iid",
        *options,
        "--clients",
        "3",
    )
    assert "of 60" in shown.stdout
    with pytest.raises(QuiverError, match="write key=value"):
        call("partition", "show", "--data", "synthetic", "--clients", "3", "--option", "classes")


def test_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "map.png"
    arguments = ["--data", "digits", "--clients", "20", "--picture", str(path)]
    assert f"picture: {path}" in call("partition", "show", *arguments).stdout
    with Image.open(path) as picture:
        assert picture.size[0] > 800
        assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 50
    with pytest.raises(QuiverError, match=r"map.jpg.*\.png, \.svg, \.pdf"):
        call("partition", "show", *arguments[:-1], str(tmp_path / "map.jpg"))


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (120, 10), (1000, 200)])
def test_every_shape_can_be_drawn_and_gives_the_same_file(shape: tuple[int, int]) -> None:
    counts = np.arange(shape[0] * shape[1]).reshape(shape) % 17
    first, again = io.BytesIO(), io.BytesIO()
    for target in (first, again):
        draw_partition(counts, target, title="title", format="svg")
    assert first.getvalue() == again.getvalue()
    assert first.getvalue().count(b"<image") >= 1


def test_drawing_on_given_axes() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    counts = np.array([[3, 0], [1, 2]])
    draw_partition(counts, axes, title="two clients", class_names=("cat", "dog"))
    drawn = axes.images[0].get_array()
    assert np.ma.filled(drawn, 0).tolist() == counts.T.tolist()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog"]
    assert axes.get_title() == "two clients"
