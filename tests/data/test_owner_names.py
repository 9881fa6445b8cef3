"""Who a client is under `natural`: the owner's name goes wherever the client's number goes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from quiverfl.data.federated import FederatedData, make_federated
from quiverfl.data.partition import make_partition
from quiverfl.data.sources import load_dataset
from quiverfl.errors import QuiverError
from quiverfl.runs.config import Config, parse_config
from quiverfl.runs.experiment import run_in_folder

NAMES = ("Ōsaka", "hosp-3", "hosp-7")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    columns = {
        "a": random.normal(size=60),
        "b": random.normal(size=60),
        "label": np.arange(60) % 2,
        "hospital": [NAMES[i % 3] for i in range(60)],
    }
    pd.DataFrame(columns).to_csv(tmp_path / "notes.csv", index=False)
    return tmp_path / "notes.csv"


def config(table: Path) -> Config:
    options = {"path": str(table), "owner": "hospital"}
    root = str(table.parent / "root")
    data = {"name": "table", "partition": "natural", "options": options, "root": root}
    run = {"rounds": 2, "threads": 1, "checkpoint_every": 1}
    return parse_config({"data": data, "topology": {"neighbors": 2}, "run": run})


def test_clients_have_the_names_of_their_owners(table: Path) -> None:
    data = load_dataset("table", table.parent / "root", path=table, owner="hospital")
    shares = make_partition(data, "natural", None, 0)
    assert shares.names == tuple(sorted(NAMES))
    few = make_partition(data, "natural", 2, 0, validation=0.2)
    for name, rows in zip(few.names, few.train, strict=True):
        assert {data.owner_names[owner] for owner in data.train_owner[rows]} == {name}
    assert make_partition(data, "iid", 3, 0).names == ()
    federated = make_federated(data, shares)
    assert federated.names == shares.names
    assert federated.select([2, 0]).names == (shares.names[2], shares.names[0])


def test_the_run_folder_says_who_is_who(table: Path) -> None:
    folder = table.parent / "run"
    run_in_folder(config(table), folder)
    with np.load(folder / "partition.npz", allow_pickle=False) as file:
        assert file["names"].tolist() == sorted(NAMES)
        before = {key: file[key] for key in file.files if key != "names"}
    # A folder from before there were names is still resumed.
    np.savez(folder / "partition.npz", allow_pickle=False, **before)
    (folder / "summary.json").write_text(json.dumps({"finished": False}))
    assert run_in_folder(config(table), folder)["finished"]


def test_names_given_in_python() -> None:
    pair = (np.zeros((2, 3), np.float32), np.array([0, 1]))
    data = FederatedData.from_arrays([pair, pair], [pair, pair], names=["ann", "bob"])
    assert data.names == ("ann", "bob")
    assert FederatedData.from_arrays([pair], [pair]).names == ()
    with pytest.raises(QuiverError, match="1 names for 2 clients"):
        FederatedData.from_arrays([pair, pair], [pair, pair], names=["ann"])
