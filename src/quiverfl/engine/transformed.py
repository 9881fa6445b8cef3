"""The exchange of a run with its transforms, and the data that it trains on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quiverfl.data.federated import FederatedData
from quiverfl.engine.alterations import Alterations
from quiverfl.engine.altered_exchange import AlteredExchange
from quiverfl.engine.coded_exchange import CodedExchange, is_fixed
from quiverfl.engine.everyone import HERE, Everyone
from quiverfl.engine.exchange import Exchange, MatrixExchange
from quiverfl.engine.judged_exchange import JudgedExchange
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.share_exchange import ShareExchange
from quiverfl.engine.splitting import splitting
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Message, Method
from quiverfl.topologies.topology import Topology
from quiverfl.transforms.adversary import attackers
from quiverfl.transforms.chosen import Transforms
from quiverfl.transforms.coding import Coding
from quiverfl.transforms.dither import BLOCK

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def transformed_exchange(
    transforms: Transforms,
    method: Method,
    topology: Topology,
    settings: RunSettings,
    first: Callable[[], Message] = dict,
    everyone: Everyone = HERE,
    rows: Integers | None = None,
) -> Exchange:
    """Who mixes, as `MatrixExchange` says it, with what is done to messages before and after.

    `first` gives what clients would send before they train. `rows` are the clients that are here,
    if not all are, and `everyone` asks the others.
    """
    ids = np.arange(topology.clients) if rows is None else rows
    made: Exchange
    kept: Callable[[], Floats] | None = None
    if settings.arithmetic == "peers":
        made = _as_peers_do(transforms, method, topology, settings)
    else:
        coded = transforms.compression is not None
        product = partial(everyone.mix, multiple=BLOCK) if coded else everyone.mix
        inner = MatrixExchange(method.delay, product, rows)
        made = _mixing(inner, transforms, method, topology, settings, everyone, rows)
        kept = inner.kept
    if Alterations.asked_for(transforms):
        apart = settings.arithmetic == "peers"
        altered = Alterations(
            transforms,
            settings.seed,
            ids,
            topology.clients,
            method.mass,
            first(),
            everyone,
            apart,
            settings.rounds,
        )
        made = AlteredExchange(made, altered, ids, kept)
    return made


def _as_peers_do(
    transforms: Transforms, method: Method, topology: Topology, settings: RunSettings
) -> Exchange:
    compression = transforms.compression
    return ShareExchange(
        method.mass,
        splitting(method, topology, settings.rounds),
        settings.rounds,
        None if compression is None else Coding(compression, settings.seed),
        transforms.robustness,
    )


def _mixing(
    inner: MatrixExchange,
    transforms: Transforms,
    method: Method,
    topology: Topology,
    settings: RunSettings,
    everyone: Everyone,
    rows: Integers | None,
) -> Exchange:
    alone = rows is None
    ids = np.arange(topology.clients) if rows is None else rows
    made: Exchange = inner
    if transforms.compression is not None:
        replica = keeps_replicas(transforms, method, topology, settings.rounds)
        fused = alone and method.delay == 0
        made = CodedExchange(
            inner, transforms.compression, settings.seed, ids, method.mass, replica, fused
        )
    if transforms.robustness is not None:
        made = JudgedExchange(
            made, transforms.robustness, settings.seed, settings.rounds, method.mass, everyone
        )
    return made


def trained_on(
    transforms: Transforms,
    data: FederatedData,
    seed: int,
    ids: Integers | None = None,
    clients: int | None = None,
) -> FederatedData:
    """The data with the labels that attackers train on; honest clients and tests are as given.

    `ids` are the clients of the data, of so many `clients`, if these are not all of them.
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
        np.isin(own, attackers(transforms.adversary, seed, clients or len(own)))
    ):
        rows = slice(int(data.train.offsets[row]), int(data.train.offsets[row + 1]))
        flipped[rows] = data.classes - 1 - labels[rows]
    return replace(data, train=replace(data.train, y=flipped))


def keeps_replicas(transforms: Transforms, method: Method, topology: Topology, rounds: int) -> bool:
    """Whether differences to replicas are sent, or the numbers themselves."""
    compression = transforms.compression
    if compression is None or compression.feedback != "auto":
        return compression is not None and compression.feedback == "replica"
    # Judged links change from round to round.
    still = transforms.robustness is None and is_fixed(topology, rounds)
    return method.mass is None and still
