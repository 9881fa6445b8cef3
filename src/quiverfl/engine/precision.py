"""How exactly products are computed: [run] precision.

float32  plain, and made so: cuDNN's own default rounds inputs of convolutions to ten bits (TF32)
tf32     those ten bits for products and convolutions on an NVIDIA GPU; sums stay float32
bf16     autocast: the model's products in bfloat16; parameters, gradients and mixing stay float32
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quiverfl.engine.programs import Executor, Gradient, Losses, Program
from quiverfl.engine.settings import Precision
from quiverfl.methods.contract import Part
from quiverfl.task import Point, Seen
from quiverfl.trees import Tree, mapped


@contextlib.contextmanager
def computing(precision: Precision, device: torch.device) -> Iterator[None]:
    """Set the GPU's products to what the run says, and put back what was set before."""
    if device.type != "cuda":
        yield
        return
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


@dataclass(frozen=True)
class Autocast:
    """An executor whose models compute in bfloat16; what it gives back is as precise as ever."""

    inner: Executor
    device: str

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def chunk(self) -> int:
        return self.inner.chunk

    @property
    def evaluated(self) -> int:
        return self.inner.evaluated

    @property
    def image_format(self) -> torch.memory_format:
        return self.inner.image_format

    def see(self, program: Program, point: Point, x: Tree, features: bool = False) -> Seen:
        with self._autocast():
            seen = self.inner.see(program, point, x, features)

        def precise(leaf: Tensor) -> Tensor:
            return leaf.to(point.shared.dtype) if leaf.is_floating_point() else leaf

        return Seen(*(mapped(precise, part) for part in seen))

    def bind(
        self,
        program: Program,
        point: Point,
        part: Part,
        losses: Losses | None = None,
        features: bool = False,
        training: bool = True,
    ) -> Gradient:
        gradient = self.inner.bind(program, point, part, losses, features, training)

        def cast(*arguments: Any) -> Tensor:
            with self._autocast():
                return gradient(*arguments)

        return cast

    def _autocast(self) -> torch.autocast:
        # Without its cache of cast weights: they change in place between two calls.
        return torch.autocast(self.device, dtype=torch.bfloat16, cache_enabled=False)
