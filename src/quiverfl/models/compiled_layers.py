"""Convolution, max-pooling and ReLU in one compiled pass, for batches on a CPU in float32.

PyTorch's convolutions fill an instruction with channels, of which LeNet-5 has three, six and
sixteen; here samples fill it (`native/conv_pool_relu.c`). Results are the same up to rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from quiverfl.errors import QuiverError
from quiverfl.native.library import load, why_not

SOURCE = ("conv_pool_relu", "-ffp-contract=fast")
KERNEL = 5


def check_compiler() -> None:
    """Refuse to train where nothing can be compiled: it would be slower, and other bits, unseen."""
    reason = why_not(*SOURCE)
    if reason is not None:
        raise QuiverError(f'model.kernels = "compiled": {reason} Or set model.kernels = "torch".')


def can_compute(x: Tensor, convolutions: Sequence[nn.Conv2d]) -> bool:
    """Whether these are plain batches on a CPU in float32, and nobody asks for their gradient.

    What is exported or computed for several clients by vmap has no memory of its own. A trained
    model is used on machines without a compiler, too. What does not fit PyTorch refuses.
    """
    tensors = [x, *(tensor for conv in convolutions for tensor in conv.parameters())]
    if not all(isinstance(tensor, Tensor) for tensor in tensors) or x.requires_grad:
        return False
    usual = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
    fits = x.ndim == 4 and x.shape[1] == convolutions[0].in_channels
    otherwise = _is_traced() or torch.is_autocast_enabled("cpu")
    return usual and fits and not otherwise and _in_memory(tensors) and why_not(*SOURCE) is None


def features(x: Tensor, convolutions: Sequence[nn.Conv2d]) -> Tensor:
    """Images [n, channels, height, width] through all of them, flattened: [n, features]."""
    found = _batch_innermost(x)
    for conv in convolutions:
        assert conv.bias is not None
        side = int(conv.padding[0])
        if side:
            found = functional.pad(found, (0, 0, side, side, side, side))
        found = _conv_pool_relu(found, conv.weight, conv.bias)
    return found.flatten(0, 2)[:, : len(x)].t()


class _ConvPoolReLU(torch.autograd.Function):
    """Of [channels, height, width, samples]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
        channels, height, width, samples = x.shape
        outputs, high, wide = len(weight), (height - KERNEL + 1) // 2, (width - KERNEL + 1) // 2
        out = x.new_empty(outputs, high, wide, samples)
        chosen = torch.empty(out.shape, dtype=torch.uint8)
        sizes = (channels, outputs, height, width, samples)
        _library().conv_pool_relu(*_pointers(x, weight, bias, out, chosen), *_sizes(sizes))
        ctx.save_for_backward(x, weight, chosen)
        ctx.sizes = sizes
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight, chosen = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        library = _library()
        work = x.new_empty(library.workspace(*_sizes(ctx.sizes[:4])))
        of_weight, of_bias = torch.empty_like(weight), weight.new_empty(len(weight))
        of_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        tensors = (x, weight, gradient, chosen, of_weight, of_bias, of_x, work)
        library.conv_pool_relu_backward(*_pointers(*tensors), *_sizes(ctx.sizes))
        return of_x, of_weight, of_bias


_conv_pool_relu: Callable[[Tensor, Tensor, Tensor], Tensor] = _ConvPoolReLU.apply


def _library() -> ctypes.CDLL:
    library = load(*SOURCE)
    library.workspace.restype = ctypes.c_int64
    return library


def _batch_innermost(x: Tensor) -> Tensor:
    """[n, channels, height, width] as [channels, height, width, samples], padded with zeros."""
    count, channels, height, width = x.shape
    pixels = x.permute(0, 2, 3, 1).contiguous()  # as it lies where channels are last
    library = _library()
    lanes = int(library.lanes())
    samples = -(-count // lanes) * lanes
    found = x.new_empty(channels, height, width, samples)
    sizes = (count, height * width, channels, samples)
    library.batch_innermost(*_pointers(pixels, found), *_sizes(sizes))
    return found


def _is_traced() -> bool:
    """By torch.jit.trace, which records no more than that something was called."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def _in_memory(tensors: Sequence[Tensor]) -> bool:
    try:
        return all(tensor.data_ptr() for tensor in tensors)
    except RuntimeError:
        return False


def _pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors]


def _sizes(sizes: Sequence[int]) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(size) for size in sizes]
