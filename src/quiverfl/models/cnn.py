"""Convolutional networks of two 5×5 convolutions: LeNet-5, FedAvg's CNN and a small one.

Max-pooling comes before ReLU: ReLU is monotone, so the order does not change a bit of the result,
and it then has a quarter of the work.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from quiverfl.errors import QuiverError

KERNEL = 5
LENET_SIDE = 32


class TwoConvolutions(nn.Module):
    """Convolution, pool, ReLU, twice; dense layers; the classifier."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        classes: int,
        channels: Sequence[int],
        hidden: Sequence[int],
        paddings: Sequence[int],
    ) -> None:
        super().__init__()
        inputs, height, width = _image(input_shape)
        layers: list[nn.Module] = []
        for outputs, padding in zip(channels, paddings, strict=True):
            layers += [nn.Conv2d(inputs, outputs, KERNEL, padding=padding)]
            layers += [nn.MaxPool2d(2), nn.ReLU()]
            height, width = _after(height, padding), _after(width, padding)
            inputs = outputs
        if height < 1 or width < 1:
            raise QuiverError(
                f"images of {input_shape[1]}×{input_shape[2]} are too small for two 5×5 "
                "convolutions with pooling: set model.padding = 2 (at least 4×4 then), or use mlp."
            )
        layers += [nn.Flatten()]
        features = inputs * height * width
        for outputs in hidden:
            layers += [nn.Linear(features, outputs), nn.ReLU()]
            features = outputs
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def lenet5(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-5 (LeCun 1998) with max-pooling and ReLU, as it is used today.

    Images smaller than 32×32 are padded up to it, as the original did with MNIST's 28×28.
    """
    side = min(_image(input_shape)[1:])
    first = max(0, -(-(LENET_SIDE - side) // 2))
    return TwoConvolutions(input_shape, classes, (6, 16), (120, 84), (first, 0))


def cnn_small(
    input_shape: tuple[int, ...],
    classes: int,
    channels: Sequence[int] = (16, 32),
    hidden: int = 128,
    padding: int = 0,
) -> nn.Module:
    """A CNN for small experiments on a CPU: 117,866 parameters for 3×32×32 and 10 classes."""
    return TwoConvolutions(input_shape, classes, channels, (hidden,), (padding,) * len(channels))


def fedavg_cnn(
    input_shape: tuple[int, ...],
    classes: int,
    channels: Sequence[int] = (32, 64),
    hidden: int = 512,
    padding: int = 0,
) -> nn.Module:
    """The CNN of FedAvg (McMahan 2017): 878,538 parameters for 3×32×32 and 10 classes."""
    return TwoConvolutions(input_shape, classes, channels, (hidden,), (padding,) * len(channels))


def _image(shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise QuiverError(
            f"a convolutional model needs images [channels, height, width], not inputs of shape "
            f"{list(shape)}: use mlp, or reshape the data."
        )
    return shape[0], shape[1], shape[2]


def _after(side: int, padding: int) -> int:
    """The side of an image after one convolution and one pooling."""
    return (side + 2 * padding - KERNEL + 1) // 2
