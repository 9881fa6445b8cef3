"""Residual networks for small images, with GroupNorm or with BatchNorm.

He et al. 2016, the stem for 32×32: one 3×3 convolution of stride 1 and no max-pool. BatchNorm
keeps running statistics, which belong to no client's parameters; GroupNorm (Wu & He 2018) is a
pure function of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from quiverfl.errors import QuiverError
from quiverfl.models.compiled import GroupNorm, Kernels, check_kernels, has_hooks
from quiverfl.options import python_number


def make_norm(
    groups: int | None, channels: int, kernels: Kernels = "torch", relu: bool = True
) -> nn.Module:
    """GroupNorm, compiled with a ReLU behind it if `kernels` say so; BatchNorm without groups."""
    if groups is None:
        return nn.BatchNorm2d(channels)
    if kernels == "compiled":
        return GroupNorm(groups, channels, relu=relu)
    return nn.GroupNorm(groups, channels)


class Block(nn.Module):
    """Two 3×3 convolutions around a shortcut; the first one carries the stride."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, groups: int | None, kernels: Kernels = "torch"
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = make_norm(groups, outputs, kernels)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = make_norm(groups, outputs, kernels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False),
                make_norm(groups, outputs, kernels, relu=False),
            )

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.norm1, GroupNorm) and isinstance(self.norm2, GroupNorm):
            inner: Tensor = self.norm1(self.conv1(x))
            fused: Tensor = self.norm2(self.conv2(inner), *self._shortcut(x))
            return fused
        inner = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(inner)) + self.shortcut(x))

    def _shortcut(self, x: Tensor) -> tuple[Tensor, nn.Module | None]:
        """The shortcut's result, or what it gives its norm and the norm."""
        if type(self.shortcut) is nn.Sequential and not has_hooks(self.shortcut):
            layers = list(self.shortcut)
            if len(layers) == 2 and isinstance(layers[1], nn.GroupNorm):
                return layers[0](x), layers[1]
        return self.shortcut(x), None


class ResNet(nn.Module):
    """Stem, stages of `blocks` blocks that halve the image from the second on, mean, classifier.

    With `groups` its layers are GroupNorm, without BatchNorm.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        classes: int,
        widths: Sequence[int],
        blocks: int,
        groups: int | None,
        kernels: Kernels = "torch",
    ) -> None:
        super().__init__()
        self.kernels = check_kernels(kernels)
        if len(input_shape) != 3:
            raise QuiverError(
                f"a residual network needs images [channels, height, width], not inputs of shape "
                f"{list(input_shape)}: use mlp, or reshape the data."
            )
        if groups is not None and any(width % groups for width in widths):
            raise QuiverError(
                f"model.groups = {groups} does not divide the channels {tuple(widths)}."
            )
        stem = nn.Conv2d(input_shape[0], widths[0], 3, padding=1, bias=False)
        after = nn.Identity() if kernels == "compiled" else nn.ReLU()
        layers: list[nn.Module] = [stem, make_norm(groups, widths[0], kernels), after]
        inputs = widths[0]
        for stage, outputs in enumerate(widths):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Block(inputs, outputs, stride, groups, kernels))
                inputs = outputs
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def resnet8_gn(
    input_shape: tuple[int, ...], classes: int, groups: int = 8, kernels: Kernels = "torch"
) -> nn.Module:
    """Three stages of one block, 16/32/64 channels."""
    return ResNet(input_shape, classes, (16, 32, 64), 1, groups, kernels)


def resnet8_bn(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The same with BatchNorm, for FedBN and for comparisons of normalisations."""
    return ResNet(input_shape, classes, (16, 32, 64), 1, groups=None)


def resnet18_gn(
    input_shape: tuple[int, ...], classes: int, groups: int = 32, kernels: Kernels = "torch"
) -> nn.Module:
    """The paper's model: four stages of two blocks, 64 to 512 channels, 32 groups.

    11,168,832 parameters in the body and 513 per class in the head.
    """
    return ResNet(input_shape, classes, (64, 128, 256, 512), 2, groups, kernels)


# BatchNorm → GroupNorm in one call.
#
# BatchNorm's output for a sample depends on the others in its batch, and on statistics that are
# neither trained nor sent: a client's model would not be a function of its parameters. GroupNorm
# (Wu & He 2018) normalises every sample by itself.


GROUPS = 32
"""Wu and He's number of groups."""


def group_norm(model: nn.Module, groups: int = GROUPS) -> nn.Module:
    """The same model with every BatchNorm replaced by a GroupNorm of the same weights.

    It has at most this many groups, of at least two channels each; BatchNorm1d, whose inputs may be
    vectors without further dimensions, becomes one group. Running statistics are left out: a
    pre-trained model needs some training to recover without them.
    """
    if not isinstance(model, nn.Module):
        raise QuiverError(f"group_norm: a {type(model).__name__} is not an nn.Module.")
    groups = python_number(groups)
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise QuiverError(
            f"group_norm: groups = {groups!r}: it must be a whole number, at least 1."
        )
    made: dict[nn.Module, nn.Module] = {}  # a layer used in two places stays one
    if isinstance(model, nn.modules.batchnorm._BatchNorm):
        return _replace_norm(model, groups)
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                if child not in made:
                    made[child] = _replace_norm(child, groups)
                module._modules[name] = made[child]
    return model


def _replace_norm(norm: nn.modules.batchnorm._BatchNorm, groups: int) -> nn.GroupNorm:
    if isinstance(norm, nn.modules.lazy.LazyModuleMixin):
        raise QuiverError(
            f"group_norm: a {type(norm).__name__} does not know its channels yet; run the model on "
            "a batch first, or give num_features."
        )
    layer = nn.modules.batchnorm._BatchNorm
    if not isinstance(norm, nn.SyncBatchNorm) and type(norm).forward is not layer.forward:
        raise QuiverError(
            f"group_norm: a {type(norm).__name__} has a forward of its own, which a GroupNorm "
            "would not compute: make the network with nn.GroupNorm, such as by timm's norm_layer."
        )
    channels = norm.num_features
    most = 1 if isinstance(norm, nn.BatchNorm1d) else min(groups, max(1, channels // 2))
    chosen = next(count for count in range(most, 0, -1) if channels % count == 0)
    made = nn.GroupNorm(chosen, channels, norm.eps, norm.affine)
    made.train(norm.training)
    if norm.affine:
        made.to(device=norm.weight.device, dtype=norm.weight.dtype)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                parameter.copy_(getattr(norm, name))
                parameter.requires_grad_(getattr(norm, name).requires_grad)
    return made
