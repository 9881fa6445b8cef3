"""A peer's folder → the objects a peer runs with. Here experiments and peers meet."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quiverfl.config import Config, parse
from quiverfl.data.dataset import Dataset, Integers
from quiverfl.data.federated import FederatedData, federate
from quiverfl.data.partition import Partition
from quiverfl.data.sources import load_dataset
from quiverfl.engine.execution import check_kernels
from quiverfl.engine.shard import Shard
from quiverfl.engine.splitting import Split, check_peer_method, splitting
from quiverfl.engine.transform_checks import check_transforms
from quiverfl.engine.transformed import trained_on
from quiverfl.errors import QuiverError, QuiverWarning
from quiverfl.experiment import (
    load_data,
    make_method,
    make_task,
    settings_of,
    share_out,
    topology_for,
)
from quiverfl.methods.contract import Method
from quiverfl.peer.agreement import Agreement
from quiverfl.peer.joining import create_store, join_store
from quiverfl.peer.learner import ShardLearner
from quiverfl.peer.ledger import UNIT
from quiverfl.peer.node import Node
from quiverfl.peer.peer_folder import OwnData, PeerFolder
from quiverfl.peer.store import NoStore, Store
from quiverfl.seeds import stream
from quiverfl.task import Task
from quiverfl.topologies.topology import Topology
from quiverfl.transforms.privacy import DPSGD
from quiverfl.trees import mapped

CACHE = "cache"
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


@dataclass(frozen=True, eq=False)
class PeerParts:
    """What a peer is made of, from its folder."""

    learner: ShardLearner
    method: Method
    task: Task
    topology: Topology
    config: Config
    partition: Partition
    """Of all clients, as far as this peer knows their data."""
    split: Split


def build_learner(folder: PeerFolder) -> PeerParts:
    """The shard of this one client, with the same method objects as in a simulation."""
    config, number = configuration(folder), folder.number
    method = make_method(config)
    check_peer_method(method)
    if config.run.gradients:
        text = "run.gradients: no peer can measure them alone; only the simulation records them."
        warnings.warn(text, QuiverWarning, stacklevel=2)
    members = len(folder.roster.members)
    topology = topology_for(config, method, members)
    split = splitting(method, topology, config.run.rounds)
    dataset = dataset_of(folder, config)
    shares = share_out(config, dataset) if folder.own.data is None else _all_of(dataset)
    data = _federated(config, dataset, shares)
    data = data.only([number]) if folder.own.data is None else data
    task = make_task(config, dataset)
    settings = settings_of(config, members)
    epochs = settings.epochs_per_client
    mine = replace(
        settings,
        device=folder.own.device,
        # A lone client has nobody to be computed together with.
        executor="sequential" if settings.executor == "auto" else settings.executor,
        epochs_per_client=None if epochs is None else (epochs[number],),
    )
    check_kernels(task, mine)
    transforms = config.transforms()
    as_peers = replace(settings, arithmetic="peers", epochs_per_client=mine.epochs_per_client)
    check_transforms(transforms, task, data, method, topology, as_peers)
    private = transforms.privacy
    shard = Shard(
        task,
        trained_on(transforms, data, settings.seed, np.array([number]), members),
        method,
        config.training.training(),
        mine,
        clients=[number],
        private=private if isinstance(private, DPSGD) else None,
    )
    if folder.own.data is not None:
        shares = _placed(shares, number, members)
    learner = ShardLearner(shard, task, method, transforms, members, topology.looks)
    return PeerParts(learner, method, task, topology, config, shares, split)


def _federated(config: Config, dataset: Dataset, shares: Partition) -> FederatedData:
    augment = None if config.data.augment == "none" else config.data.augment
    return federate(dataset, shares, augment, config.data.mapped)


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


def _all_of(dataset: Dataset) -> Partition:
    """Everything in the data set belongs to this one client."""
    parts = [np.arange(len(y)) for y in (dataset.train_y, dataset.test_y)]
    counts = [
        np.bincount(y, minlength=dataset.classes)[None] for y in (dataset.train_y, dataset.test_y)
    ]
    return Partition((parts[0],), (parts[1],), counts[0], counts[1])


def _placed(own: Partition, number: int, clients: int) -> Partition:
    """The one client of `own` among all of them, of whose data nothing is known."""

    def tuples(part: tuple[Integers, ...]) -> tuple[Integers, ...]:
        return tuple(part[0] if n == number else part[0][:0] for n in range(clients))

    def rows(counts: Integers) -> Integers:
        placed = np.zeros((clients, counts.shape[1]), dtype=np.int64)
        placed[number] = counts[0]
        return placed

    return Partition(
        tuples(own.train), tuples(own.test), rows(own.train_counts), rows(own.test_counts)
    )


async def assemble(
    folder: PeerFolder,
    join: bool = False,
    trust_store: bool = False,
    record: Record = _ignore,
    parts: PeerParts | None = None,
) -> Node:
    """A node on a folder, its store opened, founded or joined."""
    folder.identity()
    parts = parts or build_learner(folder)
    agreement = folder.agreement(parts.learner.manifest)
    store = await _opened(folder, parts.learner, agreement, join)
    _check_agreement(folder, store, agreement)
    if parts.config.transforms().privacy is not None and folder.peers.noise == "secret":
        parts.learner.draw_noise_from(_secret(store))
    run = parts.config.run
    settings = folder.settings(run.rounds, run.evaluate_every, trust_store)
    rule = parts.config.transforms().robustness
    settings = replace(settings, copies=parts.split == "copies", rule=rule)
    return Node(
        parts.learner,
        parts.topology,
        store,
        folder.path,
        agreement,
        settings,
        folder.limits(),
        record=record,
    )


def _secret(store: Store) -> bytes:
    """Of this peer's noise: made once, and kept, so that a round done again sends the same."""
    if not store.meta("noise"):
        store.note("noise", secrets.token_hex(32))
    return bytes.fromhex(store.meta("noise"))


def _check_agreement(folder: PeerFolder, store: Store, agreement: Agreement) -> None:
    if store.meta("agreement") != agreement.hash:
        store.close()
        raise QuiverError(
            f"{folder.store} belongs to another run or configuration: run.toml, the model or the "
            "shape of the data has changed since it was made. Put it back, or start a new folder."
        )


async def _opened(folder: PeerFolder, learner: ShardLearner, agreement: Any, join: bool) -> Store:
    try:
        return Store.open(folder.store)
    except NoStore:
        if join:
            return await join_store(folder.store, learner, agreement, folder.roster, folder.path)
        return create_store(folder.store, learner, agreement)


def restored_learner(folder: PeerFolder) -> ShardLearner:
    """The learner as its store has it, for export."""
    learner = build_learner(folder).learner
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
