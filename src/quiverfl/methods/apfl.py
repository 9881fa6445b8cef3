"""APFL: every client mixes an own model with the global one, and learns how much of each.

Deng, Kamani and Mahdavi, "Adaptive Personalized Federated Learning", 2020, Algorithm 1.

    paper      here                  meaning
    w_i        (state.u, state.v)    the client's version of the global model, averaged
    v_i        (own_u, own_v)        the client's own model, never sent
    α_i        state.alpha           how much of the own model is in the mixture
    v̄_i        personal(state)       α v + (1 - α) w: what is evaluated

Both models take their steps batch by batch on the same batch; α moves once a round, before them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from quiverfl.methods.contract import (
    Interleaved,
    Message,
    Method,
    Moment,
    Once,
    Phase,
    Start,
    Train,
)
from quiverfl.methods.options import Count, UnitInterval
from quiverfl.methods.parts import model
from quiverfl.methods.server import Weighting, averaged, sample_weight, weighted
from quiverfl.methods.state import Personal, Scalar, Shared
from quiverfl.task import Point, Task


class APFLState(NamedTuple):
    u: Shared  # w, the global model
    v: Personal
    own_u: Shared  # the client's own model
    own_v: Personal
    alpha: Scalar
    samples: Scalar


@dataclass(frozen=True)
class APFL(Method[APFLState]):
    epochs: Count = 5
    alpha: UnitInterval = 0.5
    adaptive: bool = True
    weighting: Weighting = "samples"

    name = "apfl"
    title = "APFL"
    topology = "star"

    def init(self, task: Task, start: Start) -> APFLState:
        alpha = start.point.shared.new_tensor(self.alpha)
        samples = sample_weight(start, self.weighting)
        return APFLState(*start.point, *start.point, alpha=alpha, samples=samples)

    def phases(self, task: Task) -> tuple[Phase[APFLState], ...]:
        """The own model first: it then sees the global one as it was before the batch."""
        train_own: Train[APFLState] = Train(
            part="whole",
            point=lambda state: Point(state.own_u, state.own_v),
            at=_mixture,
            gradient=lambda g, _, state: Point(state.alpha * g.shared, state.alpha * g.personal),
            absorb=lambda state, own: state._replace(own_u=own.shared, own_v=own.personal),
        )
        train_global: Train[APFLState] = Train(
            part="whole",
            point=model,
            absorb=lambda state, trained: state._replace(u=trained.shared, v=trained.personal),
        )
        both = Interleaved((train_own, train_global), epochs=self.epochs)
        adapt = Once(self._adapt, gradient=True)
        return (adapt, both) if self.adaptive else (both,)

    def _adapt(self, state: APFLState, moment: Moment) -> APFLState:
        """Equation 10: α ← α - η ⟨v - w, ∇F(v̄)⟩, kept in [0, 1]."""
        assert moment.gradient is not None
        slope = torch.dot(state.own_u - state.u, moment.gradient.shared)
        slope = slope + torch.dot(state.own_v - state.v, moment.gradient.personal)
        return state._replace(alpha=(state.alpha - moment.rate * slope).clamp(0, 1))

    def message(self, state: APFLState) -> Message:
        return weighted(state.samples, u=state.u, v=state.v)

    def merge(self, state: APFLState, mixed: Message) -> APFLState:
        return state._replace(u=averaged(mixed, "u"), v=averaged(mixed, "v"))

    def personal(self, state: APFLState) -> Point:
        return _mixture(Point(state.own_u, state.own_v), state)


def _mixture(own: Point, state: APFLState) -> Point:
    """v̄ = α v + (1 - α) w."""
    return Point(
        state.alpha * own.shared + (1 - state.alpha) * state.u,
        state.alpha * own.personal + (1 - state.alpha) * state.v,
    )
