"""A checkpoint of many ranks is the file that one process would write.

Rank 0 writes it, a piece at a time as the others send them, so that no rank ever holds the states
of all clients and only rank 0 needs the folder. Any number of ranks can read it: rank 0 checks the
file and sends every rank the rows of its clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quiverfl.distributed.placement import Placement
from quiverfl.distributed.ranks import Ranks
from quiverfl.durable import replace, replacing
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.history import History
from quiverfl.engine.tensors import PIECE, Piece, Shape, Shapes, file_order, pieces_of, write_pieces


@dataclass(frozen=True, eq=False)
class GatheredCheckpoints:
    """Checkpoints of this rank's clients, put together and taken apart."""

    ranks: Ranks
    placement: Placement

    def save(self, own: Checkpoint, folder: Path | None) -> Path | None:
        """Write everybody's as one; `folder` is rank 0's, the path of the JSON file its result."""
        tensors = {self._renamed(name, 1): leaf for name, leaf in own.tensors.items()}
        metrics = {self._first + row: found for row, found in own.local_metrics.items()}
        told = self.ranks.objects((_shapes(tensors), metrics))
        shapes = self._whole([shapes for shapes, _ in told])
        if folder is None:
            for name in file_order(shapes):
                if self._owner(name) in (None, self.ranks.rank):
                    for piece in self._pieces(shapes[name], tensors.get(name)):
                        self.ranks.send(torch.frombuffer(piece, dtype=torch.uint8), 0)
            return None
        path = folder / f"round-{own.round:06d}.json"
        streams = {n: self._collected(n, shapes[n], tensors.get(n)) for n in shapes}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(path.with_suffix(".safetensors")) as draft:
                digest = write_pieces(shapes, streams.__getitem__, draft)
        except OSError:
            for name in file_order(shapes):  # the others are sending anyway
                for _ in streams[name]:
                    pass
            raise
        every = {client: found for _, metrics in told for client, found in metrics.items()}
        replace(path, own.described(digest, every))
        return path

    def _whole(self, told: list[Shapes]) -> Shapes:
        """The shapes of everybody's tensors together."""
        shapes: dict[str, Shape] = {}
        for theirs in told:
            for name, (dtype, shape) in theirs.items():
                rows = shape if _is_one(name) else (self.placement.clients, *shape[1:])
                shapes[name] = (dtype, rows)
        return shapes

    def _collected(self, name: str, shape: Shape, own: Tensor | None) -> Iterator[Piece]:
        """The bytes of one tensor of all clients, in their order, on rank 0."""
        owner = self._owner(name)
        for rank in range(self.ranks.size) if owner is None else [owner]:
            if rank == 0:
                yield from self._pieces(shape, own)
            else:
                count = None if owner is not None else self.placement.counts[rank]
                yield from self._received(shape, count, rank)

    def _pieces(self, shape: Shape, own: Tensor | None) -> Iterator[memoryview]:
        """What a rank has not yet made, such as an optimizer's buffers, is zero."""
        if own is None:
            own = torch.zeros((self.placement.counts[self.ranks.rank], *shape[1][1:])).to(shape[0])
        yield from pieces_of(own)

    def _received(self, shape: Shape, count: int | None, rank: int) -> Iterator[memoryview]:
        dtype, sizes = shape
        rows = sizes if count is None else (count, *sizes[1:])
        left = torch.Size(rows).numel() * dtype.itemsize
        most = PIECE // dtype.itemsize * dtype.itemsize
        while left:
            piece = torch.empty(min(left, most), dtype=torch.uint8)
            yield self.ranks.receive(piece, rank).numpy().data
            left -= len(piece)

    def share(self, whole: Checkpoint | None) -> Checkpoint:
        """This rank's part of the one that rank 0 has read and verified; its history is empty on
        other ranks."""
        told = whole and (whole.round, _shapes(whole.tensors), whole.local_metrics)
        round, shapes, metrics = self.ranks.from_first(told)
        tensors: dict[str, Tensor] = {}
        for name in file_order(shapes):
            part = self._sent(name, whole.tensors[name]) if whole else self._taken(name, shapes)
            if part is not None:
                tensors[self._renamed(name, -1)] = part
        here = self.placement.on(self.ranks.rank)
        own = {client - self._first: found for client, found in metrics.items() if client in here}
        return Checkpoint(round, tensors, own, History() if whole is None else whole.history)

    def _sent(self, name: str, whole: Tensor) -> Tensor | None:
        """Every other rank's part of a tensor sent to it; rank 0's own."""
        owner = self._owner(name)
        for rank in range(1, self.ranks.size) if owner is None else {owner} - {0}:
            for piece in pieces_of(self._part(whole, owner, rank)):
                self.ranks.send(torch.frombuffer(piece, dtype=torch.uint8), rank)
        return self._part(whole, owner, 0) if owner in (None, 0) else None

    def _taken(self, name: str, shapes: Shapes) -> Tensor | None:
        owner, (dtype, shape) = self._owner(name), shapes[name]
        if owner not in (None, self.ranks.rank):
            return None
        count = None if owner is not None else self.placement.counts[self.ranks.rank]
        part = torch.empty(shape if count is None else (count, *shape[1:]), dtype=dtype)
        into = part.view(-1).view(torch.uint8)
        begin = 0
        for piece in self._received((dtype, shape), count, 0):
            into[begin : begin + len(piece)] = torch.frombuffer(piece, dtype=torch.uint8)
            begin += len(piece)
        return part

    def _part(self, whole: Tensor, owner: int | None, rank: int) -> Tensor:
        begin, end = (int(place) for place in self.placement.cuts[rank : rank + 2])
        return whole[begin:end] if owner is None else whole

    def _owner(self, name: str) -> int | None:
        """The rank of the one client whose tensor it is; None where it has a row for everybody."""
        if not _is_one(name):
            return None
        client = int(name.split("/")[1])
        return int(np.searchsorted(self.placement.cuts, client, side="right")) - 1

    @property
    def _first(self) -> int:
        return int(self.placement.cuts[self.ranks.rank])

    def _renamed(self, name: str, direction: int) -> str:
        """Kept models are named by row here and by client in the file."""
        if not _is_one(name):
            return name
        kind, row, part = name.split("/")
        return f"{kind}/{int(row) + direction * self._first}/{part}"


def _is_one(name: str) -> bool:
    """Whether a tensor is one client's own, not a stack of everybody's."""
    return name.startswith("local/")


def _shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in tensors.items()}
