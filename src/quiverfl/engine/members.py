"""Apply members that join and leave to the clients' states and metrics.

A newcomer receives one message, that of a member, weighed so that its mass is what it brings: the
same as a peer that joins. A member that leaves keeps the model that it sent last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quiverfl.engine.collective import LocalWorld
from quiverfl.engine.local.vmap import vmap_clients
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.states import take_rows, write_rows
from quiverfl.errors import QuiverError
from quiverfl.topologies.membership import Membership
from quiverfl.topologies.topology import Topology
from quiverfl.transforms import Transforms
from quiverfl.transforms.privacy import UpdatePrivacy
from quiverfl.types import Flags, Integers, Metrics

if TYPE_CHECKING:
    from quiverfl.engine.shard import Shard


class Members:
    """The members of a run at the round that it is in."""

    def __init__(self, plan: Membership) -> None:
        self._plan = plan
        self._round = 0
        self._leaving: tuple[Integers, Any] = (np.array([], dtype=np.int64), None)

    @property
    def present(self) -> Flags:
        return self._plan.find_present(self._round)

    @property
    def staying(self) -> Flags:
        """The members who hold mass at the end of the round."""
        return self.present & self._plan.find_present(self._round + 1)

    def begin_round(self, shard: Shard, round: int) -> None:
        """Give each newcomer a member's message, weighed by the mass that the newcomer brings."""
        self._round = round
        newcomers, sponsors = self._plan.find_joining(round), self._plan.choose_sponsors(round)
        for newcomer, sponsor in zip(newcomers, sponsors, strict=True):
            message, mass = shard.outbox(np.array([sponsor])), shard.method.mass
            if mass is not None:
                weight = self._plan.grant / message[mass]
                message = {
                    name: leaf * weight.to(leaf.dtype).reshape(-1, *[1] * (leaf.dim() - 1))
                    for name, leaf in message.items()
                }
                message[mass] = torch.full_like(message[mass], self._plan.grant)
            rows = np.array([newcomer])
            merged = vmap_clients(shard.method.merge)(take_rows(shard.state, rows), message)
            write_rows(shard.state, rows, merged)

    def keep_leaving(self, shard: Shard) -> None:
        """Copy the states of members whose last round this is, before they give their mass away."""
        rows = self._plan.find_leaving(self._round)
        state = take_rows(shard.state, rows)
        self._leaving = rows, type(state)(*(leaf.clone() for leaf in state))

    def restore_leaving(self, shard: Shard) -> None:
        """Restore the last models of members that have left; no client is sent them."""
        rows, state = self._leaving
        if len(rows):
            write_rows(shard.state, rows, state)

    def hide_absent(self, metrics: Metrics) -> Metrics:
        """The metrics of members; NaN for all other clients."""
        return {name: np.where(self.present, values, np.nan) for name, values in metrics.items()}


def check_members(
    plan: Membership,
    topology: Topology,
    transforms: Transforms,
    settings: RunSettings,
    world: object,
    timed: bool,
    unseen: bool,
    delay: int,
) -> None:
    """Refuse what cannot be done with members that join and leave."""
    reasons = {
        "[clock] and [devices]": timed,
        "several ranks": world is not None and not isinstance(world, LocalWorld),
        "data.unseen": unseen,
        'run.arithmetic = "peers"': settings.arithmetic == "peers",
        "run.gradients": settings.gradients,
        'run.history = "hundredths"': settings.history == "hundredths",
        'privacy.name = "update", since a newcomer is given a model without noise': isinstance(
            transforms.privacy, UpdatePrivacy
        ),
        'compression.feedback = "replica"': getattr(transforms.compression, "feedback", "")
        == "replica",
        "[adversary]": transforms.adversary is not None,
        "method.delay": bool(delay),
    }
    for what, given in reasons.items():
        if given:
            raise QuiverError(
                f"data.joins and data.leaves do not go with {what}: leave one of them out."
            )
    late = [since for since in plan.rounds if since >= settings.rounds]
    if late:
        raise QuiverError(
            f"data.joins or data.leaves names round {late[0]}, and the run has "
            f"{settings.rounds} rounds, 0 to {settings.rounds - 1}."
        )
    if plan.clients != topology.clients:
        raise QuiverError(f"the membership is of {plan.clients} clients, not {topology.clients}.")
