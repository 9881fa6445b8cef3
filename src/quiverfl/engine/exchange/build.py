"""Builds the exchange of a run: its core, and the stages that its transforms ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from torch import Tensor

from quiverfl.data.federated import FederatedData
from quiverfl.engine.checks.peers import choose_message_split
from quiverfl.engine.collective import LocalWorld, World
from quiverfl.engine.exchange.compression import CompressionStage, is_fixed
from quiverfl.engine.exchange.exchange import Core, Exchange, MessageStage
from quiverfl.engine.exchange.matrix import MatrixProduct, compiled_matches_torch
from quiverfl.engine.exchange.peer_arithmetic import PeerArithmetic
from quiverfl.engine.exchange.stages import (
    AttackStage,
    LastMessages,
    NoiseStage,
    RobustStage,
    UpdateStage,
)
from quiverfl.engine.settings import RunSettings
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Message, Method
from quiverfl.topologies.topology import Topology
from quiverfl.transforms import Transforms
from quiverfl.transforms.attacks import choose_attackers
from quiverfl.transforms.codec import MessageCodec
from quiverfl.transforms.noise import BLOCK
from quiverfl.transforms.privacy import UpdatePrivacy
from quiverfl.types import Integers


def build_exchange(
    transforms: Transforms,
    method: Method,
    topology: Topology,
    settings: RunSettings,
    first: Callable[[], Message] = dict,
    world: World | None = None,
) -> Exchange:
    """The exchange of a run.

    `first` gives what clients would send before they train. `world` is given where some clients
    are elsewhere.
    """
    world = world or LocalWorld(np.arange(topology.clients))
    ids, is_complete = world.ids, len(world.ids) == topology.clients
    rows = None if is_complete else ids
    peers, compression = settings.arithmetic == "peers", transforms.compression
    stages: list[MessageStage] = []
    if changes_updates(transforms):
        stages += build_update_stages(
            transforms,
            settings.seed,
            world,
            topology.clients,
            method.mass,
            first(),
            settings.rounds,
            by_row=peers,
        )
    core: Core
    if peers:
        # Receivers compare, and senders code, in the peers' own order: inside the core.
        split = choose_message_split(method, topology, settings.rounds)
        codec = None if compression is None else MessageCodec(compression, settings.seed)
        core = PeerArithmetic(method.mass, split, settings.rounds, codec, transforms.robustness)
        return Exchange(core, stages, rows)
    blocks = compression is not None
    product = partial(world.mix, multiple=BLOCK) if blocks else world.mix
    compiled_matches_torch()  # compiled and tried here, not in the first round
    core = MatrixProduct(method.delay, product, rows)
    if transforms.robustness is not None:
        rule = transforms.robustness
        stages.append(RobustStage(rule, settings.seed, settings.rounds, method.mass, world))
    if compression is not None:
        replica = keeps_replicas(transforms, method, topology, settings.rounds)
        fused = is_complete and method.delay == 0
        stages.append(
            CompressionStage(core, compression, settings.seed, ids, method.mass, replica, fused)
        )
    return Exchange(core, stages, rows)


def changes_updates(transforms: Transforms) -> bool:
    """Whether some clients send another update than their own."""
    return transforms.adversary is not None or isinstance(transforms.privacy, UpdatePrivacy)


def build_update_stages(
    transforms: Transforms,
    seed: int,
    world: World,
    clients: int,
    mass: str | None,
    first: Message,
    rounds: int = 1,
    by_row: bool = False,
) -> list[UpdateStage]:
    """Attack and noise, and before them what they start from; the run has this many `clients`."""
    last = LastMessages(first, world.ids, mass, seed, by_row)
    attackers = np.isin(world.ids, choose_attackers(transforms.adversary, seed, clients))
    stages: list[UpdateStage] = [last]
    if transforms.adversary is not None:
        rule = transforms.robustness
        stages.append(AttackStage(transforms.adversary, attackers, last, mass, rule, rounds))
    if isinstance(transforms.privacy, UpdatePrivacy):
        stages.append(NoiseStage(transforms.privacy, ~attackers, last, world))
    return stages


def poison_training_data(
    transforms: Transforms,
    data: FederatedData,
    seed: int,
    ids: Integers | None = None,
    clients: int | None = None,
) -> FederatedData:
    """The data with flipped training labels for attackers; the tests keep their labels.

    `ids`: the client numbers of `data` when it holds only some of the `clients`.
    """
    if transforms.adversary is None or not transforms.adversary.flips_labels:
        return data
    labels = data.train.y
    if data.classes is None or not isinstance(labels, Tensor) or labels.ndim != 1:
        raise QuiverError(
            'adversary.name = "label_flip" needs data with one class label per sample; choose '
            "another attack."
        )
    flipped = labels.clone()
    own = np.arange(data.clients) if ids is None else ids
    for row in np.flatnonzero(
        np.isin(own, choose_attackers(transforms.adversary, seed, clients or len(own)))
    ):
        rows = slice(int(data.train.offsets[row]), int(data.train.offsets[row + 1]))
        flipped[rows] = data.classes - 1 - labels[rows]
    return replace(data, train=replace(data.train, y=flipped))


def keeps_replicas(transforms: Transforms, method: Method, topology: Topology, rounds: int) -> bool:
    """Whether clients send differences to replicas instead of the values themselves."""
    compression = transforms.compression
    if compression is None or compression.feedback != "auto":
        return compression is not None and compression.feedback == "replica"
    # A robust rule changes the weights of links from round to round.
    still = transforms.robustness is None and is_fixed(topology, rounds)
    return method.mass is None and still
