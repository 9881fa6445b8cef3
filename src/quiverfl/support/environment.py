"""Advice to the operating system about memory, and optional packages. No number depends on it.

PyTorch frees and allocates every intermediate tensor. By default glibc returns pieces of more than
128 KB to the kernel, which zeroes them again page by page: up to a fifth of a round's time. What is
kept is used again by the next step; what other threads than the first free is kept only in the
first thread's arena, so all of them share it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import sys
from typing import TYPE_CHECKING

from quiverfl.errors import QuiverError

if TYPE_CHECKING:
    from torch import Tensor


TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # glibc's malloc.h
HUGEPAGE = 14  # Linux's mman.h
LARGE_PAGE = 2 << 20
KEPT_BYTES = 1 << 30
LARGEST_KEPT = 64 << 20
"""Larger pieces, such as the states of all clients, are still returned when they are freed."""


def keep_freed_memory() -> bool:
    """For the whole process; False where the C library has no such setting."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    settings = {
        MMAP_THRESHOLD: LARGEST_KEPT,
        TRIM_THRESHOLD: KEPT_BYTES,
        ARENA_MAX: 1,
    }
    return all(mallopt(name, value) for name, value in settings.items())


def use_large_pages(tensor: Tensor) -> Tensor:
    """Ask for large pages behind a new tensor, before anything is written to it.

    Mixing walks down the columns of all clients' parameters: every row of a chunk lies in another
    page, and small pages are looked up one by one.
    """
    begin = -(-tensor.data_ptr() // LARGE_PAGE) * LARGE_PAGE
    size = tensor.data_ptr() + tensor.nbytes - begin
    if sys.platform == "linux" and tensor.device.type == "cpu" and size >= LARGE_PAGE:
        try:
            madvise = ctypes.CDLL(None).madvise
        except (OSError, AttributeError, TypeError):
            return tensor
        whole = size - size % LARGE_PAGE
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(whole), HUGEPAGE)
    return tensor


def forget_pages(file: mmap.mmap) -> None:
    """What was read of a file that is mapped for reading need not stay in this process's memory.

    The system may still have it, and reads it again where it has not.
    """
    if hasattr(mmap, "MADV_DONTNEED"):
        file.madvise(mmap.MADV_DONTNEED)


NO_FLOAT64 = {"mps"}
"""Kinds of devices that compute no float64, Apple's GPUs: what needs it stays on the host."""


EXTRAS = {
    "peer": ("grpc", "cryptography", "prometheus_client"),
    "tensorboard": ("tensorboard",),
    "ray": ("ray",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "datasets": ("datasets",),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "privacy": ("opacus",),
}
"""The modules that Quiver imports of each."""


def require_package(extra: str, what: str) -> None:
    """Refuse in one sentence where a module of the extra is missing; `what` is what needs it."""
    if extra == "peer" and sys.platform == "win32":
        raise QuiverError(
            f"{what} needs Linux or macOS: a peer keeps its keys and limits in ways that Windows "
            "does not have. Use the Windows Subsystem for Linux; `quiver run` needs none of it."
        )
    missing = [module for module in EXTRAS[extra] if not _is_installed(module)]
    if missing:
        raise QuiverError(
            f"{what} needs {', '.join(missing)}, which is not installed: "
            f"`pip install 'quiverfl[{extra}]'` adds it."
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a package above it is missing, or was blocked
        return False
