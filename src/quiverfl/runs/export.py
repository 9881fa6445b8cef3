"""A personal model as files that other programs read."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from quiverfl.data.dataset import Dataset, make_stand_in
from quiverfl.data.federated import make_federated
from quiverfl.data.partition import Partition
from quiverfl.errors import QuiverError
from quiverfl.results.run_files import read_json, read_partition
from quiverfl.runs.config import Config
from quiverfl.runs.experiment import (
    Experiment,
    make_method,
    make_run_topology,
    make_task,
    restore_run,
)
from quiverfl.runs.folder import RunFolder
from quiverfl.runs.run import Prepared, Run
from quiverfl.support import durable
from quiverfl.support.environment import require_package
from quiverfl.task import call_arguments
from quiverfl.trees import Tree, tree_leaves, tree_map

# A model as a standalone program, which runs without this package: torch.export's, or ONNX.
#
# What was written is read back and tried on a few samples; a program that says something else is
# not left behind.


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
        require_package("export", "--onnx")
    write = _write_onnx if kind == "onnx" else _write_program
    with torch.no_grad():
        wanted = model(*arguments, **named)
    try:
        with _silence():
            actual = write(model, arguments, dict(named), out)
    except Exception as error:
        # Whatever torch or a library behind it says: the model itself is none of their kind.
        out.unlink(missing_ok=True)
        raise QuiverError(
            f"{out}: the model cannot be written as {WORDS[kind]} "
            f"({type(error).__name__}: {_first_line(error)})."
        ) from error
    if not _are_close(wanted, actual):
        out.unlink(missing_ok=True)
        raise QuiverError(
            f"{out}: as {WORDS[kind]} the model says something else of the same samples, so it was "
            "not written."
        )


def _program(
    model: nn.Module, arguments: tuple[Tree, ...], named: dict[str, Tree]
) -> torch.export.ExportedProgram:
    shapes: Any = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for _, leaf in tree_leaves((arguments, named)):
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
    given = [leaf.numpy() for _, leaf in tree_leaves((arguments, named))]
    names = [one.name for one in session.get_inputs()]
    return session.run(None, dict(zip(names, given, strict=True)))


def _are_close(wanted: Any, actual: Any) -> bool:
    ours, theirs = ([np.asarray(t) for t in _tensors(tree)] for tree in (wanted, actual))
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
    return tree_map(lambda leaf: torch.from_numpy(np.array(leaf[:2])), x)


Tensors = Mapping[str, Tensor]


def export_client(
    folder: RunFolder, client: int, stage: str, out: Path, also: Sequence[Kind] = ()
) -> Iterator[str]:
    """Write the model of one client of a run; what there is to say about it, line by line.

    `also` as programs that run without this package, normalisation and all, beside it. The folder
    is enough: neither the data nor the place where the run was started is needed.
    """
    refuse_other_files(out, [SUFFIXES[kind] for kind in also])
    run = restore_without_data(folder)
    experiment = run.made_from
    assert isinstance(experiment, Experiment)
    clients = experiment.data.clients
    if not 0 <= client < clients:
        raise QuiverError(f"--client {client}: there are {clients} clients, 0 … {clients - 1}.")
    which: Literal["local", "mixed"] = "local" if stage == "local" else "mixed"
    module = run.personal(client, which)
    model = module.model if isinstance(module, Prepared) else module
    names = experiment.data.names
    owner = {"client": client, "stage": stage, "rounds": len(run.rounds)}
    if names:
        owner["name"] = names[client]
    dataset, classes = experiment.dataset, experiment.own_classes(client)
    tensors = model.state_dict()
    yield from write_model(tensors, experiment.config, dataset, owner, out, classes)
    arguments, keywords = call_arguments(two_of(dataset.train_x), experiment.task.inputs)
    for kind in also:
        place = out.with_suffix(SUFFIXES[kind])
        try:
            write_traced(kind, module, arguments, keywords, place)
        except QuiverError as error:
            raise QuiverError(f"{error} {out} holds it all the same.") from error
        yield f"{place} is {WORDS[kind]}: it takes inputs as they are in the data."


def restore_without_data(folder: RunFolder) -> Run:
    """The run of a folder at its newest checkpoint, with made-up examples in place of its data.

    A folder of an earlier version does not describe its data, which is then read.
    """
    config = folder.config()
    described = read_json(folder.path / "config.json").get("dataset")
    if not isinstance(described, dict):
        return restore_run(folder)
    dataset, method = make_stand_in(described), make_method(config)
    path = folder.path / "partition.npz"
    arrays = read_partition(path)
    if not {"train_offsets", "train_counts", "test_counts"} <= arrays.keys():
        raise QuiverError(f"{path} is missing or incomplete: put it back, or run it again.")
    clients = len(arrays["train_offsets"]) - 1
    names = tuple(str(name) for name in arrays["names"]) if "names" in arrays else ()
    counts = arrays["train_counts"], arrays["test_counts"]
    rows = (np.zeros(1, dtype=np.int64),) * clients
    partition = Partition(rows, rows, *counts, names=names)
    own = None
    if config.task.labels == "own":
        own = [max(1, int(np.count_nonzero(of_client))) for of_client in counts[0] + counts[1]]
    experiment = Experiment(
        config,
        dataset,
        make_task(config, dataset, own),
        make_federated(dataset, partition),
        partition,
        method,
        make_run_topology(config, method, clients),
    )
    return restore_run(folder, experiment)


def refuse_other_files(out: Path, also: Iterable[str] = ()) -> None:
    """Refuse to write over files that are not of an earlier export of this name."""
    described = out.with_suffix(".json")
    try:
        before = json.loads(described.read_text(encoding="utf-8"))
        ours = isinstance(before, dict) and {"of", "model", "input_shape"} <= set(before)
    except (OSError, ValueError):
        ours = False
    for path in (out, described, *(out.with_suffix(suffix) for suffix in also)):
        if path.exists() and not ours:
            raise QuiverError(
                f"--out {out}: {path} is there already and is not of an earlier export: choose "
                "another name, or move it away."
            )


def write_model(
    tensors: Tensors,
    config: Config,
    dataset: Dataset,
    owner: Mapping[str, Any],
    out: Path,
    classes: Sequence[str] | None = None,
) -> Iterator[str]:
    """`out` and a .json that describes it; what there is to say about them, line by line.

    `classes` are the names of the client's own, where it has not all of them.
    """
    if out.suffix != ".safetensors":
        raise QuiverError(f"--out {out}: what is written is safetensors; let it end so.")
    durable.check_writable(out)
    described = out.with_suffix(".json")
    refuse_other_files(out)
    description = {"of": dict(owner), **_description(config, dataset)}
    if classes is not None:
        description["classes"] = list(classes)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Copies: what several parts of a model share is written for each of them.
        copies = {
            name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()
        }
        save_file(copies, str(out), {"format": "pt"})
        described.write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    except (OSError, safetensors.SafetensorError) as problem:
        raise QuiverError(f"--out {out}: cannot be written: {problem}.") from problem
    yield f"{len(tensors)} tensors in {out}; {described} says what they are made for."
    yield from _how_to_load(
        config, dataset, out, dataset.outputs if classes is None else len(classes)
    )


def _description(config: Config, dataset: Dataset) -> dict[str, Any]:
    return {
        "model": {"name": config.model.name, **config.model.options()},
        "input_shape": dataset.input_shape,
        "columns": dataset.columns,
        "categories": dataset.categories,
        "classes": dataset.class_names,
        "mean": dataset.mean,
        "std": dataset.std,
        "scale": tree_map(lambda x: 255 if x.dtype == np.uint8 else 1, dataset.train_x),
        "torch": torch.__version__,
    }


def _how_to_load(config: Config, dataset: Dataset, out: Path, outputs: Any) -> Iterator[str]:
    words = [repr(value) for value in (config.model.name, dataset.input_shape, outputs)]
    words += [f"{key}={value!r}" for key, value in config.model.options().items()]
    yield "To load them:"
    yield "    from safetensors.torch import load_file"
    yield "    from quiverfl.models import make_model"
    yield f"    model = make_model({', '.join(words)})"
    yield f"    model.load_state_dict(load_file({str(out)!r}))"
    if dataset.columns and dataset.is_single_array:
        yield f"Its inputs are the columns {', '.join(map(str, dataset.columns))}, in this order."
    if dataset.mean:
        yield "Give it (x / scale - mean) / std per column or channel, with those of the .json."
