"""From a data set to what every client holds, in one call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quiverfl.data import partition as ways
from quiverfl.data.dataset import Dataset
from quiverfl.data.federated import Augment, FederatedData, federate
from quiverfl.data.sources import load_dataset
from quiverfl.errors import QuiverError

_KEPT = ("samples_per_client", "test_per_client", "validation")


def partition(
    dataset: Dataset | str,
    name: str = "dirichlet",
    clients: int | None = None,
    seed: int = 0,
    *,
    augment: str | Augment | None = None,
    mapped: bool = False,
    **options: Any,
) -> FederatedData:
    """Share a data set (or one by its name) out between clients: what `simulate` takes.

    `name` is a way in data.partition.PARTITIONS and `options` are its own (alpha,
    classes_per_client, min_samples) or samples_per_client, test_per_client and validation. 20
    clients unless given; under "natural" every owner is one. `mapped` leaves the inputs on disk,
    where they lie there, and reads a batch when it is used: for data larger than memory.
    """
    found = load_dataset(dataset) if isinstance(dataset, str) else dataset
    if not isinstance(found, Dataset):
        raise QuiverError(
            f"dataset is a {type(found).__name__}: give what qv.load_dataset returns, or its name; "
            "arrays of your own that are shared out already go into qv.FederatedData.from_arrays."
        )
    if not isinstance(name, str):
        raise QuiverError(f"partition {name!r}: give a name, such as 'dirichlet'.")
    number = 20 if clients is None and name != "natural" else clients
    shares = ways.make_partition(found, name, number, seed, **options)
    origin = {
        "name": found.name,
        "clients": shares.clients,
        "partition": name,
        **ways.partition_options(name, {k: v for k, v in options.items() if k not in _KEPT}),
        **{key: options[key] for key in _KEPT if options.get(key) is not None},
        "augment": augment if isinstance(augment, str) else "none" if augment is None else "own",
        "seed": seed,
    }
    return replace(federate(found, shares, augment, mapped), origin=origin)
