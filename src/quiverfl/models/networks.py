"""A multilayer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from quiverfl.errors import QuiverError
from quiverfl.models.compiled import (
    KERNEL,
    Factors,
    Kernels,
    can_compute,
    check_kernels,
    features,
    has_hooks,
)
from quiverfl.options import python_number


class MLP(nn.Module):
    """Linear and ReLU for each width in `hidden`, then the classifier; inputs are flattened."""

    def __init__(
        self, input_shape: tuple[int, ...], classes: int, hidden: Sequence[int] = (128, 64)
    ) -> None:
        super().__init__()
        listed = python_number(list(hidden)) if isinstance(hidden, Sequence) else []
        if not listed or not all(isinstance(width, int) and width >= 1 for width in listed):
            raise QuiverError(
                f"model.hidden = {hidden!r}: give a list of at least one width, such as [64, 32], "
                "each 1 or more; without a body there would be nothing to share."
            )
        widths = [math.prod(input_shape), *listed]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x.flatten(1)))
        return logits


# Convolutional networks of two 5×5 convolutions: LeNet-5, FedAvg's CNN and a small one.
#
# Max-pooling comes before ReLU: ReLU is monotone, so the order does not change a bit of the
# result, and it then has a quarter of the work.


LENET_SIDE = 32


class TwoConvolutions(nn.Module):
    """Convolution, pool, ReLU, twice; dense layers; the classifier."""

    _factors: Factors | None = None

    def __init__(
        self,
        input_shape: tuple[int, ...],
        classes: int,
        channels: Sequence[int],
        hidden: Sequence[int],
        paddings: Sequence[int],
        kernels: Kernels = "torch",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.kernels = check_kernels(kernels)
        inputs, height, width = _check_image(input_shape)
        layers: list[nn.Module] = []
        for outputs, padding in zip(channels, paddings, strict=True):
            layers += [nn.Conv2d(inputs, outputs, KERNEL, padding=padding)]
            layers += [nn.MaxPool2d(2), nn.ReLU()]
            height, width = _side_after(height, padding), _side_after(width, padding)
            inputs = outputs
        if height < 1 or width < 1:
            raise QuiverError(
                f"images of {input_shape[1]}×{input_shape[2]} are too small for two 5×5 "
                "convolutions with pooling: set model.padding = 2 (at least 4×4 then), or use mlp."
            )
        layers += [nn.Flatten()]
        self._dense = len(layers)
        numbers = inputs * height * width
        for outputs in hidden:
            layers += [nn.Linear(numbers, outputs), nn.ReLU()]
            numbers = outputs
        if dropout:
            layers += [nn.Dropout(dropout)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(numbers, classes)

    def forward(self, x: Tensor) -> Tensor:
        if self._compiles(x):
            logits: Tensor = self.head(self._forward_compiled(x))
            return logits
        if self._factors is not None and x.dtype == torch.uint8:
            scale, shift = (factor[: x.shape[1]].view(-1, 1, 1) for factor in self._factors)
            x = x.to(scale.dtype) * scale + shift
        logits = self.head(self.body(x))
        return logits

    @property
    def likes_bytes(self) -> bool:
        """Whether images of bytes, which the first layer normalises, are faster than floats."""
        own = "forward" in vars(self) or type(self).forward is not TwoConvolutions.forward
        return self.kernels == "compiled" and self._is_as_built and not own and not has_hooks(self)

    def read_bytes(self, scale: Tensor, shift: Tensor) -> None:
        """Accept images as bytes, with this factor and offset for each pixel of a row."""
        self._factors = scale, shift

    @property
    def _convolutions(self) -> list[nn.Conv2d]:
        return [layer for layer in self.body if isinstance(layer, nn.Conv2d)]

    def _compiles(self, x: Tensor) -> bool:
        if self.kernels != "compiled" or not self._is_as_built:
            return False
        return can_compute(x, self._convolutions, self._factors)

    @property
    def _is_as_built(self) -> bool:
        """Whether nobody put another layer in place of one, or a hook on it."""
        layers = list(self.body)[: self._dense]
        kinds = [nn.Conv2d, nn.MaxPool2d, nn.ReLU] * (self._dense // 3) + [nn.Flatten]
        if [type(layer) for layer in layers] != kinds:
            return False
        return all(map(_pools_by_two, layers)) and not any(map(has_hooks, (self.body, *layers)))

    def _forward_compiled(self, x: Tensor) -> Tensor:
        outputs = features(x, self._convolutions, self._factors)
        for layer in list(self.body)[self._dense :]:
            outputs = layer(outputs)
        return outputs


def _pools_by_two(layer: nn.Module) -> bool:
    if not isinstance(layer, nn.MaxPool2d):
        return True
    sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode)
    return sizes == (2, 2, 0, 1, False)


def lenet5(input_shape: tuple[int, ...], classes: int, kernels: Kernels = "torch") -> nn.Module:
    """LeNet-5 (LeCun 1998) with max-pooling and ReLU, as it is used today.

    Images smaller than 32×32 are padded up to it, as the original did with MNIST's 28×28.
    """
    side = min(_check_image(input_shape)[1:])
    first = max(0, -(-(LENET_SIDE - side) // 2))
    return TwoConvolutions(input_shape, classes, (6, 16), (120, 84), (first, 0), kernels)


def cnn_small(
    input_shape: tuple[int, ...],
    classes: int,
    channels: Sequence[int] = (16, 32),
    hidden: int | Sequence[int] = 128,
    padding: int = 0,
    kernels: Kernels = "torch",
    dropout: float = 0.0,
) -> nn.Module:
    """A CNN for small experiments on a CPU: 117,866 parameters for 3×32×32 and 10 classes."""
    paddings, widths = (padding,) * len(channels), _widths(hidden)
    return TwoConvolutions(input_shape, classes, channels, widths, paddings, kernels, dropout)


def fedavg_cnn(
    input_shape: tuple[int, ...],
    classes: int,
    channels: Sequence[int] = (32, 64),
    hidden: int | Sequence[int] = 512,
    padding: int = 0,
    kernels: Kernels = "torch",
) -> nn.Module:
    """The CNN of FedAvg (McMahan 2017): 878,538 parameters for 3×32×32 and 10 classes."""
    paddings = (padding,) * len(channels)
    return TwoConvolutions(input_shape, classes, channels, _widths(hidden), paddings, kernels)


def _widths(hidden: int | Sequence[int]) -> Sequence[int]:
    """One dense layer, or several."""
    return (hidden,) if isinstance(hidden, int) else hidden


def _check_image(shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise QuiverError(
            f"a convolutional model needs images [channels, height, width], not inputs of shape "
            f"{list(shape)}: use mlp, or reshape the data."
        )
    return shape[0], shape[1], shape[2]


def _side_after(side: int, padding: int) -> int:
    """The side of an image after one convolution and one pooling."""
    return (side + 2 * padding - KERNEL + 1) // 2
