"""A peer's personal model as a file that other programs read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quiverfl.export import write_model
from quiverfl.peer.peer_folder import PeerFolder
from quiverfl.peer.setup import configuration, dataset_of, restored_learner


def export_model(folder: PeerFolder, out: Path) -> Iterator[str]:
    """Write `out` and a .json that describes it; what there is to say about them, line by line."""
    tensors = restored_learner(folder).model()
    config = configuration(folder)
    yield from write_model(
        tensors, config, dataset_of(folder, config), {"peer": folder.own.name}, out
    )
