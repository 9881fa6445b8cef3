"""The examples of a shard's clients, gathered into batches of stacked clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quiverfl.data.augmentation import CropFlip
from quiverfl.data.batches import BatchPlan
from quiverfl.data.examples import ClientExamples
from quiverfl.data.federated import FederatedData
from quiverfl.engine.local.byte_images import ByteImages
from quiverfl.seeds import Hashes
from quiverfl.support.environment import forget_pages
from quiverfl.transforms.noise import Noise
from quiverfl.trees import Tree, tree_map
from quiverfl.types import Flags, Integers

READ = 64 << 20
"""Bytes of a file that may be in memory before its pages are forgotten."""
AROUND = 2 << 20
"""Bytes that the system may load around a byte that is read: a large page."""


class Batch(NamedTuple):
    """The batch of one step: samples of the first `clients` clients of a group."""

    clients: int
    inputs: Tree
    """[clients, samples, …], as the targets are."""
    targets: Tree
    weights: Tensor | None = None
    """1 for samples and 0 for padding, [clients, samples]; None where nothing is padded."""
    keys: Tensor | None = None
    """Keys of the random numbers of each client's model, [clients]; None if it draws none."""
    noise: Noise | None = None
    """What makes the gradient private, if it is."""
    second_half: Batch | None = None
    """The other samples, where a phase looks ahead on one half and steps on the other."""

    def repeat_for_step(self, repeat: int, first_noise: int = 0) -> Batch:
        """The same samples for another step: dropout and noise draw new numbers."""
        keys = None if self.keys is None else self.keys + repeat
        noise = None if self.noise is None else self.noise.with_count(first_noise + repeat)
        rest = self.second_half
        # Both gradients of a lookahead are of one function: the same numbers are drawn.
        rest = None if rest is None else rest._replace(keys=keys, noise=noise)
        return self._replace(keys=keys, noise=noise, second_half=rest)


class Examples:
    """One split. Floats are cast once if nothing prepares them, else when they are gathered.

    Inputs that stay on disk are read when they are gathered, and only then cast.
    """

    def __init__(
        self,
        split: ClientExamples,
        data: FederatedData | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Without `data` the inputs are ready as they are: nothing prepares or augments them."""
        self._prepare = None if data is None else data.prepare
        self._augment = None if data is None else data.augment

        def cast(tensor: Tensor, prepared: bool = True) -> Tensor:
            whole = tensor.is_floating_point() and prepared
            return tensor.to(device=device, dtype=dtype if whole else None)

        if data is not None:
            x = split.x
            if split.rows is None:
                x = tree_map(lambda leaf: cast(leaf, self._prepare is None), x)
            split = replace(split, x=x, y=tree_map(cast, split.y))
        self._split = split
        self._dtype, self._device, self._data = dtype, device, data
        self._images: ByteImages | None = None
        self._format = torch.contiguous_format
        self._read = 0
        self.sizes: Integers = np.diff(split.offsets)
        self.augmented = self._augment is not None

    def laid_out(self, image_format: torch.memory_format, as_bytes: bool = False) -> Examples:
        """The same, which hands images over in this format; numbers do not depend on it.

        `as_bytes`: they stay bytes where they can; the model must then be given `byte_factors`.
        """
        self._format = image_format
        if self._split.rows is None:
            self._images = self._as_images(self._split.x, as_bytes)
        return self

    def _as_images(self, x: Tree, as_bytes: bool = False) -> ByteImages | None:
        if self._data is None or not isinstance(x, Tensor):
            return None
        return ByteImages.of(x, self._data, self._dtype, self._format, as_bytes)

    @property
    def byte_factors(self) -> tuple[Tensor, Tensor] | None:
        """Factor and offset with which a model normalises bytes, for each pixel of a line."""
        images = self._images
        return images.factors if images is not None and images.as_bytes else None

    def batches(
        self,
        rows: Integers,
        plan: BatchPlan,
        hashes: Hashes | None = None,
        keys: Tensor | None = None,
        noise: Callable[[int, int], Noise | None] | None = None,
    ) -> Iterator[Batch]:
        """The batches of a phase, step by step, of the clients that still have some.

        `rows` are the clients, as the plan orders them. `hashes` [clients, steps, samples] are what
        augmentation draws from and `keys` [clients, steps] what models do. All that a phase needs
        is moved to the device before its first step: a step would wait for it.
        """
        indices = self._split.offsets[rows][:, None, None] + plan.samples
        (places,) = self._move(torch.from_numpy(indices))
        weighted, padded, shapes = None, plan.has_padding, plan.shapes
        if padded.any():
            inside = np.arange(plan.samples.shape[2]) < plan.counts[:, :, None]
            (weighted,) = self._move(torch.from_numpy(inside))
        if keys is not None:
            (keys,) = self._move(keys)
        crops = self._draw_crops(hashes)

        def load_batches() -> Iterator[Batch]:
            for step, (clients, width) in enumerate(shapes):
                batch_index = (slice(clients), step, slice(width))
                x, y = self._take(
                    places[batch_index],
                    indices[batch_index],
                    None if hashes is None else hashes[batch_index],
                    tuple(crop[batch_index].reshape(-1) for crop in crops),
                )
                weights = None
                if weighted is not None and padded[step]:
                    weights = weighted[batch_index].to(self._dtype)
                key = None if keys is None else keys[:clients, step]
                drawn = None if noise is None else noise(clients, step)
                yield Batch(clients, x, y, weights, key, drawn)

        return load_batches()

    def gather(
        self, rows: Integers, samples: Integers, hashes: Hashes | None = None
    ) -> tuple[Tree, Tree]:
        """Inputs and targets [k, n, …] of the samples [k, n] of the clients in these rows."""
        indices = self._split.offsets[rows][:, None] + samples
        (places,) = self._move(torch.from_numpy(indices))
        crops = tuple(crop.reshape(-1) for crop in self._draw_crops(hashes))
        return self._take(places, indices, hashes, crops)

    def _draw_crops(self, hashes: Hashes | None) -> list[Tensor]:
        """The draws of CropFlip, on the device; none where images are cropped on the CPU."""
        on_disk = self._split.rows is not None
        if hashes is None or on_disk or self._images is not None:
            return []
        if type(self._augment) is not CropFlip:
            return []
        draws = self._augment.draw_offsets(hashes.ravel())
        return self._move(*(torch.from_numpy(draw).view(hashes.shape) for draw in draws))

    def _move(self, *tensors: Tensor) -> list[Tensor]:
        return [tensor.to(self._device) for tensor in tensors]

    def _take(
        self,
        places: Tensor,
        indices: Integers,
        hashes: Hashes | None,
        crops: tuple[Tensor, ...],
    ) -> tuple[Tree, Tree]:
        """Inputs and targets [k, n, …] of these places of the split, which are on the device."""
        split, flat, shape = self._split, places.reshape(-1), places.shape
        plain = self._prepare is None and self._augment is None
        if plain and isinstance(split.x, Tensor) and split.rows is None:
            x = split.x.index_select(0, flat)
            x = x.to(self._dtype) if x.is_floating_point() else x
            x = x.view(*shape, *x.shape[1:])
        elif self._images is not None:
            x = self._images.take(places, hashes)
        else:
            if split.rows is not None:
                x = self._read_inputs(split.rows[indices.ravel()], hashes)
            else:
                x = tree_map(lambda leaf: leaf.index_select(0, flat), split.x)
                x = self._make_ready(x, hashes, crops)
            x = tree_map(lambda leaf: leaf.view(*shape, *leaf.shape[1:]), x)
        if isinstance(split.y, Tensor):
            return x, split.y.index_select(0, flat).view(*shape, *split.y.shape[1:])
        y = tree_map(lambda leaf: leaf.index_select(0, flat), split.y)
        return x, tree_map(lambda leaf: leaf.view(*shape, *leaf.shape[1:]), y)

    def _read_inputs(self, places: Integers, hashes: Hashes | None) -> Tree:
        """Inputs that stay on disk."""
        index = torch.from_numpy(places)
        raw = tree_map(lambda leaf: self._read_rows(leaf, index), self._split.x)
        images = self._as_images(raw)
        if images is not None:
            return images.take(torch.arange(len(places))[None], hashes)[0]
        return self._make_ready(tree_map(lambda leaf: leaf.to(self._device), raw), hashes, ())

    def _read_rows(self, leaf: Tensor, index: Tensor) -> Tensor:
        """Rows of what may lie in a file, whose pages are forgotten every now and then."""
        if not self._split.files or leaf.nbytes <= READ:
            return leaf.index_select(0, index)
        rows = leaf.new_empty(len(index), *leaf.shape[1:])
        step = max(1, READ // (leaf[0].nbytes + AROUND))
        for start in range(0, len(index), step):
            chunk = slice(start, start + step)
            torch.index_select(leaf, 0, index[chunk], out=rows[chunk])
            self._read += len(index[chunk])
            if self._read >= step:
                self._read = 0
                for file in self._split.files:
                    forget_pages(file)
        return rows

    def _make_ready(self, x: Tree, hashes: Hashes | None, crops: tuple[Tensor, ...]) -> Tree:
        """Prepare, cast and augment inputs."""
        if self._prepare is not None:
            x = self._prepare(x)
        x = tree_map(lambda leaf: leaf.to(self._dtype) if leaf.is_floating_point() else leaf, x)
        if type(self._augment) is CropFlip and crops:
            return self._augment.crop(x, *crops)
        if self._augment is not None and hashes is not None:
            return self._augment(x, hashes.ravel())
        return x


def pair_halves(first: Iterator[Batch], second: Iterator[Batch]) -> Iterator[Batch]:
    """Batches with the other halves of their samples."""
    for one, other in zip(first, second, strict=True):
        yield one._replace(second_half=other)


def mark_padding(counts: Integers, group_counts: Integers) -> Flags | None:
    """Mask of real samples, as wide as the group's largest client; None if there is no padding."""
    width = int(group_counts.max())
    if len(group_counts) == 1 or (group_counts == width).all():
        return None
    marks: Flags = np.arange(width) < counts[:, None]
    return marks


def padding_weights(counts: Integers, group_counts: Integers, like: Tensor) -> Tensor | None:
    """1 for samples, 0 for padding; None if there is no padding."""
    marks = mark_padding(counts, group_counts)
    return None if marks is None else torch.from_numpy(marks).to(like)
