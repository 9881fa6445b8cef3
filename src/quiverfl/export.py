"""A personal model as files that other programs read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
import safetensors.numpy
import torch

from quiverfl.config import Config
from quiverfl.data.dataset import Dataset
from quiverfl.errors import QuiverError
from quiverfl.experiment import Experiment, restored
from quiverfl.models.traced import SUFFIXES, WORDS, Kind, two_of, write_traced
from quiverfl.run_folder import RunFolder
from quiverfl.task import given
from quiverfl.trees import mapped

Tensors = Mapping[str, np.ndarray[Any, Any]]


def export_client(
    folder: RunFolder, client: int, stage: str, out: Path, also: Sequence[Kind] = ()
) -> Iterator[str]:
    """Write the model of one client of a run; what there is to say about it, line by line.

    `also` as programs that run without this package, normalisation and all, beside it.
    """
    run = restored(folder)
    experiment = run.made_from
    assert isinstance(experiment, Experiment)
    clients = experiment.data.clients
    if not 0 <= client < clients:
        raise QuiverError(f"--client {client}: there are {clients} clients, 0 … {clients - 1}.")
    which: Literal["local", "mixed"] = "local" if stage == "local" else "mixed"
    named = run.parameters(client, which)
    tensors = {name: tensor.numpy().copy() for name, tensor in named.items()}
    names = experiment.data.names
    owner = {"client": client, "stage": stage, "rounds": len(run.rounds)}
    if names:
        owner["name"] = names[client]
    yield from write_model(tensors, experiment.config, experiment.dataset, owner, out)
    arguments, keywords = given(two_of(experiment.dataset.train_x), experiment.task.inputs)
    for kind in also:
        place = out.with_suffix(SUFFIXES[kind])
        try:
            write_traced(kind, run.personal(client, which), arguments, keywords, place)
        except QuiverError as error:
            raise QuiverError(f"{error} {out} holds it all the same.") from error
        yield f"{place} is {WORDS[kind]}: it takes inputs as they are in the data."


def write_model(
    tensors: Tensors, config: Config, dataset: Dataset, owner: Mapping[str, Any], out: Path
) -> Iterator[str]:
    """`out` and a .json that describes it; what there is to say about them, line by line."""
    if out.suffix != ".safetensors":
        raise QuiverError(f"--out {out}: what is written is safetensors; let it end so.")
    described = out.with_suffix(".json")
    description = {"of": dict(owner), **_description(config, dataset)}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        safetensors.numpy.save_file(dict(tensors), str(out), {"format": "pt"})
        described.write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    except (OSError, safetensors.SafetensorError) as problem:
        raise QuiverError(f"--out {out}: cannot be written: {problem}") from problem
    yield f"{len(tensors)} tensors in {out}; {described} says what they are made for."
    yield from _how_to_load(config, dataset, out)


def _description(config: Config, dataset: Dataset) -> dict[str, Any]:
    return {
        "model": {"name": config.model.name, **config.model.options()},
        "input_shape": dataset.input_shape,
        "classes": dataset.class_names,
        "mean": dataset.mean,
        "std": dataset.std,
        "scale": mapped(lambda x: 255 if x.dtype == np.uint8 else 1, dataset.train_x),
        "torch": torch.__version__,
    }


def _how_to_load(config: Config, dataset: Dataset, out: Path) -> Iterator[str]:
    words = [repr(value) for value in (config.model.name, dataset.input_shape, dataset.outputs)]
    words += [f"{key}={value!r}" for key, value in config.model.options().items()]
    yield "To load them:"
    yield "    from safetensors.torch import load_file"
    yield "    from quiverfl.models import make_model"
    yield f"    model = make_model({', '.join(words)})"
    yield f"    model.load_state_dict(load_file({str(out)!r}), strict=False)"
    if dataset.mean:
        yield "Give it (x / scale - mean) / std per column or channel, with those of the .json."
