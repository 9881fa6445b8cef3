"""Data that stays on disk: the same numbers to the bit, in a memory that does not grow with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quiverfl as qv
from data_files import images
from quiverfl.data import dataset as dataset_module
from quiverfl.data import examples as on_disk
from quiverfl.data.dataset import Dataset, compute_channel_statistics
from quiverfl.data.examples import DiskRows, find_memory_map
from quiverfl.data.sources import npz

N = 60


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of a few bytes are treated as those of many gigabytes."""
    monkeypatch.setattr(npz, "LARGE", 0)
    monkeypatch.setattr(on_disk, "PIECE", 100)


def arrays(kind: str) -> dict[str, Any]:
    random = np.random.default_rng(0)
    x: Any = {
        "numbers": random.normal(3, 2, (N, 5)),
        "float32": random.normal(size=(N, 5)).astype(np.float32),
        "images": images(N, (3, 8, 8)),
        "channels last": images(N, (8, 8, 3)),
        "ids": random.integers(0, 9, (N, 4)),
    }[kind]
    return {"x": x, "y": np.arange(N) % 3, "owner": np.arange(N) % 4}


def write(kind: str, how: str, folder: Path) -> Path:
    found = arrays(kind)
    if how == "parts":
        found = {f"{part}_{k}": v for k, v in found.items() for part in ("train", "test")}
    if how == "folder":
        (folder / "arrays").mkdir()
        for key, array in found.items():
            np.save(folder / "arrays" / f"{key}.npy", array)
        return folder / "arrays"
    save = np.savez_compressed if how == "compressed" else np.savez
    save(folder / "mine.npz", **found)
    return folder / "mine.npz"


@pytest.mark.usefixtures("everything_is_large")
@pytest.mark.parametrize("how", ["whole", "parts", "folder", "compressed"])
@pytest.mark.parametrize("kind", ["numbers", "float32", "images", "channels last", "ids"])
def test_what_is_read_in_pieces_is_what_is_read_at_once(
    kind: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(kind, how, tmp_path)
    mapped = qv.load_dataset("npz", path=path, cache=tmp_path / "a")
    monkeypatch.setattr(npz, "LARGE", 1 << 40)
    loaded = qv.load_dataset("npz", path=path, cache=tmp_path / "b")
    assert mapped.digest == loaded.digest
    assert isinstance(mapped.train_x, np.memmap)
    assert np.array_equal(mapped.train_x, loaded.train_x)
    assert mapped.train_x.dtype == loaded.train_x.dtype


@pytest.mark.usefixtures("everything_is_large")
def test_a_large_input_is_never_read_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most: list[int] = []
    taken = DiskRows.__getitem__

    def watched(self: DiskRows, which: Any) -> Any:
        found = taken(self, which)
        most.append(len(found))
        return found

    monkeypatch.setattr(DiskRows, "__getitem__", watched)
    monkeypatch.setattr(dataset_module, "LARGE", 0)
    dataset = qv.load_dataset("npz", path=write("numbers", "whole", tmp_path), cache=tmp_path / "a")
    assert len(dataset.train_x) > 40
    assert max(most) == 5  # rows of 20 bytes in pieces of 100


@pytest.mark.parametrize("shape", [(500, 3), (400, 2, 4, 4)])
def test_moments_in_pieces_are_the_moments(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(1).normal(7, 3, shape).astype(np.float32)
    mean, std = compute_channel_statistics(x)
    monkeypatch.setattr(dataset_module, "LARGE", 0)
    monkeypatch.setattr(on_disk, "PIECE", 1000)
    in_pieces = compute_channel_statistics(x)
    np.testing.assert_allclose(in_pieces[0], mean, rtol=1e-12)
    np.testing.assert_allclose(in_pieces[1], std, rtol=1e-12)


def test_pages_are_forgotten_only_of_files_that_cannot_be_written(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(3))
    assert find_memory_map(np.load(tmp_path / "a.npy", mmap_mode="r")) is not None
    assert find_memory_map(np.load(tmp_path / "a.npy", mmap_mode="r")[1:]) is not None
    assert find_memory_map(np.load(tmp_path / "a.npy", mmap_mode="c")) is None
    assert find_memory_map(np.load(tmp_path / "a.npy", mmap_mode="r+")) is None
    assert find_memory_map(np.ones(3)) is None


def run(dataset: Dataset, mapped: bool, **options: Any) -> qv.Run:
    augment = options.pop("augment", None)
    data = qv.partition(
        dataset, "dirichlet", clients=4, seed=0, alpha=0.5, augment=augment, mapped=mapped
    )
    shape, model = dataset.input_shape, options.pop("model", "mlp")
    settings = {"rounds": 2, "seed": 0, "threads": 1, **options}
    return qv.simulate(
        qv.Task(lambda: qv.make_model(model, shape, dataset.classes), personal="head"),
        data,
        method=qv.DFedPGP(),
        topology=qv.random_push(clients=4, neighbors=2, seed=0),
        training=qv.Training(lr=0.1, batch_size=8),
        **settings,
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("numbers", {}),
        ("numbers", {"dtype": torch.float64, "executor": "sequential"}),
        ("images", {"augment": "crop_flip"}),
        ("images", {"augment": "crop_flip", "executor": "sequential"}),
        ("images", {"augment": "crop_flip", "model": "resnet8_gn"}),
    ],
)
def test_a_run_on_what_stays_on_disk_is_the_run_in_memory(
    kind: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pages are forgotten all the time.
    monkeypatch.setattr("quiverfl.engine.local.examples.READ", 500)
    path = write(kind, "whole", tmp_path)
    dataset = qv.load_dataset("npz", path=path, cache=tmp_path / "cache")
    there, here = (run(dataset, mapped, **options) for mapped in (True, False))
    assert there._data.train.files
    assert there._data.train.rows is not None
    assert there.history.equals(here.history)
    for one, other in zip(there._shard.state, here._shard.state, strict=True):
        assert torch.equal(one, other)
    x = torch.from_numpy(np.array(dataset.test_x[:4]))
    assert torch.equal(there.personal(1)(x), here.personal(1)(x))


def test_some_clients_of_what_stays_on_disk(tmp_path: Path) -> None:
    path = write("numbers", "whole", tmp_path)
    dataset = qv.load_dataset("npz", path=path, cache=tmp_path / "cache")
    there, here = (qv.partition(dataset, "iid", clients=4, mapped=m) for m in (True, False))
    some = there.select([2, 0])
    for new, old in ((0, 2), (1, 0)):
        x, y = some.train.of_client(new)
        assert torch.equal(there.prepare(x), here.train.of_client(old)[0])  # type: ignore[misc]
        assert torch.equal(y, here.train.of_client(old)[1])


def test_by_configuration_and_resumed_either_way(tmp_path: Path) -> None:
    sections = {
        "data": {"name": "npz", "clients": 4, "partition": "iid"},
        "training": {"batch_size": 8},
        "run": {"rounds": 2},
    }
    sections["data"]["options"] = {  # type: ignore[index]
        "path": str(write("numbers", "folder", tmp_path)),
        "cache": str(tmp_path / "cache"),
    }
    mapped = {**sections, "data": {**sections["data"], "mapped": True}}  # type: ignore[dict-item]
    there = qv.Experiment.of(mapped)
    assert there.data.train.rows is not None
    first = there.run(tmp_path / "run")
    again = qv.Experiment.of(sections).run(tmp_path / "run")  # the same run: nothing is computed
    assert first.history.equals(again.history)


def test_without_a_cache_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npz, "LARGE", 0)
    path = write("numbers", "whole", tmp_path)
    (tmp_path / "no folder").write_text("")
    with pytest.warns(UserWarning, match="could not be cached"):
        dataset = qv.load_dataset("npz", path=path, cache=tmp_path / "no folder")
    with pytest.raises(qv.QuiverError, match=r"data\.mapped = true.*data\.options\.cache"):
        qv.partition(dataset, "iid", clients=4, mapped=True)
    assert qv.partition(dataset, "iid", clients=4).clients == 4


PROGRAM = """
import json, resource, sys
import numpy as np
import quiverfl as qv

def peak():
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return int(lines["VmHWM"].split()[0]) // 1024

path, cache, mapped, extra = sys.argv[1], sys.argv[2], sys.argv[3] == "mapped", int(sys.argv[4])
warm = qv.load_dataset("digits")
qv.Experiment.of({"data": {"clients": 3}, "run": {"rounds": 1}}).run()
with open("/proc/self/status") as status:
    lines = dict(line.split(":", 1) for line in status)
used = int(lines["VmData"].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + (extra << 20), resource.RLIM_INFINITY))
before = peak()
experiment = qv.Experiment.of({
    "data": {"name": "npz", "clients": 20, "partition": "iid", "mapped": mapped,
             "test_per_client": 200, "options": {"path": path, "cache": cache}},
    "model": {"hidden": [8]},
    "training": {"batch_size": 64},
    "run": {"rounds": 1, "threads": 1},
})
run = experiment.run()
accuracy = float(run.history["accuracy"].mean())
print(json.dumps({"before": before, "peak": peak(), "accuracy": accuracy}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and sets Linux's limits")
def test_a_file_larger_than_the_memory_that_is_allowed(tmp_path: Path) -> None:
    """480 MB of numbers with 200 MB to be had; the peak of what is resident stays below, too."""
    import json

    rows, width = 120_000, 1000
    random = np.random.default_rng(0)
    folder = tmp_path / "large"
    folder.mkdir()
    labels = random.integers(0, 2, rows)
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (rows, width))
    for start in range(0, rows, 5000):
        part = slice(start, start + 5000)
        x[part] = random.normal(size=(5000, width)).astype(np.float32) + labels[part, None] / 4
    del x
    np.save(folder / "y.npy", labels)

    def child(how: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PROGRAM, str(folder), str(tmp_path / "cache"), how, "200"]
        return subprocess.run(command, capture_output=True, text=True, timeout=900)

    first = child("mapped")  # writes the cache, too
    assert first.returncode == 0, first.stderr
    found = json.loads(first.stdout)
    assert found["peak"] - found["before"] < 240  # MB, half of what the file has
    assert found["accuracy"] > 0.9
    assert "Memory" in child("loaded").stderr  # where the limit is one
