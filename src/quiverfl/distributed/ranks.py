"""The process group: how ranks find each other, place clients and exchange what they know.

Every call that waits for another rank ends at a time limit, and at once where that rank has died.
What one rank cannot do, all of them learn (`together`), so that none waits for a message that will
not come.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from quiverfl.distributed.processes import (
    STORE,
    TIED,
    TIMEOUT,
    own_rank,
    read_timeout,
    restart_count,
    world_size,
)
from quiverfl.errors import Diverged, QuiverError
from quiverfl.types import Floats, Integers

EVERY_CLIENT = 0.2
"""Cost of a client apart from its examples (memory, mixing), as a fraction of the mean work."""


@dataclass(frozen=True, eq=False)
class Placement:
    """Which client is on which rank: rank r has clients cuts[r] … cuts[r + 1] - 1, at least one.

    Rows gathered rank after rank are in client order, so sums keep their order.
    """

    cuts: Integers

    @classmethod
    def balance(cls, work: Integers | Floats, ranks: int) -> Placement:
        """Split where the cumulative work is nearest to each rank's even part."""
        clients = len(work)
        if ranks > clients:
            raise QuiverError(
                f"{ranks} ranks for {clients} clients: a rank holds at least one client. Start at "
                f"most {clients} ranks."
            )
        costs = np.asarray(work, dtype=np.float64)
        costs = costs + EVERY_CLIENT * max(float(costs.mean()), 1e-9)
        done = np.concatenate([[0.0], np.cumsum(costs)])
        cuts = [0]
        for rank in range(1, ranks):
            wanted = done[-1] * rank / ranks
            nearest = int(np.abs(done - wanted).argmin())
            cuts.append(min(max(nearest, cuts[-1] + 1), clients - (ranks - rank)))
        return cls(np.array([*cuts, clients], dtype=np.int64))

    @property
    def ranks(self) -> int:
        return len(self.cuts) - 1

    @property
    def clients(self) -> int:
        return int(self.cuts[-1])

    @property
    def counts(self) -> list[int]:
        """How many clients each rank has."""
        return [int(count) for count in np.diff(self.cuts)]

    def clients_of(self, rank: int) -> Integers:
        """The clients of one rank."""
        return np.arange(self.cuts[rank], self.cuts[rank + 1])

    def count_per_rank(self, clients: Integers) -> list[int]:
        """How many of these clients each rank has."""
        ends = np.searchsorted(np.sort(clients), self.cuts)
        return [int(count) for count in np.diff(ends)]


Result = TypeVar("Result")


class RankFailed(QuiverError):
    """Another rank could not continue. It reports why itself, or rank 0 does here."""


@dataclass(frozen=True)
class Ranks:
    """The process group of torch.distributed, as one rank sees it."""

    rank: int
    size: int

    @classmethod
    @contextmanager
    def join(cls, device: torch.device | str = "cpu") -> Iterator[Ranks]:
        """Meet the other ranks; leave them at the end."""
        _join_group(torch.device(device))
        try:
            yield cls(dist.get_rank(), dist.get_world_size())
        finally:
            dist.destroy_process_group()

    def run_on_all(self, work: Callable[[], Result]) -> Result:
        """Do the work on every rank; if it fails on one of them, it fails on all.

        Of several failures the first rank's is raised, of divergences the first client's.
        """
        results: list[Result] = []
        problem: Exception | None = None
        try:
            results.append(work())
        except Exception as error:
            problem = error
        if not self.any(problem is not None):
            return results[0]
        problems = self.objects(_describe(problem))
        failures = [_rebuild(rank, parts) for rank, parts in enumerate(problems) if parts]
        diverged = [error for error in failures if isinstance(error, Diverged)]
        first = min(diverged, key=lambda e: e.client) if diverged else failures[0]
        if problem is not None and not isinstance(problem, QuiverError):
            raise problem  # with its own traceback
        raise first from problem

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank."""
        total = torch.tensor([int(flag)])
        with translate_errors():
            dist.all_reduce(total)
        return bool(total.item())

    def objects(self, own: Any) -> list[Any]:
        """The objects of all ranks, in their order."""
        every: list[Any] = [None] * self.size
        with translate_errors():
            dist.all_gather_object(every, own)
        return every

    def from_first(self, own: Any) -> Any:
        """The object of rank 0, whatever the others give."""
        holder = [own]
        with translate_errors():
            dist.broadcast_object_list(holder, src=0)
        return holder[0]

    def rows(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all ranks below each other; rank r has counts[r] of them."""
        widest = max(counts)
        padded = own.new_zeros((widest, *own.shape[1:]))
        padded[: len(own)] = own
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        with translate_errors():
            dist.all_gather(gathered, padded)
        parts = [part[:count] for part, count in zip(gathered, counts, strict=True)]
        return torch.cat(parts)

    def total(self, own: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        with translate_errors():
            dist.all_reduce(own)
        return own

    def send(self, tensor: Tensor, to: int) -> None:
        with translate_errors():
            dist.send(tensor, to)

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        with translate_errors():
            dist.recv(tensor, source)
        return tensor

    def all_to_all(
        self, into: Tensor, own: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Transfer:
        """Begin to send each rank its numbers, and to receive those of all ranks in their order."""
        with translate_errors():
            work = dist.all_to_all_single(into, own, list(received), list(sent), async_op=True)
        return Transfer(work, own)


@dataclass(frozen=True, eq=False)
class Transfer:
    """Numbers in flight. `own` must not change until they have arrived."""

    work: Any
    own: Tensor

    def wait(self) -> None:
        with translate_errors():
            self.work.wait()


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turn what torch.distributed raises when a rank is gone or late into a sentence."""
    try:
        yield
    except RuntimeError as error:  # the type of torch's communication errors
        raise RankFailed(
            f"rank {own_rank()} lost another rank: {_find_reason(str(error))}. What was recorded "
            "up to the last checkpoint is kept: `quiver resume` continues from there."
        ) from error


def _find_reason(text: str) -> str:
    """Why communication failed, as far as the message of the library is known."""
    if "imed out" in text or "imeout" in text:
        return f"it did not answer within {read_timeout():g} s (${TIMEOUT} sets them)"
    if "onnection" in text:
        return "it has ended"
    return (text.strip().splitlines() or ["no reason given"])[0]


def _join_group(device: torch.device) -> None:
    """Join by NCCL for tensors on GPUs, and gloo for others and for objects."""
    limit = timedelta(seconds=read_timeout())
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    file = os.environ.get(STORE)
    if TIED in os.environ:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    where = file or f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        if file is not None:
            url = f"file://{file}"
            meeting = rendezvous(url, own_rank(), world_size(), timeout=limit)
        else:
            meeting = rendezvous("env://", timeout=limit)
        store, rank, size = next(iter(meeting))
        # torchrun's store outlives a restart: a new attempt must not meet the addresses of the old.
        store = PrefixStore(f"quiver-{restart_count()}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except (RuntimeError, ValueError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = "start all ranks with the same address and number of ranks"
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            remedy = "the port is in use: choose another MASTER_PORT (torchrun --master-port)"
        raise QuiverError(
            f"rank {own_rank()} of {world_size()} did not meet the others at {where} within "
            f"{limit.total_seconds():g} s: {remedy}. ({reason})"
        ) from error


def _end_with_parent() -> None:
    """Wait for the end of standard input, which the process that started this rank holds."""
    while os.read(0, 1):
        pass
    os._exit(1)


def _describe(problem: Exception | None) -> tuple[Any, ...] | None:
    """A failure in values that can be sent; errors themselves may hold anything."""
    if isinstance(problem, Diverged):
        return problem.round, problem.client, problem.where
    if problem is None:
        return None
    if isinstance(problem, QuiverError):
        return (str(problem),)
    return (f"{type(problem).__name__}: {problem}",)


def _rebuild(rank: int, parts: tuple[Any, ...]) -> QuiverError:
    """The failure of a rank from its description."""
    if len(parts) > 1:
        return Diverged(*parts)
    return RankFailed(parts[0] if rank == 0 else f"rank {rank}: {parts[0]}")
