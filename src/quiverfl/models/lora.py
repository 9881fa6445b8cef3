"""Low-rank adapters (LoRA, Hu et al. 2022): W stays as it is, and x ↦ W x + (α/r) B A x is learned.

paper   here              meaning
W       weight            frozen: kept once for all clients, never sent
A       lora_A [r, in]    random at first
B       lora_B [out, r]   zero at first, so that the adapted model starts as the given one
α/r     scale
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quiverfl.errors import QuiverError
from quiverfl.options import python_number


def lora(
    model: nn.Module,
    rank: int = 8,
    targets: Sequence[str] | None = None,
    alpha: float | None = None,
    train: Sequence[str] = ("head",),
) -> nn.Module:
    """The same model with adapters; everything else is frozen but for what `train` names.

    `targets` are words: a linear or attention layer is adapted if one of them occurs in its name or
    in the name of its class ("attention"). None adapts all that `train` does not name. `alpha` is
    `rank` unless given. `train` are prefixes of parameters that are trained as they are, such as
    a new head.
    """
    rank, alpha = python_number(rank), python_number(alpha)
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise QuiverError(f"lora: rank = {rank!r}: it must be a whole number, at least 1.")
    words = None if targets is None else _check_words("targets", targets)
    whole = _check_words("train", train)
    layers = [
        (name, layer)
        for name, layer in _choose_layers(model)
        if not any(_is_below(name, p) for p in whole)
    ]
    chosen = [
        (name, layer) for name, layer in layers if words is None or _matches(name, layer, words)
    ]
    if not chosen:
        names = ", ".join(name for name, _ in layers) or "none"
        raise QuiverError(
            f"lora: targets = {targets!r} match no linear or attention layer; there are: {names}."
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(_is_below(name, prefix) for prefix in whole))
    scale = (rank if alpha is None else alpha) / rank
    adapted: dict[nn.Module, nn.Module] = {}
    for _, layer in chosen:
        adapted[layer] = (
            LoraAttention(layer, rank, scale)
            if isinstance(layer, nn.MultiheadAttention)
            else LoraLinear(layer, rank, scale)
        )
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child in adapted:  # in every place where it is used
                module._modules[name] = adapted[child]
    return adapted.get(model, model)


def _choose_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Linear and attention layers by name; what is inside an attention layer belongs to it."""
    if not isinstance(model, nn.Module):
        raise QuiverError(f"lora: a {type(model).__name__} is not an nn.Module.")
    inside: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            inside.add(name)
            yield name, module
        elif isinstance(module, nn.Linear) and name.rpartition(".")[0] not in inside:
            yield name, module


def _matches(name: str, layer: nn.Module, words: Sequence[str]) -> bool:
    text = f"{name} {type(layer).__name__}".lower()
    return any(word.lower() in text for word in words)


def _check_words(option: str, given: Sequence[str]) -> tuple[str, ...]:
    words = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(word, str) and word for word in words):
        raise QuiverError(f"lora: {option} = {given!r}: give names, such as ('attention',).")
    return words


def _is_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


class _LowRank(nn.Module):
    """(α/r) B A x for one matrix."""

    def __init__(self, like: Tensor, outputs: int, rank: int, scale: float) -> None:
        super().__init__()
        inputs = like.shape[1]
        self.lora_A = nn.Parameter(like.new_empty(rank, inputs))
        self.lora_B = nn.Parameter(like.new_zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self._scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.lora_A), self.lora_B) * self._scale


class LoraLinear(nn.Module):
    """A linear layer whose weight and bias, under their own names, stay as they are."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.lora = _LowRank(layer.weight, layer.out_features, rank, scale)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = F.linear(x, self.weight, self.bias) + self.lora(x)
        return adapted


class LoraAttention(nn.Module):
    """nn.MultiheadAttention with adapters on queries, keys, values and the output."""

    _qkv_same_embed_dim = False
    """So says torch of layers that its fused transformer layer, which knows no adapters, must not
    replace."""

    def __init__(self, layer: nn.MultiheadAttention, rank: int, scale: float) -> None:
        super().__init__()
        if layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn:
            raise QuiverError(
                "lora: an nn.MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn "
                "cannot be adapted: adapt linear layers of your own instead."
            )
        self.embed_dim, self.num_heads = layer.embed_dim, layer.num_heads
        self.dropout, self.batch_first = layer.dropout, layer.batch_first
        self.in_proj_weight, self.in_proj_bias = layer.in_proj_weight, layer.in_proj_bias
        self.out_proj = LoraLinear(layer.out_proj, rank, scale)
        self.lora = nn.ModuleList(
            _LowRank(part, len(part), rank, scale) for part in layer.in_proj_weight.chunk(3)
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise ValueError("is_causal needs an attn_mask, as in nn.MultiheadAttention")
        parts = [query, key, value]
        if not self.batch_first:
            parts = [part.transpose(0, 1) for part in parts]
        q, k, v = (self._heads(place, part) for place, part in enumerate(parts))
        mask = _join_masks(attn_mask, key_padding_mask, q)
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            weights = (scores if mask is None else scores + mask).softmax(dim=-1)
            attended = F.dropout(weights, self.dropout, self.training) @ v
        else:
            dropped = self.dropout if self.training else 0.0
            attended = F.scaled_dot_product_attention(q, k, v, mask, dropped)
        said: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        return (said if self.batch_first else said.transpose(0, 1)), weights

    def _heads(self, place: int, x: Tensor) -> Tensor:
        """Queries, keys or values, [n, heads, places, width]."""
        weight = self.in_proj_weight.chunk(3)[place]
        bias = None if self.in_proj_bias is None else self.in_proj_bias.chunk(3)[place]
        projected: Tensor = F.linear(x, weight, bias) + self.lora[place](x)
        return projected.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)


def _join_masks(attention: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
    """Both masks as one that is added to the scores; True means "not to be seen" in both."""

    def to_additive(mask: Tensor) -> Tensor:
        if mask.dtype != torch.bool:
            return mask.to(like.dtype)
        hidden = torch.zeros(mask.shape, dtype=like.dtype, device=like.device)
        return hidden.masked_fill(mask, -math.inf)

    combined = None
    if attention is not None:
        shape = attention.shape
        combined = (
            to_additive(attention)
            if len(shape) == 2
            else to_additive(attention).view(len(like), -1, *shape[1:])
        )
    if padding is not None:
        hidden = to_additive(padding)[:, None, None, :]
        combined = hidden if combined is None else combined + hidden
    return combined
