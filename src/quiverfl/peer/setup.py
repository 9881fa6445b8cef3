"""From a peer's folder to the objects that it runs with: data, learner, store, node."""

from __future__ import annotations

import asyncio
import secrets
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quiverfl.data.dataset import Dataset
from quiverfl.data.federated import FederatedData, make_federated
from quiverfl.data.partition import Partition
from quiverfl.data.sources import load_dataset
from quiverfl.data.sources.arrays import format_names
from quiverfl.engine.checks.functions import check_functions
from quiverfl.engine.checks.messages import check_transforms
from quiverfl.engine.checks.model import check_batch_sizes
from quiverfl.engine.checks.peers import MessageSplit, check_peer_method, choose_message_split
from quiverfl.engine.checks.probe import ModelProbe
from quiverfl.engine.exchange.build import poison_training_data
from quiverfl.engine.execution import check_kernels
from quiverfl.engine.shard import Shard
from quiverfl.engine.unseen import find_sent_parts
from quiverfl.errors import QuiverError, QuiverWarning
from quiverfl.methods.contract import Method
from quiverfl.models import PRETRAINED, check_model
from quiverfl.models.pretrained import hash_weights
from quiverfl.peer.accounts.ledger import UNIT, Accounts
from quiverfl.peer.accounts.signing import signature_check
from quiverfl.peer.accounts.store import Memory, NoStore, Store, Trace
from quiverfl.peer.accounts.transactions import make_first_entry
from quiverfl.peer.context import OTHER_STEP, Agreement, PeerContext
from quiverfl.peer.folder import OwnData, PeerFolder
from quiverfl.peer.learner import Learner, ShardLearner
from quiverfl.peer.link.joining import join_store
from quiverfl.peer.node import Node
from quiverfl.runs.config import Config, TrackConfig, parse_config
from quiverfl.runs.experiment import (
    load_data,
    make_method,
    make_run_topology,
    make_task,
    normalize_inputs,
    partition_data,
)
from quiverfl.seeds import stream
from quiverfl.task import Task
from quiverfl.topologies.topology import Topology
from quiverfl.transforms.privacy import DPSGD
from quiverfl.trees import tree_map
from quiverfl.types import Integers

CACHE = "cache"
Record = Callable[[dict[str, Any]], None]


CLOCK = ("devices", "network", "clock")


def load_peer_config(folder: PeerFolder) -> Config:
    config = parse_config(folder.agreed_experiment, str(folder.path / "run.toml"))
    members = len(folder.roster.members)
    check_shared_config(config)
    if any(getattr(config, name) != Config.model_fields[name].default for name in CLOCK):
        raise QuiverError(
            "[devices], [network] and [clock] are for simulations: real peers take the time they "
            "take. Leave these sections out of run.toml."
        )
    if config.data.clients is None or config.data.clients > members:
        raise QuiverError(
            f"data.clients = {config.data.clients}, but the roster has {members} peers: write "
            f"clients = {members} in the configuration's [data]. A roster may have more peers than "
            "that: they join later, when all agree."
        )
    for key, word in (("precision", "auto"), ("layout", "measure")):
        if getattr(config.run, key) == word:
            raise QuiverError(
                f'run.{key} = "{word}": each peer would choose for itself; name the choice.'
            )
    return config


def check_shared_config(config: Config) -> None:
    """Refuse what a simulation can do with this configuration and peers cannot."""
    if config.data.unseen is not None:
        raise QuiverError(
            "data.unseen between peers: a peer knows its own data alone, so nobody could test the "
            "others; leave it out, and simulate the same configuration with it."
        )
    if config.data.changes_members:
        raise QuiverError(
            "data.joins and data.leaves are for simulations: a peer joins when all have signed "
            "quiver peer amend --join, and leaves with quiver peer leave. Leave them out."
        )
    weights = config.model.options().get("weights")
    if config.model.name == PRETRAINED and weights and "sha256" not in config.model.options():
        digest = hash_weights(Path(weights).expanduser())
        raise QuiverError(
            "model.weights between peers: all must begin with the same file, whose frozen part is "
            f'never sent. Write sha256 = "{digest}" into [model] of run.toml.'
        )


def count_founders(config: Config) -> int:
    """Number of members that begin the run: the first of the roster."""
    return config.data.clients or 0


def count_clients(folder: PeerFolder, config: Config) -> int:
    """Number of clients that this peer knows at its start: founders, or all up to itself."""
    return max(count_founders(config), folder.number + 1)


@dataclass(frozen=True, eq=False)
class PeerParts:
    """The objects that a peer is made of."""

    learner: ShardLearner
    method: Method
    task: Task
    topology: Topology
    config: Config
    partition: Partition
    """The partition of all clients, as far as this peer knows their data."""
    split: MessageSplit


def check_run_file(folder: PeerFolder) -> None:
    """Refuse a run.toml that `quiver peer run` would refuse, as far as that needs no data."""
    config = load_peer_config(folder)
    check_model(config.model.name, config.model.options())
    method = make_method(config)
    check_peer_method(method)
    topology = make_run_topology(config, method, count_clients(folder, config))
    choose_message_split(method, topology, config.run.rounds)


def refuse_simulation_keys(config: Config) -> None:
    """Refuse keys that need all clients' numbers."""
    if config.run.patience is not None or config.track != TrackConfig():
        raise QuiverError(
            "run.patience and [track] are for simulations: no peer knows the mean over clients. "
            "Leave them out; `metrics` in peer.toml serves a peer's own numbers."
        )


def build_learner(folder: PeerFolder) -> PeerParts:
    """Make the shard of this one client, with the same method objects as in a simulation."""
    config, number = load_peer_config(folder), folder.number
    method = make_method(config)
    check_peer_method(method)
    if config.run.gradients:
        text = "run.gradients: no peer can measure them alone; only the simulation records them."
        warnings.warn(text, QuiverWarning, stacklevel=2)
    if config.task.labels == "own":
        raise QuiverError(
            'task.labels = "own" is for simulations: a peer with data of its own makes its own '
            "model anyway. Leave it out."
        )
    refuse_simulation_keys(config)
    members = count_clients(folder, config)
    if number >= count_founders(config) and folder.own.data is None:
        raise QuiverError(
            f"{folder.own.name!r} joins a run of {config.data.clients} clients, whose data set has "
            "no part for it: give it data of its own, quiver peer init --data."
        )
    topology = make_run_topology(config, method, members)
    split = choose_message_split(method, topology, config.run.rounds)
    dataset = load_peer_dataset(folder, config)
    shared = folder.own.data is None
    partition = partition_data(config, dataset) if shared else _partition_whole(dataset)
    data = _make_data(config, dataset, partition)
    data = data.select([number]) if shared else data
    task = make_task(config, dataset)
    settings = config.run.for_clients(members)
    epochs = settings.epochs_per_client
    own_settings = replace(
        settings,
        device=folder.own.device,
        # A lone client has no group to be vectorised with.
        executor="sequential" if settings.executor == "auto" else settings.executor,
        epochs_per_client=None if epochs is None else (epochs[number],),
    )
    check_kernels(task, own_settings)
    check_batch_sizes(task, data, method.phases(task), config.training)
    probe = ModelProbe.from_data(task, data, settings.dtype)
    check_functions(method, task, probe, config.training, alike=True)
    transforms = config.transforms()
    as_peers = replace(
        settings, arithmetic="peers", epochs_per_client=own_settings.epochs_per_client
    )
    check_transforms(transforms, task, data, method, topology, as_peers)
    private = transforms.privacy
    shard = Shard(
        task,
        poison_training_data(transforms, data, settings.seed, np.array([number]), members),
        method,
        config.training,
        own_settings,
        clients=[number],
        private=private if isinstance(private, DPSGD) else None,
    )
    if not shared:
        partition = _place_client(partition, number, members)
    classes = () if shared else _find_common_classes(dataset, method, probe)
    learner = ShardLearner(shard, task, method, transforms, members, topology.reports, classes)
    return PeerParts(learner, method, task, topology, config, partition, split)


def _find_common_classes(dataset: Dataset, method: Method, probe: ModelProbe) -> tuple[str, ...]:
    """The names of classes, if the part of the model that distinguishes them is sent.

    Numbers are the same at all peers (`_check_numbering`).
    """
    numbers = all(name.isdecimal() for name in dataset.class_names)
    return () if numbers or not find_sent_parts(method, probe)[1] else dataset.class_names


def _make_data(config: Config, dataset: Dataset, partition: Partition) -> FederatedData:
    augment = None if config.data.augment == "none" else config.data.augment
    return make_federated(dataset, partition, augment, config.data.mapped)


def load_peer_dataset(folder: PeerFolder, config: Config) -> Dataset:
    """Load this peer's own data set, or the run's."""
    if folder.own.data is None:
        return load_data(config)
    return normalize_inputs(config, load_own_dataset(folder.own.data, folder.path))


def load_own_dataset(own: OwnData, folder: Path) -> Dataset:
    """Load a data set whose cache stays in the peer's folder, which only its owner can read."""
    location = {"path": folder / own.path} if own.path else {}
    cache = folder / CACHE
    cache.mkdir(mode=0o700, exist_ok=True)
    dataset = load_dataset(own.name, own.root, cache, **location, **own.options)
    _check_numbering(own, dataset)
    if len(dataset.test_y) or not own.test_share:
        return dataset
    return _hold_out(dataset, own.test_share)


def _check_numbering(own: OwnData, dataset: Dataset) -> None:
    """Refuse whole-number labels that were numbered by what this one file happens to hold."""
    names = list(dataset.class_names)
    whole = all(name.lstrip("-").isdecimal() for name in names)
    if whole and names != [str(label) for label in range(len(names))]:
        raise QuiverError(
            f"{own.path or own.name}: the labels are {format_names(names)}, and a peer that holds "
            "others would number them otherwise: set options.classes under [data] of peer.toml, "
            "the same at all peers (--data-option classes=COUNT); labels are then 0 … COUNT - 1."
        )


def _hold_out(dataset: Dataset, fraction: float) -> Dataset:
    """Set a fraction of the training examples aside for testing, the same one at every start."""
    order = stream(0, "peer test", len(dataset.train_y)).permutation(len(dataset.train_y))
    count = max(1, int(len(order) * fraction))
    test, train = np.sort(order[:count]), np.sort(order[count:])
    target = dataset.train_target
    return replace(
        dataset,
        train_x=tree_map(lambda leaf: leaf[train], dataset.train_x),
        train_y=dataset.train_y[train],
        test_x=tree_map(lambda leaf: leaf[test], dataset.train_x),
        test_y=dataset.train_y[test],
        train_target=None if target is None else tree_map(lambda leaf: leaf[train], target),
        test_target=None if target is None else tree_map(lambda leaf: leaf[test], target),
        train_owner=None,
        test_owner=None,
        owner_names=(),
    )


def _partition_whole(dataset: Dataset) -> Partition:
    """Give the whole data set to this one client."""
    parts = [np.arange(len(y)) for y in (dataset.train_y, dataset.test_y)]
    counts = [
        np.bincount(y, minlength=dataset.classes)[None] for y in (dataset.train_y, dataset.test_y)
    ]
    return Partition((parts[0],), (parts[1],), counts[0], counts[1])


def _place_client(own: Partition, number: int, clients: int) -> Partition:
    """Put the one client of `own` among all clients, of whose data nothing is known."""

    def tuples(part: tuple[Integers, ...]) -> tuple[Integers, ...]:
        return tuple(part[0] if n == number else part[0][:0] for n in range(clients))

    def rows(counts: Integers) -> Integers:
        matrix = np.zeros((clients, counts.shape[1]), dtype=np.int64)
        matrix[number] = counts[0]
        return matrix

    return Partition(
        tuples(own.train), tuples(own.test), rows(own.train_counts), rows(own.test_counts)
    )


async def assemble(
    folder: PeerFolder,
    join: bool = False,
    trust_store: bool = False,
    record: Record = lambda line: None,
    parts: PeerParts | None = None,
) -> Node:
    """Make a node on a folder; its store is opened, founded or joined."""
    folder.identity()
    parts = parts or build_learner(folder)
    agreement = folder.agreement(parts.learner.manifest)
    store = await _open_store(folder, parts, agreement, join, trust_store)
    _check_agreement(folder, store, agreement)
    if parts.config.transforms().privacy is not None and folder.peers.noise == "secret":
        parts.learner.draw_noise_from(_load_secret(store))
    run = parts.config.run
    settings = folder.settings(run.rounds, run.evaluate_every, trust_store)
    rule = parts.config.transforms().robustness
    founders = count_founders(parts.config)
    settings = replace(settings, copies=parts.split == "copies", rule=rule, founders=founders)
    ctx = PeerContext.open(folder.path, store, agreement, folder.limits())
    grow = partial(make_run_topology, parts.config, parts.method)
    return Node(ctx, parts.learner, parts.topology, settings, record, grow)


def _load_secret(store: Store) -> bytes:
    """Load the secret of this peer's noise, made once, so that a repeated round sends the same."""
    if not store.meta("noise"):
        store.save_meta("noise", secrets.token_hex(32))
    return bytes.fromhex(store.meta("noise"))


def _check_agreement(folder: PeerFolder, store: Store, agreement: Agreement) -> None:
    store_agreement = store.meta("agreement")
    if store_agreement != agreement.hash:
        store.close()
        if store_agreement == agreement.earlier_hash:
            raise QuiverError(f"{folder.store} was begun with the paper's step η/μ: {OTHER_STEP}")
        raise QuiverError(
            f"{folder.store} belongs to another run or configuration: run.toml, the model or the "
            "shape of the data has changed since it was made. Put it back, or start a new folder."
        )


async def _open_store(
    folder: PeerFolder, parts: PeerParts, agreement: Agreement, join: bool, believe: bool
) -> Store:
    try:
        store = Store.open(folder.store)
    except NoStore:
        founders, learner = count_founders(parts.config), parts.learner
        if join:
            roster, keys = folder.roster, folder.path
            return await join_store(
                folder.store, learner, agreement, roster, keys, believe, founders
            )
        if folder.number >= founders:
            raise QuiverError(
                f"{folder.own.name!r} is not among the {founders} clients that begin the run: it "
                "joins a run under way, quiver peer run --join."
            ) from None
        return create_store(folder.store, learner, agreement)
    try:
        await asyncio.to_thread(store.verify, signature_check(folder.roster))
    except QuiverError:
        store.close()
        raise
    return store


def restore_learner(folder: PeerFolder) -> ShardLearner:
    """Make the learner as its store has it, for export."""
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


# A founder's store


def create_store(
    folder: Path, learner: Learner, agreement: Agreement, trace: Trace = lambda point: None
) -> Store:
    """Make a founder's store: the initial model, μ = 1."""
    message = learner.message()
    memory = Memory(message, learner.rest())
    accounts = Accounts(agreement.name, UNIT)
    entry = make_first_entry("start", message)
    return Store.create(folder, accounts, memory, entry, agreement.hash, trace)
