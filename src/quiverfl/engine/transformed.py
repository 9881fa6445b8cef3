"""The exchange of a run with its transforms, and which of them a method and a graph allow."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.data.federated import FederatedData
from quiverfl.engine.coded_exchange import CodedExchange, is_fixed
from quiverfl.engine.exchange import Exchange, MatrixExchange
from quiverfl.engine.footprint import first_state
from quiverfl.engine.mixing import mix
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.share_exchange import exchange_for
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Method
from quiverfl.methods.optional import Weighs
from quiverfl.task import Task
from quiverfl.topologies.topology import Topology
from quiverfl.transforms.chosen import Transforms
from quiverfl.transforms.compression import Compression
from quiverfl.transforms.dither import BLOCK

Integers = npt.NDArray[np.int64]


def transformed_exchange(
    transforms: Transforms,
    method: Method,
    topology: Topology,
    settings: RunSettings,
    product: Any = mix,
    rows: Integers | None = None,
) -> Exchange:
    """Who mixes, as `MatrixExchange` says it, with what is done to messages before and after."""
    compression = transforms.compression
    if compression is None:
        if rows is None:
            return exchange_for(method, topology, settings)
        return MatrixExchange(method.delay, product, rows)
    inner = MatrixExchange(method.delay, partial(product, multiple=BLOCK), rows)
    return CodedExchange(
        inner,
        compression,
        settings.seed,
        np.arange(topology.clients) if rows is None else rows,
        method.mass,
        keeps_replicas(compression, method, topology, settings.rounds),
        fused=product is mix and method.delay == 0,
    )


def keeps_replicas(
    compression: Compression, method: Method, topology: Topology, rounds: int
) -> bool:
    """Whether differences to replicas are sent, or the numbers themselves."""
    if compression.feedback == "auto":
        return method.mass is None and is_fixed(topology, rounds)
    return compression.feedback == "replica"


def check_transforms(
    transforms: Transforms,
    task: Task,
    data: FederatedData,
    method: Method,
    topology: Topology,
    settings: RunSettings,
) -> None:
    """Refuse what would not mean anything, before anything is computed or written."""
    if transforms.record() and settings.arithmetic == "peers":
        raise QuiverError(
            'run.arithmetic = "peers" computes what peers do, and peers send whole messages as '
            f"yet: leave it out, or the section [{next(iter(transforms.record()))}]."
        )
    if transforms.compression is not None:
        _check_compression(transforms.compression, task, data, method, topology, settings)


def _check_compression(
    compression: Compression,
    task: Task,
    data: FederatedData,
    method: Method,
    topology: Topology,
    settings: RunSettings,
) -> None:
    out = "Leave [compression] out for this method."
    if method.topology == "isolated":
        raise QuiverError(f"{method.title} sends nothing that could be compressed. {out}")
    if isinstance(method, Weighs):
        raise QuiverError(
            f"{method.title} codes its messages itself (it declares their payload): what was not "
            f"sent of a numerator would be divided by what was sent of its denominator. {out}"
        )
    if topology(0).hub:
        raise QuiverError(
            "compression over a star: a server's average goes back whole, and a client that is "
            "not sampled has no share with which the rest could stay. Name a topology without a "
            "server, such as random_push or random_regular, or leave [compression] out."
        )
    if settings.dtype not in (torch.float32, torch.float64):
        raise QuiverError(
            f"dtype = {settings.dtype}: compression codes float32 and float64; use one of them."
        )
    _check_leaves(task, method, method.message(first_state(task, data, method, settings)))
    if keeps_replicas(compression, method, topology, settings.rounds):
        _check_replicas(method, topology, settings)


def _check_leaves(task: Task, method: Method, message: dict[str, Tensor]) -> None:
    """Sums of parameters can wait for their rest; ratios of sums cannot."""
    sizes = {(task.shared_layout.size,), (task.personal_layout.size,)}
    for name, leaf in message.items():
        if name != method.mass and tuple(leaf.shape) not in sizes:
            raise QuiverError(
                f"{method.title} sends {name!r} of shape {tuple(leaf.shape)} beside parameters or "
                "in their place and divides by what arrives of it: what was not sent of a "
                "numerator would be divided by a denominator that was. Compression is for methods "
                "that send parameters alone, or with a push-sum mass (dfedpgp, osgp, dfedavgm). "
                "Leave [compression] out for this method."
            )


def _check_replicas(method: Method, topology: Topology, settings: RunSettings) -> None:
    if method.mass is not None:
        raise QuiverError(
            f'compression.feedback = "replica": {method.title} has a push-sum mass, which is sent '
            "whole; a model that follows replicas would not match it. Leave feedback out: what is "
            "not sent stays with its sender."
        )
    if not is_fixed(topology, settings.rounds):
        raise QuiverError(
            f'compression.feedback = "replica": the graph of {topology.name} changes, and a new '
            "neighbour has no replica. Use a graph that stays the same (ring, torus, exponential) "
            'without participation or link failures, or feedback = "remainder".'
        )
