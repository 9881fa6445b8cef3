"""Convolution, max-pooling and ReLU in one compiled pass, for batches on a CPU in float32.

PyTorch's convolutions fill an instruction with channels, of which LeNet-5 has three, six and
sixteen; here samples fill it (`support/native/conv_pool_relu.c`). Results are the same up
to rounding.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode

from quiverfl.errors import QuiverError
from quiverfl.support.compiler import load_library, why_not_compiled

SOURCE = ("conv_pool_relu", "-ffp-contract=fast")
KERNEL = 5

Factors = tuple[Tensor, Tensor]
"""Factor and offset of bytes for each pixel of an image row."""


def check_compiler() -> None:
    """Refuse to train where nothing can be compiled: it would be slower, and other bits, unseen."""
    reason = why_not_compiled(*SOURCE)
    if reason is not None:
        raise QuiverError(f'model.kernels = "compiled": {reason} Or set model.kernels = "torch".')


def can_compute(
    x: Tensor, convolutions: Sequence[nn.Conv2d], factors: Factors | None = None
) -> bool:
    """Whether these are plain batches on a CPU in float32, and nobody asks for their gradient.

    Or in bytes, where there are factors for lines as long as theirs.

    What is exported, traced or computed for several clients by vmap has no memory of its own. A
    trained model is used on machines without a compiler, too. What does not fit PyTorch refuses.
    """
    if _is_traced() or torch.is_autocast_enabled("cpu"):
        return False
    channels, sides = x.shape[1] if x.ndim == 4 else None, list(x.shape[2:])
    tensors: list[Any] = [x]
    if factors is not None and x.dtype == torch.uint8:
        if channels is None or {len(factor) for factor in factors} != {channels * sides[1]}:
            return False
        tensors = [*factors]
        if x.device.type != "cpu":
            return False
    for conv in convolutions:
        weight, bias, outputs = conv.weight, conv.bias, conv.out_channels
        if (
            not isinstance(weight, Tensor)
            or not isinstance(bias, Tensor)
            or not _has_usual_options(conv)
        ):
            return False
        if weight.shape != (outputs, channels, KERNEL, KERNEL) or bias.shape != (outputs,):
            return False
        sides = [(side + 2 * int(conv.padding[0]) - KERNEL + 1) // 2 for side in sides]
        if min(sides) < 1:
            return False
        tensors += [weight, bias]
        channels = outputs
    usual = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
    plain = not x.requires_grad and not any(t.is_neg() for t in tensors)
    return usual and plain and _are_in_memory([x, *tensors]) and why_not_compiled(*SOURCE) is None


def _has_usual_options(conv: nn.Conv2d) -> bool:
    steps = (conv.stride, conv.dilation, conv.groups, conv.padding_mode)
    if type(conv) is not nn.Conv2d or steps != ((1, 1), (1, 1), 1, "zeros"):
        return False
    sides = conv.padding  # or its name
    return not isinstance(sides, str) and sides[0] == sides[1] >= 0


def features(
    x: Tensor, convolutions: Sequence[nn.Conv2d], factors: Factors | None = None
) -> Tensor:
    """Images [n, channels, height, width] through all of them, flattened: [n, features]."""
    paddings = [int(conv.padding[0]) for conv in convolutions]
    tensors = [tensor for conv in convolutions for tensor in (conv.weight, conv.bias)]
    return _features(x, factors if x.dtype == torch.uint8 else None, paddings, *tensors)


class _Images(NamedTuple):
    """Input of the first layer."""

    numbers: Tensor
    """[n, height, width, channels], floats or bytes."""
    side: int
    """Zero padding on every side."""
    factors: Sequence[Tensor | None] = (None, None)
    """Factor and offset of bytes."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one padded image: channels, height, width."""
        _, height, width, channels = self.numbers.shape
        return channels, height + 2 * self.side, width + 2 * self.side


class _Convolutions(torch.autograd.Function):
    """One function for all layers: gradients pass between them in an order of their own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, factors: Factors | None, paddings: Sequence[int], *tensors: Tensor
    ) -> Tensor:
        pixels = x.permute(0, 2, 3, 1).contiguous()  # as it lies where channels are last
        kept = [pixels, *(factors or (None, None))]
        outputs: Tensor | _Images = _Images(pixels, paddings[0], factors or (None, None))
        for side, weight, bias in zip(paddings, tensors[::2], tensors[1::2], strict=True):
            if isinstance(outputs, Tensor):
                outputs = (
                    functional.pad(outputs, (0, 0, side, side, side, side)) if side else outputs
                )
                kept.append(outputs)
            weight = weight.contiguous()
            outputs, chosen = _convolve_pool(outputs, weight, bias.contiguous())
            kept += [weight, chosen]
        assert isinstance(outputs, Tensor)
        ctx.save_for_backward(*kept)
        ctx.paddings, ctx.out = paddings, outputs.shape[1:4]
        return _is_contiguous_batch(outputs)[: len(x)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].resolve_neg().view(-1, *ctx.out)  # in whatever order it lies
        pixels, scale, shift, *saved = ctx.saved_tensors
        layers = [_Images(pixels, ctx.paddings[0], (scale, shift)), *saved]
        parts: list[Tensor | None] = []
        for layer in reversed(range(len(ctx.paddings))):
            x, weight, chosen = layers[3 * layer : 3 * layer + 3]
            of_x, *of_layer = _convolve_pool_backward(gradient, x, weight, chosen)
            parts = [*of_layer, *parts]
            if of_x is not None:
                side = ctx.paddings[layer]
                gradient = of_x[..., side : of_x.shape[2] - side, side : of_x.shape[3] - side]
        return (None, None, None, *parts)


_features: Callable[..., Tensor] = _Convolutions.apply


def _convolve_pool(x: Tensor | _Images, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """[blocks, outputs, high, wide, lanes]; and which pixel of each pool was chosen.

    Of [blocks, channels, height, width, lanes], or of images.
    """
    library = _load_compiled()
    channels, height, width = x.shape if isinstance(x, _Images) else x.shape[1:4]
    lanes = int(library.lanes())
    blocks = len(x) if isinstance(x, Tensor) else -(-len(x.numbers) // lanes)
    outputs, high, wide = len(weight), (height - KERNEL + 1) // 2, (width - KERNEL + 1) // 2
    out = weight.new_empty(blocks, outputs, high, wide, lanes)
    chosen = out.new_empty(out.shape, dtype=torch.uint8)
    sizes, rest = (channels, outputs, height, width), (weight, bias, out, chosen)
    if isinstance(x, Tensor):
        library.conv_pool_relu(*_pointers(x, *rest), *_sizes((*sizes, blocks)))
        return out, chosen
    work = out.new_empty(library.first_workspace(*_sizes((channels, height, width))))
    pointers = _pointers(x.numbers, *x.factors, *rest, work)
    library.first_conv_pool_relu(*pointers, *_sizes((*sizes, x.side, len(x.numbers))))
    return out, chosen


def _convolve_pool_backward(
    gradient: Tensor, x: Tensor | _Images, weight: Tensor, chosen: Tensor
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Of x unless it is images, of the weight and of the bias, from [n, outputs, high, wide]."""
    library = _load_compiled()
    channels, height, width = x.shape if isinstance(x, _Images) else x.shape[1:4]
    sizes = (channels, len(weight), height, width)
    room = library.image_room(*_sizes((channels, height, width)))
    if chosen.shape[-1] * room >= 2**31:  # places are counted in 32 bits
        raise QuiverError('images too large for compiled layers: set model.kernels = "torch".')
    work = weight.new_empty(library.workspace(*_sizes(sizes)))
    of_weight, of_bias = torch.empty_like(weight), weight.new_empty(len(weight))
    of_x: Tensor | None = None
    if isinstance(x, _Images):
        given, side = (None, x.numbers, *x.factors), x.side
    else:
        given, side, of_x = (x, None, None, None), 0, weight.new_empty(len(gradient), room)
    tensors = (*given, weight, gradient, chosen, of_weight, of_bias, of_x, work)
    numbers = (*sizes, side, len(gradient), *gradient.stride())
    library.conv_pool_relu_backward(*_pointers(*tensors), *_sizes(numbers))
    if of_x is not None:
        images = of_x[:, : height * width * channels].view(-1, height, width, channels)
        of_x = images.permute(0, 3, 1, 2)
    return of_x, of_weight, of_bias


@functools.cache
def _load_compiled() -> ctypes.CDLL:
    library = load_library(*SOURCE)
    for function in (library.workspace, library.first_workspace, library.image_room):
        function.restype = ctypes.c_int64
    return library


def _is_contiguous_batch(x: Tensor) -> Tensor:
    """[blocks, channels, height, width, lanes] as [samples, features]."""
    blocks, lanes = len(x), x.shape[-1]
    return x.view(blocks, -1, lanes).transpose(1, 2).reshape(blocks * lanes, -1)


def _is_traced() -> bool:
    """By what sees PyTorch's operators alone, or would have them computed in another way."""
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    transformed = torch._C._are_functorch_transforms_active()
    return bool(tracing or transformed or _get_current_dispatch_mode() is not None)


def _are_in_memory(tensors: Sequence[Tensor]) -> bool:
    try:
        return all(tensor.data_ptr() for tensor in tensors)
    except RuntimeError:
        return False


def _pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p]:
    if any(t is not None and t.numel() and not t.data_ptr() for t in tensors):
        raise QuiverError('a tensor without memory of its own: set model.kernels = "torch".')
    return [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors]


def _sizes(sizes: Sequence[int]) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(size) for size in sizes]
