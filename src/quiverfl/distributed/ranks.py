"""The ranks of a run: how they find each other, and what they tell each other.

Every call that waits for another rank ends by a time limit, and ends at once where the other one
has died: both are one sentence. What one rank cannot do, all of them learn (`together`), so that
none waits for a message that will not come.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from quiverfl.distributed.rank_environment import (
    STORE,
    TIED,
    TIMEOUT,
    attempt,
    own_rank,
    patience,
    world_size,
)
from quiverfl.errors import Diverged, QuiverError

Found = TypeVar("Found")


class RankFailed(QuiverError):
    """Another rank could not continue; it has said why, or rank 0 says it here."""


@dataclass(frozen=True)
class Ranks:
    """The process group, as one rank sees it."""

    rank: int
    size: int

    @classmethod
    @contextmanager
    def joined(cls, device: torch.device | str = "cpu") -> Iterator[Ranks]:
        """All ranks have met; left again at the end."""
        _join(torch.device(device))
        try:
            yield cls(dist.get_rank(), dist.get_world_size())
        finally:
            dist.destroy_process_group()

    def together(self, work: Callable[[], Found]) -> Found:
        """Do something on every rank; if it fails on one of them, it fails on all.

        Of several failures the first rank's counts, of divergences the first client's.
        """
        found: list[Found] = []
        problem: Exception | None = None
        try:
            found.append(work())
        except Exception as error:
            problem = error
        if not self.any(problem is not None):
            return found[0]
        told = self.objects(_words(problem))
        failures = [_error(rank, words) for rank, words in enumerate(told) if words is not None]
        diverged = [error for error in failures if isinstance(error, Diverged)]
        first = min(diverged, key=lambda e: e.client) if diverged else failures[0]
        if problem is not None and not isinstance(problem, QuiverError):
            raise problem  # its own traceback says more
        raise first from problem

    def any(self, flag: bool) -> bool:
        """Whether it is true on some rank."""
        total = torch.tensor([int(flag)])
        with telling():
            dist.all_reduce(total)
        return bool(total.item())

    def objects(self, own: Any) -> list[Any]:
        """Everybody's, in the order of ranks."""
        found: list[Any] = [None] * self.size
        with telling():
            dist.all_gather_object(found, own)
        return found

    def from_first(self, own: Any) -> Any:
        """Rank 0's, whatever the others give."""
        holder = [own]
        with telling():
            dist.broadcast_object_list(holder, src=0)
        return holder[0]

    def rows(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """Everybody's rows below each other; rank r has counts[r] of them."""
        widest = max(counts)
        padded = own.new_zeros((widest, *own.shape[1:]))
        padded[: len(own)] = own
        found = [torch.empty_like(padded) for _ in range(self.size)]
        with telling():
            dist.all_gather(found, padded)
        parts = [part[:count] for part, count in zip(found, counts, strict=True)]
        return torch.cat(parts)

    def total(self, own: Tensor) -> Tensor:
        """The sum of everybody's."""
        with telling():
            dist.all_reduce(own)
        return own

    def send(self, tensor: Tensor, to: int) -> None:
        with telling():
            dist.send(tensor, to)

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        with telling():
            dist.recv(tensor, source)
        return tensor

    def deal(
        self, into: Tensor, own: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Dealing:
        """Begin to send each rank its numbers and to take everybody's, end to end."""
        with telling():
            work = dist.all_to_all_single(into, own, list(received), list(sent), async_op=True)
        return Dealing(work, own)


@dataclass(frozen=True, eq=False)
class Dealing:
    """Numbers on their way; `own` must stay as it is until they have arrived."""

    work: Any
    own: Tensor

    def wait(self) -> None:
        with telling():
            self.work.wait()


@contextmanager
def telling() -> Iterator[None]:
    """What torch.distributed raises when a rank is gone or late, as a sentence."""
    try:
        yield
    except RuntimeError as error:  # torch's own errors of communication are such
        raise RankFailed(
            f"rank {own_rank()} lost another rank: {_reason(str(error))}. What was recorded up to "
            "the last checkpoint is kept: `quiver resume` continues from there."
        ) from error


def _reason(text: str) -> str:
    """In a word, where the words of the library below are known."""
    if "imed out" in text or "imeout" in text:
        return f"it did not answer within {patience():g} s (${TIMEOUT} sets them)"
    if "onnection" in text:
        return "it has ended"
    return (text.strip().splitlines() or ["no reason given"])[0]


def _join(device: torch.device) -> None:
    """NCCL for what lies on GPUs; gloo for the rest, and for everything told between rounds."""
    limit = timedelta(seconds=patience())
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    place = os.environ.get(STORE)
    if TIED in os.environ:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    where = place or f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        if place is not None:
            url = f"file://{place}"
            found = rendezvous(url, own_rank(), world_size(), timeout=limit)
        else:
            found = rendezvous("env://", timeout=limit)
        store, rank, size = next(iter(found))
        # torchrun's store outlives a restart: a new attempt must not meet the addresses of the old.
        store = PrefixStore(f"quiver-{attempt()}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except (RuntimeError, ValueError, OSError) as error:
        words = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = "start all ranks with the same address and number of ranks"
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            remedy = "the port is in use: choose another MASTER_PORT (torchrun --master-port)"
        raise QuiverError(
            f"rank {own_rank()} of {world_size()} did not meet the others at {where} within "
            f"{limit.total_seconds():g} s: {remedy}. ({words})"
        ) from error


def _end_with_parent() -> None:
    """Whoever started this rank holds the other end of its standard input."""
    while os.read(0, 1):
        pass
    os._exit(1)


def _words(problem: Exception | None) -> tuple[Any, ...] | None:
    """A failure as other ranks can be told it: errors themselves may hold anything."""
    if isinstance(problem, Diverged):
        return problem.round, problem.client, problem.where
    if problem is None:
        return None
    if isinstance(problem, QuiverError):
        return (str(problem),)
    return (f"{type(problem).__name__}: {problem}",)


def _error(rank: int, words: tuple[Any, ...]) -> QuiverError:
    if len(words) > 1:
        return Diverged(*words)
    return RankFailed(words[0] if rank == 0 else f"rank {rank}: {words[0]}")
