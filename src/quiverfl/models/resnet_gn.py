"""Residual networks for small images, with GroupNorm in place of BatchNorm.

He et al. 2016, the stem for 32×32: one 3×3 convolution of stride 1 and no max-pool. BatchNorm
keeps running statistics, which belong to no client's parameters; GroupNorm (Wu & He 2018) is a
pure function of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import relu

from quiverfl.errors import QuiverError


class Block(nn.Module):
    """Two 3×3 convolutions around a shortcut; the first one carries the stride."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False),
                nn.GroupNorm(groups, outputs),
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResNetGN(nn.Module):
    """Stem, stages of `blocks` blocks that halve the image from the second on, mean, classifier."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        classes: int,
        widths: Sequence[int],
        blocks: int,
        groups: int,
    ) -> None:
        super().__init__()
        if len(input_shape) != 3:
            raise QuiverError(
                f"a residual network needs images [channels, height, width], not inputs of shape "
                f"{list(input_shape)}: use mlp, or reshape the data."
            )
        if any(width % groups for width in widths):
            raise QuiverError(
                f"model.groups = {groups} does not divide the channels {tuple(widths)}."
            )
        stem = nn.Conv2d(input_shape[0], widths[0], 3, padding=1, bias=False)
        layers: list[nn.Module] = [stem, nn.GroupNorm(groups, widths[0]), nn.ReLU()]
        inputs = widths[0]
        for stage, outputs in enumerate(widths):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Block(inputs, outputs, stride, groups))
                inputs = outputs
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def resnet8_gn(input_shape: tuple[int, ...], classes: int, groups: int = 8) -> nn.Module:
    """Three stages of one block, 16/32/64 channels."""
    return ResNetGN(input_shape, classes, (16, 32, 64), 1, groups)


def resnet18_gn(input_shape: tuple[int, ...], classes: int, groups: int = 32) -> nn.Module:
    """The paper's model: four stages of two blocks, 64 to 512 channels, 32 groups.

    11,168,832 parameters in the body and 513 per class in the head.
    """
    return ResNetGN(input_shape, classes, (64, 128, 256, 512), 2, groups)
