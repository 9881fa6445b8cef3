"""The cache: mapped, renewed when files change, never half-written, whatever kills the writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_files import write_cifar10_binary
from quiverfl.data.dataset import Dataset
from quiverfl.data.sources import load_dataset
from quiverfl.data.sources.cache import hash_files
from quiverfl.support.durable import ABANDONED, PARTIAL, write_atomically


def load(root: Path) -> Dataset:
    return load_dataset("cifar10", root, verify=False)


def entries(root: Path) -> list[Path]:
    return sorted((root / ".quiver-cache").iterdir())


def test_the_second_time_nothing_is_read_and_all_is_mapped(tmp_path: Path) -> None:
    write_cifar10_binary(tmp_path)
    first = load(tmp_path)
    for path in (tmp_path / "cifar-10-batches-bin").iterdir():
        # The same name, size and time, but nobody could read it.
        status = path.stat()
        path.write_bytes(b"\xff" * status.st_size)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = load(tmp_path)
    assert isinstance(second.train_x, np.memmap)
    assert not second.train_x.flags.writeable
    for part in ("train_x", "train_y", "test_x", "test_y"):
        assert np.array_equal(getattr(first, part), getattr(second, part))
    assert second.class_names == first.class_names
    assert second.mean == first.mean
    assert second.std == first.std


def test_a_full_size_set_loads_in_well_under_a_second(tmp_path: Path) -> None:
    write_cifar10_binary(tmp_path, per_file=10_000)
    load(tmp_path)
    start = time.perf_counter()
    data = load(tmp_path)
    assert time.perf_counter() - start < 0.5
    assert data.train_x.shape == (50_000, 3, 32, 32)


def test_changed_files_and_other_options_are_read_anew(tmp_path: Path) -> None:
    write_cifar10_binary(tmp_path)
    load(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin"
    content = bytearray(path.read_bytes())
    content[1] ^= 0xFF
    path.write_bytes(content)
    changed = load(tmp_path)
    assert changed.train_x[0, 0, 0, 0] == content[1]
    assert len(entries(tmp_path)) == 2
    assert hash_files(path, {"a": 1}) != hash_files(path, {"a": 2})


def test_files_that_look_the_same_elsewhere_are_other_files(tmp_path: Path) -> None:
    for value, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / "data.npz", x=np.full((4, 2), value), y=np.arange(4))
        os.utime(tmp_path / name / "data.npz", ns=(0, 0))
    found = [
        load_dataset("npz", tmp_path, path=tmp_path / name / "data.npz").train_x.max()
        for name in ("a", "b")
    ]
    assert found == [0, 1]


def test_the_digest_is_of_every_example_and_kept_with_the_arrays(tmp_path: Path) -> None:
    write_cifar10_binary(tmp_path)
    first = load(tmp_path)
    assert first.known_digest == replace(first, known_digest="").digest
    for part in ("train_x", "train_y", "test_x", "test_y"):
        array = getattr(first, part).copy()
        array.flat[-1] ^= 1
        assert replace(first, known_digest="", **{part: array}).digest != first.digest


def test_the_cache_can_be_elsewhere(tmp_path: Path) -> None:
    write_cifar10_binary(tmp_path)
    load_dataset("cifar10", tmp_path, cache=tmp_path / "kept", verify=False)
    assert not (tmp_path / ".quiver-cache").exists()
    assert len(list((tmp_path / "kept").iterdir())) == 1


@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "text"])
@pytest.mark.parametrize("file", ["train_x.npy", "train_y.npy", "dataset.json"])
def test_a_damaged_cache_is_made_again(file: str, damage: str, tmp_path: Path) -> None:
    _, labels = write_cifar10_binary(tmp_path)
    load(tmp_path)
    path = entries(tmp_path)[0] / file
    if damage == "gone":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes({"cut": content[:-7], "empty": b"", "text": b"{}"}[damage])
    again = load(tmp_path)
    assert np.array_equal(again.train_y, labels[:20])
    assert len(entries(tmp_path)) == 1


def test_several_may_find_the_damage_at_once(tmp_path: Path) -> None:
    _, labels = write_cifar10_binary(tmp_path)
    load(tmp_path)
    for _ in range(20):
        (entries(tmp_path)[0] / "train_x.npy").write_bytes(b"")
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: load(tmp_path), range(4)))
        assert all(np.array_equal(data.train_y, labels[:20]) for data in found)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    write_cifar10_binary(tmp_path)
    (tmp_path / ".quiver-cache").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="cifar10 could not be cached"):
        data = load(tmp_path)
    assert len(data.train_y) == 20


WRITER = """
import sys, time
from pathlib import Path
import numpy as np
import quiverfl.data.sources.cache as cache
from quiverfl.data.sources import load_dataset

save = np.save
def slow(path, array, **options):
    save(path, array, **options)
    print("writing", flush=True)
    time.sleep(60)
np.save = slow
load_dataset("cifar10", Path(sys.argv[1]), verify=False)
"""


def test_a_killed_writer_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    _, labels = write_cifar10_binary(tmp_path)
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    left = entries(tmp_path)
    assert all(path.name.startswith(PARTIAL) for path in left)
    assert left
    data = load(tmp_path)
    assert np.array_equal(data.train_y, labels[:20])
    for path in left:
        os.utime(path, (0, time.time() - ABANDONED - 60))
    (tmp_path / "cifar-10-batches-bin" / "readme").write_text("another fingerprint")
    load(tmp_path)
    assert not any(path.exists() for path in left)


def test_a_failure_leaves_no_trace(tmp_path: Path) -> None:
    final = tmp_path / "folder" / "whole"

    def write_half() -> None:
        with write_atomically(final) as draft:
            draft.mkdir()
            (draft / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert list(final.parent.iterdir()) == []


def test_whoever_is_first_wins(tmp_path: Path) -> None:
    final = tmp_path / "whole"
    with write_atomically(final) as slow:
        slow.mkdir()
        (slow / "by").write_text("slow")
        with write_atomically(final) as quick:
            quick.mkdir()
            (quick / "by").write_text("quick")
    assert (final / "by").read_text() == "quick"
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
