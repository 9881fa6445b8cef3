"""A peer's folder → the objects a peer runs with. Here experiments and peers meet."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quiverfl.config import Config, parse
from quiverfl.data.dataset import Dataset
from quiverfl.data.federated import FederatedData, federate
from quiverfl.data.partition import Partition
from quiverfl.data.sources import load_dataset
from quiverfl.engine.shard import Shard
from quiverfl.errors import QuiverError
from quiverfl.experiment import (
    load_data,
    make_method,
    make_task,
    settings_of,
    share_out,
    topology_for,
)
from quiverfl.peer.agreement import Agreement
from quiverfl.peer.joining import create_store, join_store
from quiverfl.peer.learner import ShardLearner
from quiverfl.peer.ledger import UNIT
from quiverfl.peer.metrics import JsonLines
from quiverfl.peer.node import Node
from quiverfl.peer.peer_folder import OwnData, PeerFolder
from quiverfl.peer.peer_settings import Outcome
from quiverfl.peer.store import NoStore, Store
from quiverfl.seeds import stream
from quiverfl.topologies.topology import Topology
from quiverfl.trees import mapped

HISTORY, CACHE = "history.jsonl", "cache"
Record = Callable[[dict[str, Any]], None]


def _ignore(line: dict[str, Any]) -> None:
    """Nobody keeps the history."""


def configuration(folder: PeerFolder) -> Config:
    config = parse(folder.experiment, str(folder.path / "run.toml"))
    members = len(folder.roster.members)
    if config.data.clients != members:
        raise QuiverError(
            f"data.clients = {config.data.clients}, but the roster has {members} peers: they must "
            f"be the same; write clients = {members} in the configuration's [data]."
        )
    return config


def build_learner(folder: PeerFolder) -> tuple[ShardLearner, Topology, Config]:
    """The shard of this one client, with the same method objects as in a simulation."""
    config, number = configuration(folder), folder.number
    method = make_method(config)
    members = len(folder.roster.members)
    topology = topology_for(config, method, members)
    if method.delay and folder.peers.mode == "sync":
        raise QuiverError(
            f"method.delay = {method.delay}: peers overlap by themselves in async mode; set "
            'peers.mode = "async" and delay = 0.'
        )
    dataset = dataset_of(folder, config)
    data = _own_share(config, dataset, number) if folder.own.data is None else _all_of(dataset)
    task = make_task(config, dataset)
    settings = settings_of(config, members)
    epochs = settings.epochs_per_client
    mine = replace(
        settings,
        device=folder.own.device,
        epochs_per_client=None if epochs is None else (epochs[number],),
    )
    shard = Shard(task, data, method, config.training.training(), mine, clients=[number])
    return ShardLearner(shard, task, method), topology, config


def _own_share(config: Config, dataset: Dataset, number: int) -> FederatedData:
    augment = None if config.data.augment == "none" else config.data.augment
    shares = share_out(config, dataset)
    return federate(dataset, shares, augment, config.data.mapped).only([number])


def dataset_of(folder: PeerFolder, config: Config) -> Dataset:
    """This peer's own data set, or the run's."""
    if folder.own.data is None:
        return load_data(config)
    return own_dataset(folder.own.data, folder.path)


def own_dataset(own: OwnData, folder: Path) -> Dataset:
    """Read with its arrays kept in the peer's folder, for its owner's eyes alone."""
    place = {"path": folder / own.path} if own.path else {}
    cache = folder / CACHE
    cache.mkdir(mode=0o700, exist_ok=True)
    dataset = load_dataset(own.name, own.root, cache, **place, **own.options)
    if len(dataset.test_y) or not own.test_share:
        return dataset
    return _held_out(dataset, own.test_share)


def _held_out(dataset: Dataset, share: float) -> Dataset:
    """Set a part of the training examples aside for testing, the same one at every start."""
    order = stream(0, "peer test", len(dataset.train_y)).permutation(len(dataset.train_y))
    count = max(1, int(len(order) * share))
    test, train = np.sort(order[:count]), np.sort(order[count:])
    learned = dataset.train_target
    return replace(
        dataset,
        train_x=mapped(lambda leaf: leaf[train], dataset.train_x),
        train_y=dataset.train_y[train],
        test_x=mapped(lambda leaf: leaf[test], dataset.train_x),
        test_y=dataset.train_y[test],
        train_target=None if learned is None else mapped(lambda leaf: leaf[train], learned),
        test_target=None if learned is None else mapped(lambda leaf: leaf[test], learned),
        train_owner=None,
        test_owner=None,
        owner_names=(),
    )


def _all_of(dataset: Dataset) -> FederatedData:
    """Everything in the data set belongs to this one client."""
    parts = [np.arange(len(y)) for y in (dataset.train_y, dataset.test_y)]
    counts = [
        np.bincount(y, minlength=dataset.classes)[None] for y in (dataset.train_y, dataset.test_y)
    ]
    return federate(dataset, Partition((parts[0],), (parts[1],), counts[0], counts[1]))


async def assemble(
    folder: PeerFolder, join: bool = False, trust_store: bool = False, record: Record = _ignore
) -> Node:
    """A node on a folder, its store opened, founded or joined."""
    folder.identity()
    learner, topology, config = build_learner(folder)
    agreement = folder.agreement(learner.manifest)
    store = await _opened(folder, learner, agreement, join)
    _check_agreement(folder, store, agreement)
    settings = folder.settings(config.run.rounds, config.run.evaluate_every, trust_store)
    return Node(
        learner, topology, store, folder.path, agreement, settings, folder.limits(), record=record
    )


def _check_agreement(folder: PeerFolder, store: Store, agreement: Agreement) -> None:
    if store.meta("agreement") != agreement.hash:
        store.close()
        raise QuiverError(
            f"{folder.store} belongs to another run or configuration: run.toml, the model or the "
            "shape of the data has changed since it was made. Put it back, or start a new folder."
        )


async def run_peer(folder: PeerFolder, join: bool, trust_store: bool) -> Outcome:
    """Everything from the folder to the end of the process."""
    torch.set_num_threads(folder.own.threads or 1)
    with (folder.path / HISTORY).open("a", buffering=1) as history:
        node = await assemble(folder, join, trust_store, lambda line: _write(history, line))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, node.stop)
        try:
            return await node.run()
        finally:
            node.store.close()


def _write(history: Any, line: dict[str, Any]) -> None:
    history.write(json.dumps(line) + "\n")


async def _opened(folder: PeerFolder, learner: ShardLearner, agreement: Any, join: bool) -> Store:
    try:
        return Store.open(folder.store)
    except NoStore:
        if join:
            return await join_store(folder.store, learner, agreement, folder.roster, folder.path)
        return create_store(folder.store, learner, agreement)


def log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("quiverfl.peer")
    logger.addHandler(handler)
    logger.setLevel(os.environ.get("QUIVER_LOG", "INFO"))


def restored_learner(folder: PeerFolder) -> ShardLearner:
    """The learner as its store has it, for export."""
    learner, _, _ = build_learner(folder)
    store = Store.open(folder.store)
    _check_agreement(folder, store, folder.agreement(learner.manifest))
    try:
        memory, accounts = store.memory(), store.accounts()
    finally:
        store.close()
    learner.restore(memory.rest)
    if not accounts.units:
        raise QuiverError(
            f"{folder.own.name!r} has left the run; its model is in "
            f"{folder.store / 'personal.safetensors'}."
        )
    learner.merge(memory.message, accounts.units / UNIT)
    return learner


def history_of(path: Path) -> list[dict[str, Any]]:
    """The rounds a peer has recorded; a line cut off by a crash is left out."""
    try:
        lines = (path / HISTORY).read_text().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found
