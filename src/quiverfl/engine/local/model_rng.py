"""Random numbers inside a model, such as those of dropout, as pure functions of a key.

torch draws them from one global generator: the masks would depend on earlier clients, and
could not be drawn for stacked clients at once. Under `KeyedDraws` they come from a hash of (key,
number of the draw, place in the tensor). The key is a tensor, one number per client under vmap; a
place is its coordinates, so that padded samples behind the real ones change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from quiverfl.errors import QuiverError
from quiverfl.support.environment import NO_FLOAT64

SELU_FLOOR = -1.7580993408473766
"""The value that alpha dropout puts for a dropped one: SELU's limit at minus infinity."""


def _to_signed(bits: int) -> int:
    """The same 64 bits as torch's int64 has them."""
    return (bits + (1 << 63)) % (1 << 64) - (1 << 63)


GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = _to_signed(0xBF58476D1CE4E5B9), _to_signed(0x94D049BB133111EB)


def _mix(bits: Tensor) -> Tensor:
    """The finalizer of splitmix64, as in quiverfl.seeds; shifts must not bring the sign along."""
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        shifted = bits >> shift
        shifted &= (1 << (64 - shift)) - 1
        shifted ^= bits
        bits = shifted if factor is None else shifted.mul_(factor)
    return bits


class KeyedRandomMode(TorchFunctionMode):
    """While it is entered, dropout and the functions in REPLACED draw from the key."""

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self._device = key.device
        self.exact = torch.float64 if key.device.type not in NO_FLOAT64 else torch.float32
        """The dtype drawn for torch's functions of the same name; 24 bits are exact in both."""
        self._key = key if key.device.type not in NO_FLOAT64 else key.cpu()
        self.count = 0
        """Draws so far."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.multi_head_attention_forward:
            with self:
                return _attention_layer(*args, **kwargs)
        replaced = REPLACED.get(function)
        if replaced is None:
            return function(*args, **kwargs)
        if kwargs.pop("generator", None) is not None:
            raise QuiverError(
                f"the model calls {function.__name__} with a generator of its own, whose state "
                "is not part of its parameters: leave the generator out."
            )
        return replaced(self, *args, **kwargs)

    def bits(self, shape: Iterable[int]) -> Tensor:
        """64 random bits per place, int64; every call is a new draw."""
        shape = tuple(shape)
        place = _mix(self._key + _to_signed(self.count * GOLDEN))
        self.count += 1
        for axis, size in enumerate(shape):
            step = _to_signed(pow(GOLDEN, axis + 1, 1 << 64))
            places = torch.arange(size, device=self._key.device) * step
            place = place + places.view(size, *(1 for _ in shape[axis + 1 :]))
        return _mix(place)

    def uniform(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """Uniform numbers in [0, 1), of 24 bits: as many as float32 distinguishes there."""
        drawn = (((self.bits(shape) >> 40) & ((1 << 24) - 1)).to(dtype)) * 2.0**-24
        return drawn.to(self._device)

    def normal(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """Box and Muller's."""
        shape = tuple(shape)
        radius = torch.sqrt(-2.0 * torch.log1p(-self.uniform(shape, dtype)))
        return radius * torch.cos(2.0 * math.pi * self.uniform(shape, dtype))

    def keep_mask(self, shape: Iterable[int], p: float) -> Tensor:
        """True with probability 1 - p."""
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        kept = self.bits(shape) >= min(round(p * 2**64), 2**64 - 1) - 2**63
        return kept.to(self._device)


def _dropout(
    draws: KeyedRandomMode,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    return _mask_units(draws, input, tuple(input.shape), p, training, inplace)


def _of_features(dropped: Callable[[Tensor], int]) -> Callable[..., Tensor]:
    """Whole features are dropped: what is dropped lies on the first so many axes."""

    def dropout(
        draws: KeyedRandomMode,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        return _mask_units(draws, input, _leading(input, dropped(input)), p, training, inplace)

    return dropout


def _leading(input: Tensor, axes: int) -> tuple[int, ...]:
    return tuple(input.shape[:axes]) + (1,) * (input.ndim - axes)


def _mask_units(
    draws: KeyedRandomMode,
    input: Tensor,
    shape: tuple[int, ...],
    p: float,
    training: bool,
    inplace: bool,
) -> Tensor:
    if not training or p == 0:
        return input
    scaled = input / (1 - p) if p < 1 else input
    result = torch.where(draws.keep_mask(shape, p), scaled, 0.0)
    return input.copy_(result) if inplace else result


def _make_alpha_dropout(axes: Callable[[Tensor], int]) -> Callable[..., Tensor]:
    """Dropout that keeps SELU's mean and variance (Klambauer et al. 2017)."""

    def dropout(
        draws: KeyedRandomMode,
        input: Tensor,
        p: float = 0.5,
        training: bool = False,
        inplace: bool = False,
    ) -> Tensor:
        if not training or p == 0:
            return input
        kept = draws.keep_mask(_leading(input, axes(input)), p)
        if p == 1:
            result = torch.zeros_like(input)
        else:
            scale = 1 / math.sqrt((1 - p) * (1 + p * SELU_FLOOR**2))
            result = scale * torch.where(kept, input, SELU_FLOOR) - scale * SELU_FLOOR * p
        return input.copy_(result) if inplace else result

    return dropout


def _attention(
    draws: KeyedRandomMode,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """softmax(QKᵀ/√d + mask) with dropout, times V; torch's own where nothing is dropped."""
    if dropout_p == 0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, **options
        )
    if options.get("enable_gqa"):
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (part.repeat_interleave(repeats, dim=-3) for part in (key, value))
    scale = options.get("scale") or 1 / math.sqrt(query.shape[-1])
    scores = query @ key.transpose(-2, -1) * scale
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return _dropout(draws, scores.softmax(dim=-1), dropout_p) @ value


def _attention_layer(*args: Any, **kwargs: Any) -> Any:
    """torch's own, opened: a mode is handed it whole and would not see the dropout inside."""
    closed: Any = F.multi_head_attention_forward
    names = {**closed.__globals__, "has_torch_function": lambda _: False}
    opened = FunctionType(closed.__code__, names, closed.__name__, closed.__defaults__)
    opened.__kwdefaults__ = closed.__kwdefaults__
    return opened(*args, **kwargs)


def _draw_like(
    draw: Callable[[KeyedRandomMode, Iterable[int], torch.dtype], Tensor],
) -> Callable[..., Any]:
    def draw_numbers(
        draws: KeyedRandomMode, input: Tensor, *, dtype: Any = None, **_: Any
    ) -> Tensor:
        return draw(draws, input.shape, dtype or input.dtype)

    return draw_numbers


def _draw_of_size(
    draw: Callable[[KeyedRandomMode, Iterable[int], torch.dtype], Tensor],
) -> Callable[..., Any]:
    def draw_numbers(
        draws: KeyedRandomMode,
        *size: Any,
        dtype: Any = None,
        requires_grad: bool = False,
        **others: Any,
    ) -> Tensor:
        shape = others.get("size", size[0] if len(size) == 1 else size)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        return draw(draws, shape, dtype or torch.get_default_dtype())

    return draw_numbers


def _bernoulli(draws: KeyedRandomMode, input: Tensor, p: float | None = None) -> Tensor:
    chance = input if p is None else p
    return (draws.uniform(input.shape, draws.exact) < chance).to(input.dtype)


def _bernoulli_(draws: KeyedRandomMode, input: Tensor, p: Any = 0.5) -> Tensor:
    return input.copy_(draws.uniform(input.shape, draws.exact) < p)


def _uniform_(draws: KeyedRandomMode, input: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return input.copy_(low + (high - low) * draws.uniform(input.shape, draws.exact))


def _normal_(draws: KeyedRandomMode, input: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return input.copy_(mean + std * draws.normal(input.shape, draws.exact))


REPLACED: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.dropout1d: _of_features(lambda x: x.ndim - 1),
    F.dropout2d: _of_features(lambda x: 2),
    F.dropout3d: _of_features(lambda x: x.ndim - 3),
    F.alpha_dropout: _make_alpha_dropout(lambda x: x.ndim),
    F.feature_alpha_dropout: _make_alpha_dropout(lambda x: 2),
    F.scaled_dot_product_attention: _attention,
    torch.rand_like: _draw_like(KeyedRandomMode.uniform),
    torch.randn_like: _draw_like(KeyedRandomMode.normal),
    torch.rand: _draw_of_size(KeyedRandomMode.uniform),
    torch.randn: _draw_of_size(KeyedRandomMode.normal),
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
}
