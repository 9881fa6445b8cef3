"""A model as a program of its own, which runs without this package: torch.export's, or ONNX.

What was written is read back and tried on a few samples; a program that says something else is not
left behind.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from quiverfl.errors import QuiverError
from quiverfl.extras import require
from quiverfl.trees import Tree, leaves, mapped

Kind: TypeAlias = Literal["onnx", "program"]
SUFFIXES: dict[Kind, str] = {"onnx": ".onnx", "program": ".pt2"}
WORDS: dict[Kind, str] = {"onnx": "ONNX", "program": "a program of torch.export"}
TOLERANCE = 1e-4
"""Other kernels add in another order."""


def write_traced(
    kind: Kind, model: nn.Module, arguments: tuple[Tree, ...], named: Mapping[str, Tree], out: Path
) -> None:
    """For any number of samples; `arguments` and `named` are two or more of them."""
    if kind == "onnx":
        require("export", "--onnx")
    write = _write_onnx if kind == "onnx" else _write_program
    with torch.no_grad():
        wanted = model(*arguments, **named)
    try:
        with _silence():
            found = write(model, arguments, dict(named), out)
    except Exception as error:
        # Whatever torch or a library behind it says: the model itself is none of their kind.
        out.unlink(missing_ok=True)
        raise QuiverError(
            f"{out}: the model cannot be written as {WORDS[kind]} "
            f"({type(error).__name__}: {_first_line(error)})."
        ) from error
    if not _alike(wanted, found):
        out.unlink(missing_ok=True)
        raise QuiverError(
            f"{out}: as {WORDS[kind]} the model says something else of the same samples, so it was "
            "not written."
        )


def _program(
    model: nn.Module, arguments: tuple[Tree, ...], named: dict[str, Tree]
) -> torch.export.ExportedProgram:
    shapes: Any = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for _, leaf in leaves((arguments, named)):
        shapes[leaf] = {0: torch.export.Dim.DYNAMIC}
    return torch.export.export(model, arguments, named, dynamic_shapes=shapes)


def _write_program(
    model: nn.Module, arguments: tuple[Tree, ...], named: dict[str, Tree], out: Path
) -> Any:
    torch.export.save(_program(model, arguments, named), out)
    return torch.export.load(out).module()(*arguments, **named)


def _write_onnx(
    model: nn.Module, arguments: tuple[Tree, ...], named: dict[str, Tree], out: Path
) -> Any:
    import onnxruntime

    made = torch.onnx.export(_program(model, arguments, named), dynamo=True, verbose=False)
    assert made is not None
    made.save(out)
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    given = [leaf.numpy() for _, leaf in leaves((arguments, named))]
    names = [one.name for one in session.get_inputs()]
    return session.run(None, dict(zip(names, given, strict=True)))


def _alike(wanted: Any, found: Any) -> bool:
    ours, theirs = ([np.asarray(t) for t in _tensors(tree)] for tree in (wanted, found))
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)
        for a, b in zip(ours, theirs, strict=True)
    )


def _tensors(tree: Any) -> list[Any]:
    """Also of a library's own output objects, in their order."""
    if isinstance(tree, Mapping):
        return [leaf for part in tree.values() for leaf in _tensors(part)]
    if isinstance(tree, list | tuple):
        return [leaf for part in tree for leaf in _tensors(part)]
    if isinstance(tree, Tensor):
        return [tree.detach().numpy()]
    return [] if tree is None else [tree]


@contextmanager
def _silence() -> Iterator[None]:
    """Torch has much to say about exporting, none of which is for this command's user."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else "it does not say why").rstrip(".")


def two_of(x: Tree) -> Tree:
    """Two samples of arrays, as tensors of their own."""
    return mapped(lambda leaf: torch.from_numpy(np.array(leaf[:2])), x)
