"""Sources of data sets: one file per format, and the table of them all.

`load_dataset("cifar10", root="data")` is the one way in. A source is *embedded* (comes with the
package), *official* (published files in a folder below the data root) or *own* (a path).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quiverfl.data.dataset import Dataset, report_notes
from quiverfl.data.sources.benchmarks import read_fedscale, read_leaf
from quiverfl.data.sources.builtin import load_digits, load_synthetic
from quiverfl.data.sources.cache import FOLDER, load_cached
from quiverfl.data.sources.cifar import read_cifar10, read_cifar100
from quiverfl.data.sources.fetch import Download, holds_files
from quiverfl.data.sources.idx import FASHION_MNIST, MNIST, read_fashion_mnist, read_mnist
from quiverfl.data.sources.images import read_folder, read_tiny_imagenet
from quiverfl.data.sources.libraries import read_huggingface
from quiverfl.data.sources.npz import read_npz
from quiverfl.data.sources.table import read_table
from quiverfl.errors import QuiverError
from quiverfl.support.references import Registry, check_options, is_reference, load_callable

ROOT_VARIABLE = "QUIVER_DATA"


@dataclass(frozen=True)
class Source:
    """One kind of data: how it is read, where its files are looked for, how they are had.

    `read` takes the options alone (embedded) or the path first (official, own). `places` are
    folders below the data root, the first that exists is read.
    """

    about: str
    origin: Literal["embedded", "official", "own"]
    read: Callable[..., Dataset]
    folders: tuple[str, ...] = ()
    downloads: tuple[Download, ...] = ()


CIFAR = "https://www.cs.toronto.edu/~kriz"
OSSCI = "https://ossci-datasets.s3.amazonaws.com/mnist"
FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"

_SOURCES = {
    "digits": Source("1,797 digits of 8×8 (scikit-learn)", "embedded", load_digits),
    "synthetic": Source("Gaussian classes of any shape and size", "embedded", load_synthetic),
    "cifar10": Source(
        "60,000 images of 32×32, 10 classes",
        "official",
        read_cifar10,
        ("cifar-10-batches-bin", "cifar-10-batches-py"),
        (
            Download(
                f"{CIFAR}/cifar-10-binary.tar.gz",
                "c32a1d4ab5d03f1284b67883e8d87530",
                "cifar-10-batches-bin",
            ),
        ),
    ),
    "cifar100": Source(
        "60,000 images of 32×32, 100 classes",
        "official",
        read_cifar100,
        ("cifar-100-binary", "cifar-100-python"),
        (
            Download(
                f"{CIFAR}/cifar-100-binary.tar.gz",
                "03b5dce01913d631647c71ecec9e9cb8",
                "cifar-100-binary",
            ),
        ),
    ),
    "tiny_imagenet": Source(
        "110,000 images of 64×64, 200 classes",
        "official",
        read_tiny_imagenet,
        ("tiny-imagenet-200",),
        (
            Download(
                "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                "90528d7ca1a48142e341f4ef8d21d0de",
                "tiny-imagenet-200",
            ),
        ),
    ),
    "mnist": Source(
        "70,000 digits of 28×28",
        "official",
        read_mnist,
        ("mnist", "MNIST/raw"),
        tuple(Download(f"{OSSCI}/{f}", md5, f"mnist/{f}", False) for f, md5 in MNIST.items()),
    ),
    "fashion_mnist": Source(
        "70,000 pieces of clothing of 28×28",
        "official",
        read_fashion_mnist,
        ("fashion-mnist", "FashionMNIST/raw"),
        tuple(
            Download(f"{FASHION}/{f}", md5, f"fashion-mnist/{f}", False)
            for f, md5 in FASHION_MNIST.items()
        ),
    ),
    "folder": Source(
        "your images, one folder per class, or per owner and class", "own", read_folder
    ),
    "npz": Source("your arrays x, y, perhaps owner: .npz, or a folder of .npy", "own", read_npz),
    "table": Source(
        "your .parquet, .csv or .tsv with owners, or a folder of one per owner", "own", read_table
    ),
    "leaf": Source("LEAF's JSON: examples by user", "own", read_leaf),
    "fedscale": Source("images listed by FedScale's client_data_mapping", "own", read_fedscale),
    "huggingface": Source("a folder of datasets' save_to_disk", "own", read_huggingface),
}
SOURCES = Registry("data", _SOURCES, own="module:function")


def data_root(root: Path | str | None = None) -> Path:
    """The folder of data sets: as given, else $QUIVER_DATA, else `data`."""
    return Path(root or os.environ.get(ROOT_VARIABLE) or "data").expanduser()


def load_dataset(
    name: str,
    root: Path | str | None = None,
    cache: Path | str | None = None,
    path: Path | str | None = None,
    **options: Any,
) -> Dataset:
    """A data set by its name in SOURCES, or your own by `module:function`.

    Files are read once and kept as arrays in `cache` (the folder .quiver-cache of the root unless
    given). `path` is where your own folder, .npz or table lies.
    """
    if is_reference(name):
        return _call_own_source(name, options if path is None else {"path": path, **options})
    check_source(name, options)
    source = SOURCES.lookup(name)
    if source.origin == "embedded":
        return source.read(**options)
    top = data_root(root)
    files = _check_own_path(name, path) if source.origin == "own" else official_folder(name, top)
    if files is None:
        raise QuiverError(missing_sentence(name, top))
    keep = top / FOLDER if cache is None else Path(cache).expanduser()
    return report_notes(
        load_cached(name, files, options, keep, lambda: source.read(files, **options))
    )


def check_source(name: str, options: Iterable[str]) -> None:
    """Refuse an unknown name or option without reading anything."""
    if is_reference(name):
        check_options(
            f"data {name!r}", load_callable(name), sorted(set(options) - {"cache"}), "data.options"
        )
        return
    source = SOURCES.lookup(name)
    own = set(options) - {"path", "cache"}  # load_dataset's, for every source
    ours = ("path", "cache") if source.origin == "own" else ("cache",)
    given = ("path", "folder")
    check_options(f"data {name!r}", source.read, sorted(own), "data.options", given, ours)


def official_folder(name: str, root: Path) -> Path | None:
    """The folder that holds an official data set, if there is one."""
    return next((root / p for p in SOURCES[name].folders if holds_files(root / p)), None)


def missing_sentence(name: str, root: Path) -> str:
    """Say how to get an official data set that is missing."""
    places = " or ".join(str(root / place) for place in SOURCES[name].folders)
    return (
        f"{name} is not there: run 'quiver data fetch {name} --root {root}', or put its official "
        f"files into {places}."
    )


def _check_own_path(name: str, path: Path | str | None) -> Path:
    if path is None:
        raise QuiverError(f"data {name!r} needs data.options.path: say where your files are.")
    if isinstance(path, bool) or not isinstance(path, str | os.PathLike | int):
        raise QuiverError(f"data.options.path = {path!r}: write a path as text.")
    location = Path(str(path)).expanduser()  # a folder may be called 2024
    if not location.exists():
        raise QuiverError(f"data.options.path = {str(path)!r}: there is no such file or folder.")
    return location


def _call_own_source(name: str, options: dict[str, Any]) -> Dataset:
    function = load_callable(name)
    check_options(f"data {name!r}", function, options, "data.options")
    dataset = function(**options)
    if not isinstance(dataset, Dataset):
        raise QuiverError(
            f"data {name!r} returned a {type(dataset).__name__}: it must return a "
            "quiverfl.data.dataset.Dataset."
        )
    return dataset
