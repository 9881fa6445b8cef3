"""Layers in C of our own, for batches on a CPU. Results are PyTorch's up to rounding.

`features`: convolution, max-pooling and ReLU in one pass, in float32. PyTorch's convolutions fill
an instruction with channels, of which LeNet-5 has three, six and sixteen; here samples fill it
(`support/native/conv_pool_relu.c`).

`GroupNorm`: the norm with the ReLU and the residual sum behind it in one pass, channels last, in
float32 and bfloat16 (`support/native/group_norm.c`). PyTorch's own is slow with channels last, and
reads and writes every number three times.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode

from quiverfl.errors import QuiverError, QuiverWarning
from quiverfl.support.compiler import load_library, why_not_compiled

SOURCE = ("conv_pool_relu", "-ffp-contract=fast")
NORM_SOURCE = ("group_norm", "-ffp-contract=fast")
KERNEL = 5

Factors = tuple[Tensor, Tensor]
"""Factor and offset of bytes for each pixel of an image row."""


Kernels = Literal["torch", "compiled"]
"""What computes a model's layers in training and evaluation on a CPU: PyTorch, or C of our own."""


def check_kernels(kernels: Kernels) -> Kernels:
    if kernels not in ("torch", "compiled"):
        raise QuiverError(f'kernels = {kernels!r}: "torch" or "compiled".')
    return kernels


def has_hooks(layer: nn.Module) -> bool:
    before, after = layer._forward_pre_hooks, layer._forward_hooks
    return bool(before or after or layer._backward_pre_hooks or layer._backward_hooks)


def warn_without_compiler(model: nn.Module) -> None:
    """Say that PyTorch computes this model's compiled layers, where nothing can be compiled."""
    normed = any(isinstance(module, GroupNorm) for module in model.modules())
    reason = why_not_compiled(*(NORM_SOURCE if normed else SOURCE))
    if reason is not None:
        warnings.warn(
            f"{reason} Until then PyTorch computes this model's compiled layers: the same results "
            "up to rounding, slower.",
            QuiverWarning,
            stacklevel=2,
        )


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
    """Convolve, pool, and say which pixel of each pool was chosen.

    The input is [blocks, channels, height, width, lanes], or images. The output is
    [blocks, outputs, high, wide, lanes].
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
    """Gradients of x (None for images), weight and bias, from [n, outputs, high, wide]."""
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
    if torch.compiler.is_compiling():
        return True
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


class GroupNorm(nn.GroupNorm):
    """GroupNorm, with ReLU and a residual sum if you wish, in one compiled pass.

    `norm(x)` is relu(gn(x)), or gn(x) with `relu=False`. `norm(x, r)` is relu(gn(x) + r), and
    `norm(x, r, other)` is relu(gn(x) + other(r)), where `other` is the norm of a shortcut.
    Parameters and their names are those of `torch.nn.GroupNorm`. Give images with channels last:
    others are laid out so first. The result has the type of `x`.

    PyTorch computes it where there is no compiler, on other devices and for other types than
    float32 and bfloat16, under vmap, tracing and export, for second derivatives, and where
    channels do not fill a vector of 16.
    """

    def __init__(self, groups: int, channels: int, eps: float = 1e-5, relu: bool = True) -> None:
        super().__init__(groups, channels, eps)
        self.relu = relu

    def forward(
        self, x: Tensor, residual: Tensor | None = None, other: nn.GroupNorm | None = None
    ) -> Tensor:
        if residual is not None and not self.relu:
            raise QuiverError("a GroupNorm with a residual has its ReLU: leave relu=False out.")
        if residual is not None and other is not None and not _is_plain(other):
            residual, other = other(residual), None
        norms = [self] if other is None else [self, other]
        if not _can_normalise(x, residual, norms):
            return self._by_torch(x, residual, other)
        mode = int(self.relu) if residual is None else 1 + len(norms)
        tensors = [t.contiguous() for norm in norms for t in (norm.weight, norm.bias)]
        x = x.contiguous(memory_format=torch.channels_last)
        if residual is not None:
            residual = residual.contiguous(memory_format=torch.channels_last)
        epsilons = (self.eps, norms[-1].eps)
        return _normalise(mode, self.num_groups, epsilons, x, residual, *tensors)

    def _by_torch(self, x: Tensor, residual: Tensor | None, other: nn.GroupNorm | None) -> Tensor:
        outputs = functional.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        if residual is not None:
            outputs = outputs + (residual if other is None else other(residual))
        return (functional.relu(outputs) if self.relu else outputs).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, relu={self.relu}"


def likes_channels_last(module: nn.Module) -> bool:
    """Whether a norm is as fast with channels last; PyTorch's is three times slower there."""
    compiled = isinstance(module, GroupNorm) and why_not_compiled(*NORM_SOURCE) is None
    return compiled or not isinstance(module, nn.GroupNorm)


def _is_plain(norm: nn.GroupNorm) -> bool:
    """Whether it is gn and nothing else."""
    known = type(norm) in (nn.GroupNorm, GroupNorm) and not getattr(norm, "relu", False)
    return known and not has_hooks(norm) and "forward" not in vars(norm)


def _can_normalise(x: Tensor, residual: Tensor | None, norms: Sequence[nn.GroupNorm]) -> bool:
    if _is_traced() or x.ndim != 4 or not x.numel() or x.dtype not in _TYPES:
        return False
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        return False
    tensors = [x] if residual is None else [x, residual]
    for norm in norms:
        weight, bias = norm.weight, norm.bias
        if (
            weight is None
            or norm.num_channels != x.shape[1]
            or norm.num_groups != norms[0].num_groups
        ):
            return False
        if weight.dtype != torch.float32 or bias.dtype != torch.float32:
            return False
        tensors += [weight, bias]
    if any(t.device.type != "cpu" or t.is_neg() for t in tensors) or not _are_in_memory(tensors):
        return False
    if why_not_compiled(*NORM_SOURCE) is not None:
        return False
    return _fills_vectors(x.shape[2] * x.shape[3], x.shape[1])


_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@functools.cache
def _fills_vectors(pixels: int, channels: int) -> bool:
    return bool(load_library(*NORM_SOURCE).can_normalise(*_sizes((pixels, channels))))


class _Norm(ctypes.Structure):
    """The struct of group_norm.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("mode", "samples", "pixels", "channels", "groups")),
        *((name, ctypes.c_double) for name in ("eps", "other_eps")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "other_weight", "other_bias")),
    ]


RELU, ADD, ADD_NORM = 1, 2, 3
"""What follows the norm: as the C numbers it."""


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mode: int,
        groups: int,
        epsilons: tuple[float, float],
        x: Tensor,
        residual: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        out = torch.empty_like(x)
        moments = x.new_empty(len(x) * len(tensors) * groups, dtype=torch.float32)
        call = getattr(load_library(*NORM_SOURCE), "group_norm_" + _TYPES[x.dtype])
        norm = _describe(mode, groups, epsilons, x, tensors)
        call(ctypes.byref(norm), *_pointers(x, residual, out, moments))
        # Where relu let ADD through is seen in its result, which the next layer keeps anyway.
        kept = (residual if mode == ADD_NORM else None, out if mode == ADD else None)
        ctx.save_for_backward(x, *kept, moments, *tensors)
        ctx.options = mode, groups, epsilons
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mode, groups, epsilons = ctx.options
        x, residual, out, moments, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: this gradient is to have gradients
            own = _differentiable(mode, groups, epsilons, gradients[0], x, residual, out, tensors)
            return None, None, None, *own
        of_out = gradients[0].resolve_neg().contiguous(memory_format=torch.channels_last)
        of_x, of_residual = torch.empty_like(x), torch.empty_like(x) if mode >= ADD else None
        of_tensors = x.new_empty(len(tensors), x.shape[1], dtype=torch.float32)
        call = getattr(load_library(*NORM_SOURCE), "group_norm_backward_" + _TYPES[x.dtype])
        norm = _describe(mode, groups, epsilons, x, tensors)
        given = (of_out, x, residual, out, moments, of_x, of_residual, of_tensors)
        call(ctypes.byref(norm), *_pointers(*given))
        return None, None, None, of_x, of_residual, *of_tensors


_normalise: Callable[..., Tensor] = _GroupNorm.apply


def _describe(
    mode: int,
    groups: int,
    epsilons: tuple[float, float],
    x: Tensor,
    tensors: Sequence[Tensor],
) -> _Norm:
    samples, channels, height, width = x.shape
    pointers = [tensor.data_ptr() for tensor in tensors]
    sizes = (mode, samples, height * width, channels, groups)
    return _Norm(*sizes, *epsilons, *pointers)


def _differentiable(
    mode: int,
    groups: int,
    epsilons: tuple[float, float],
    of_out: Tensor,
    x: Tensor,
    residual: Tensor | None,
    out: Tensor | None,
    tensors: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """The gradients by PyTorch's operators, which have gradients in turn."""
    if mode == ADD:
        assert out is not None
        of_out = of_out * (~(out <= 0)).to(of_out.dtype)
    weight, bias = tensors[:2]
    outputs = functional.group_norm(x.float(), groups, weight, bias, epsilons[0])
    inputs = [x, *tensors]
    if mode == ADD_NORM:
        assert residual is not None
        weight, bias = tensors[2:]
        other = functional.group_norm(residual.float(), groups, weight, bias, epsilons[1])
        outputs, inputs = outputs + other, [*inputs, residual]
    if mode in (RELU, ADD_NORM):
        outputs = functional.relu(outputs)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    gradients = iter(torch.autograd.grad(outputs, wanted, of_out.to(outputs), create_graph=True))
    of_inputs = [next(gradients) if tensor.requires_grad else None for tensor in inputs]
    of_residual = of_inputs.pop() if mode == ADD_NORM else of_out if mode == ADD else None
    return of_inputs[0], of_residual, *of_inputs[1:]
