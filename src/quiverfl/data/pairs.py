"""One's own arrays, a pair (inputs, targets) per client: what they must be, and end to end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quiverfl.data.split import Split, joined
from quiverfl.errors import QuiverError
from quiverfl.trees import Tree, first_leaf, leaves, mapped


def end_to_end(name: str, pairs: Sequence[tuple[Any, Any]]) -> Split:
    """Refuses, by client, what cannot be laid together."""
    parts: list[tuple[Tree, Tree]] = []
    first: tuple[Tree, Tree] | None = None
    for client, pair in enumerate(pairs):
        where = f"{name}, client {client}"
        x, y = (_tensors(where, part) for part in _pair(where, pair))
        rows = _check_rows(where, x, y)
        y = mapped(lambda leaf: leaf if leaf.is_floating_point() else leaf.long(), y)
        if first is not None and rows:
            _check_like(where, "inputs", x, first[0])
            _check_like(where, "targets", y, first[1])
        first = (x, y) if first is None and rows else first
        parts.append((x, y))
    if first is not None:  # a client without samples may have come with any shape
        empty_x, empty_y = (mapped(lambda leaf: leaf[:0], part) for part in first)
        parts = [(x, y) if len(first_leaf(y)) else (empty_x, empty_y) for x, y in parts]
    return joined(parts)


def _pair(where: str, pair: Any) -> tuple[Any, Any]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise QuiverError(f"{where}: give a pair (inputs, targets), not {type(pair).__name__}.")
    return pair[0], pair[1]


def _tensors(where: str, part: Any) -> Tree:
    several = isinstance(part, tuple) and any(hasattr(leaf, "__getitem__") for leaf in part)
    if isinstance(part, dict):
        return {str(key): _tensors(where, leaf) for key, leaf in part.items()}
    if several:
        return tuple(_tensors(where, leaf) for leaf in part)
    return _tensor(where, part)  # a list is rows


def _tensor(where: str, part: Any) -> Tensor:
    kind = getattr(part, "dtype", None)
    text = kind is not None and getattr(kind, "kind", "") in ("U", "O")
    if text or (isinstance(part, list) and part and isinstance(part[0], str)):
        raise QuiverError(
            f"{where}: text or objects ({kind or 'str'}): give numbers; labels that are text become"
            " numbers with names, y = numpy.unique(labels, return_inverse=True)."
        )
    try:
        return torch.as_tensor(part)
    except (TypeError, ValueError, RuntimeError) as error:
        said = str(error).rstrip(". ")
        raise QuiverError(f"{where}: a {type(part).__name__} is not an array: {said}.") from error


def _check_rows(where: str, x: Tree, y: Tree) -> int:
    """How many rows there are: every leaf has as many, and they are numbers."""
    rows: dict[str, int] = {}
    for kind, tree in (("inputs", x), ("targets", y)):
        for path, leaf in leaves(tree):
            called = f"{kind} {path!r}" if path else kind
            if not leaf.ndim:
                raise QuiverError(f"{where}: {called}: give an array with a row per sample.")
            if leaf.is_floating_point() and not torch.isfinite(leaf).all():
                advice = "; clean the data first." if kind == "inputs" else "."
                raise QuiverError(f"{where}: the {called} hold NaN or infinity{advice}")
            rows[called] = len(leaf)
    if not rows:
        raise QuiverError(f"{where}: there are no inputs and no targets.")
    if len(set(rows.values())) > 1:
        counts = " but ".join(f"{count} {called}" for called, count in rows.items())
        raise QuiverError(f"{where}: {counts}.")
    return next(iter(rows.values()))


def _check_like(where: str, what: str, tree: Tree, first: Tree) -> None:
    """Refuse leaves other than those of the first client that has samples."""
    mine, theirs = dict(leaves(tree)), dict(leaves(first))
    if list(mine) != list(theirs):
        raise QuiverError(
            f"{where}: {what} {list(mine)}, other clients have {list(theirs)}: give the same, in "
            "the same order."
        )
    for path, leaf in mine.items():
        if leaf.shape[1:] != theirs[path].shape[1:]:
            called = f"{what} {path!r}" if path else what
            raise QuiverError(
                f"{where}: {called} of shape {tuple(leaf.shape[1:])}, "
                f"other clients have {tuple(theirs[path].shape[1:])}."
            )
