"""The C library's allocator, told to keep what it gets back.

PyTorch frees and allocates every intermediate tensor. By default glibc returns pieces of more than
128 KB to the kernel, which zeroes them again page by page: up to a fifth of a round's time. What is
kept is used again by the next step.
"""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
KEPT_BYTES = 1 << 30
LARGEST_KEPT = 64 << 20
"""Larger pieces, such as the states of all clients, are still returned when they are freed."""


def keep_freed_memory() -> bool:
    """For the whole process; False where the C library has no such setting. No number changes."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    kept: bool = mallopt(MMAP_THRESHOLD, LARGEST_KEPT) and mallopt(TRIM_THRESHOLD, KEPT_BYTES)
    return bool(kept)
