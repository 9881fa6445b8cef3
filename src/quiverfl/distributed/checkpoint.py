"""Checkpoints of many ranks: the file that one process would write.

Rank 0 writes pieces as the others send them. So no rank ever holds the states of all clients, and
only rank 0 needs the folder. Any number of ranks can read the file: rank 0 verifies it and sends
every rank the rows of its clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quiverfl.distributed.ranks import Placement, Ranks
from quiverfl.engine.checkpoint import (
    PIECE,
    Checkpoint,
    Piece,
    Shape,
    Shapes,
    file_order,
    iterate_bytes,
    write_pieces,
)
from quiverfl.engine.history import History
from quiverfl.support.durable import open_replacement, replace_file


@dataclass(frozen=True, eq=False)
class GatheredCheckpoints:
    """Joins the checkpoints of all ranks into one, and splits one between ranks."""

    ranks: Ranks
    placement: Placement

    def save(self, own: Checkpoint, folder: Path | None) -> Path | None:
        """Write one checkpoint of all clients into rank 0's folder. Rank 0 gets the file's path."""
        tensors = {self._rename(name, 1): leaf for name, leaf in own.tensors.items()}
        metrics = {self._first + row: values for row, values in own.local_metrics.items()}
        parts = self.ranks.objects((_shapes(tensors), metrics))
        shapes = self._join_shapes([shapes for shapes, _ in parts])
        if folder is None:
            for name in file_order(shapes):
                if self._owner(name) in (None, self.ranks.rank):
                    for piece in self._iterate_own(shapes[name], tensors.get(name)):
                        self.ranks.send(torch.frombuffer(piece, dtype=torch.uint8), 0)
            return None
        path = folder / f"round-{own.round:06d}.json"
        streams = {n: self._iterate_tensor(n, shapes[n], tensors.get(n)) for n in shapes}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open_replacement(path.with_suffix(".safetensors")) as draft:
                digest = write_pieces(shapes, streams.__getitem__, draft)
        except OSError:
            for name in file_order(shapes):  # the other ranks send all the same
                for _ in streams[name]:
                    pass
            raise
        every = {client: values for _, own in parts for client, values in own.items()}
        replace_file(path, own.describe(digest, every))
        return path

    def _join_shapes(self, parts: list[Shapes]) -> Shapes:
        """The shapes of the tensors of all clients."""
        shapes: dict[str, Shape] = {}
        for part in parts:
            for name, (dtype, shape) in part.items():
                rows = shape if _is_of_one_client(name) else (self.placement.clients, *shape[1:])
                shapes[name] = (dtype, rows)
        return shapes

    def _iterate_tensor(self, name: str, shape: Shape, own: Tensor | None) -> Iterator[Piece]:
        """The bytes of one tensor of all clients, in their order; on rank 0."""
        owner = self._owner(name)
        for rank in range(self.ranks.size) if owner is None else [owner]:
            if rank == 0:
                yield from self._iterate_own(shape, own)
            else:
                count = None if owner is not None else self.placement.counts[rank]
                yield from self._receive_pieces(shape, count, rank)

    def _iterate_own(self, shape: Shape, own: Tensor | None) -> Iterator[memoryview]:
        """This rank's bytes of a tensor. One that it has not made, such as a buffer, is zero."""
        if own is None:
            own = torch.zeros((self.placement.counts[self.ranks.rank], *shape[1][1:])).to(shape[0])
        yield from iterate_bytes(own)

    def _receive_pieces(self, shape: Shape, count: int | None, rank: int) -> Iterator[memoryview]:
        dtype, sizes = shape
        rows = sizes if count is None else (count, *sizes[1:])
        left = torch.Size(rows).numel() * dtype.itemsize
        most = PIECE // dtype.itemsize * dtype.itemsize
        while left:
            piece = torch.empty(min(left, most), dtype=torch.uint8)
            yield self.ranks.receive(piece, rank).numpy().data
            left -= len(piece)

    def scatter(self, checkpoint: Checkpoint | None) -> Checkpoint:
        """This rank's part of a checkpoint that rank 0 has read and verified. Only rank 0 gets the
        history."""
        head = checkpoint and (
            checkpoint.round,
            _shapes(checkpoint.tensors),
            checkpoint.local_metrics,
        )
        round, shapes, metrics = self.ranks.from_first(head)
        tensors: dict[str, Tensor] = {}
        for name in file_order(shapes):
            if checkpoint is None:
                part = self._receive_part(name, shapes)
            else:
                part = self._send_parts(name, checkpoint.tensors[name])
            if part is not None:
                tensors[self._rename(name, -1)] = part
        local = self.placement.clients_of(self.ranks.rank)
        own = {c - self._first: values for c, values in metrics.items() if c in local}
        history = History() if checkpoint is None else checkpoint.history
        return Checkpoint(round, tensors, own, history)

    def _send_parts(self, name: str, leaf: Tensor) -> Tensor | None:
        """Send the other ranks their parts of a tensor. Returns rank 0's own."""
        owner = self._owner(name)
        for rank in range(1, self.ranks.size) if owner is None else {owner} - {0}:
            for piece in iterate_bytes(self._part(leaf, owner, rank)):
                self.ranks.send(torch.frombuffer(piece, dtype=torch.uint8), rank)
        return self._part(leaf, owner, 0) if owner in (None, 0) else None

    def _receive_part(self, name: str, shapes: Shapes) -> Tensor | None:
        owner, (dtype, shape) = self._owner(name), shapes[name]
        if owner not in (None, self.ranks.rank):
            return None
        count = None if owner is not None else self.placement.counts[self.ranks.rank]
        part = torch.empty(shape if count is None else (count, *shape[1:]), dtype=dtype)
        content = part.view(-1).view(torch.uint8)
        begin = 0
        for piece in self._receive_pieces((dtype, shape), count, 0):
            content[begin : begin + len(piece)] = torch.frombuffer(piece, dtype=torch.uint8)
            begin += len(piece)
        return part

    def _part(self, leaf: Tensor, owner: int | None, rank: int) -> Tensor:
        begin, end = self.placement.cuts[rank : rank + 2].tolist()
        return leaf[begin:end] if owner is None else leaf

    def _owner(self, name: str) -> int | None:
        """The rank of the client whose tensor it is; None where it has a row for every client."""
        if not _is_of_one_client(name):
            return None
        client = int(name.split("/")[1])
        return int(np.searchsorted(self.placement.cuts, client, side="right")) - 1

    @property
    def _first(self) -> int:
        return int(self.placement.cuts[self.ranks.rank])

    def _rename(self, name: str, direction: int) -> str:
        """Local models are named by row on a rank and by client in the file."""
        if not _is_of_one_client(name):
            return name
        kind, row, part = name.split("/")
        return f"{kind}/{int(row) + direction * self._first}/{part}"


def _is_of_one_client(name: str) -> bool:
    """Whether it is the tensor of one client and not a stack of all clients' rows."""
    return name.startswith("local/") and name.count("/") == 2


def _shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in tensors.items()}
