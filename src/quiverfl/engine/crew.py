"""Threads that compute side by side: clients, or columns of all clients.

A convolution on a small batch leaves most of two or more threads waiting for each other; two
clients with one thread each do not wait, and find their own numbers in their own cache. PyTorch
leaves Python's lock while it computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Item = TypeVar("Item")

MOST = 8
"""Workers, at most: each keeps the activations of a batch. Further threads are shared out."""


class Halted(Exception):
    """This client's work was broken off because the round was."""


class Crew:
    """As many workers as are wanted and as there are threads for; torch's threads are divided.

    A crew of one is the calling thread.
    """

    def __init__(self, wanted: int = MOST) -> None:
        threads = torch.get_num_threads()
        each = -(-threads // MOST)
        self.workers = max(1, min(wanted, threads // each))
        self._halt = threading.Event()
        self._pool = _pool(self.workers, threads) if self.workers > 1 else None

    def each(self, work: Callable[[Item], None], items: Iterable[Item]) -> None:
        """Do the work for every item. If it fails, the error is that of the first item to fail."""
        if self._pool is None:
            for item in items:
                work(item)
            return
        futures = [self._pool.submit(work, item) for item in items]
        try:
            for future in futures:
                future.result()
        except BaseException:  # Ctrl-C is one: nobody shall wait for a long client to finish
            self._halt.set()
            for future in futures:
                future.cancel()
            wait(futures)
            self._halt.clear()
            raise

    def check(self) -> None:
        """Called between the steps of long work: ends it if the round has been broken off."""
        if self._halt.is_set():
            raise Halted


def _pool(workers: int, threads: int) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(workers, thread_name_prefix="client")
    all_here = threading.Barrier(workers)

    def arrive(_: int) -> None:
        torch.get_num_threads()  # a thread's first look takes the default, whatever was set before
        torch.set_num_threads(threads // workers)
        all_here.wait()

    list(pool.map(arrive, range(workers)))
    # A thread's number is its own, but setting it also sets what later threads start with.
    torch.set_num_threads(threads)
    return pool
