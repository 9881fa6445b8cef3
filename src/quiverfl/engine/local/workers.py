"""Work side by side in threads: clients, or columns of all clients.

A convolution on a small batch leaves most of two or more threads waiting for each other; two
clients with one thread each do not wait, and find their own numbers in their own cache. PyTorch
leaves Python's lock while it computes. The threads live as long as the call.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")

MOST = 8
"""Workers, at most: each keeps the activations of a batch. They divide further threads."""


class Halted(Exception):
    """This item's work was broken off because the whole was."""


class _Worker(threading.local):
    index = 0
    """Number of this worker's thread; 0 outside of the workers, when none of them runs."""
    halt: threading.Event | None = None
    """Set when the whole has been broken off: long work then raises Halted between its steps."""


WORKER = _Worker()


def worker_count(wanted: int) -> int:
    """Number of workers: at most `wanted`. They divide torch's threads among themselves."""
    threads = torch.get_num_threads()
    each = -(-threads // MOST)
    return max(1, min(wanted, threads // each))


def parallel_for(work: Callable[[Item], None], items: Iterable[Item], workers: int) -> None:
    """Do the work for every item. If it fails, the error is that of the first item to fail."""
    if workers == 1:
        for item in items:
            work(item)
        return
    threads, halt, places = torch.get_num_threads(), threading.Event(), itertools.count()

    def begin() -> None:
        torch.get_num_threads()  # a thread's first look takes the default, whatever was set before
        torch.set_num_threads(max(1, threads // workers))
        WORKER.index, WORKER.halt = next(places), halt

    def work_unless_halted(item: Item) -> None:
        stop_if_halted()
        work(item)

    with ThreadPoolExecutor(workers, "worker", initializer=begin) as pool:
        waiting: deque[Future[None]] = deque()
        try:
            waiting.extend(pool.submit(work_unless_halted, item) for item in items)
            while waiting:  # no name is kept: an error would hold what its own frame holds
                waiting.popleft().result()
        except BaseException:  # Ctrl-C is one: it should not wait until a long client is finished
            halt.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            waiting.clear()
            # A thread's number is its own, but setting it also sets what later threads start with.
            torch.set_num_threads(threads)


def stop_if_halted() -> None:
    """End this item's work if the whole has been broken off."""
    if WORKER.halt is not None and WORKER.halt.is_set():
        raise Halted
