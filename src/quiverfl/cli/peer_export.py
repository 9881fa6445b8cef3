"""A peer's personal model as a file that other programs read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import safetensors.numpy

from quiverfl.config import Config
from quiverfl.data.dataset import Dataset
from quiverfl.errors import QuiverError
from quiverfl.peer.peer_folder import PeerFolder
from quiverfl.peer.setup import configuration, dataset_of, restored_learner


def export_model(folder: PeerFolder, out: Path) -> Iterator[str]:
    """Write `out` and a .json that describes it; what there is to say about them, line by line."""
    tensors = restored_learner(folder).model()
    config = configuration(folder)
    dataset = dataset_of(folder, config)
    described = out.with_suffix(".json")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        safetensors.numpy.save_file(tensors, str(out), {"peer": folder.own.name, "format": "pt"})
        described.write_text(json.dumps(_description(config, dataset), indent=1) + "\n")
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
        "scale": 255 if dataset.train_x.dtype.kind == "u" else 1,
    }


def _how_to_load(config: Config, dataset: Dataset, out: Path) -> Iterator[str]:
    words = [repr(value) for value in (config.model.name, dataset.input_shape, dataset.outputs)]
    words += [f"{key}={value!r}" for key, value in config.model.options().items()]
    yield "To load them:"
    yield "    from safetensors.torch import load_file"
    yield "    from quiverfl.models import make_model"
    yield f"    model = make_model({', '.join(words)})"
    yield f"    model.load_state_dict(load_file({str(out)!r}))"
    if dataset.mean:
        yield "Give it (x / scale - mean) / std per column or channel, with those of the .json."
