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

from quiverfl.methods.blocks import (
    Weighting,
    average_leaf,
    model_params,
    sample_weight,
    weight_message,
)
from quiverfl.methods.contract import (
    Interleaved,
    Message,
    Method,
    Phase,
    SingleStep,
    Start,
    StepInfo,
    Train,
)
from quiverfl.methods.state import Personal, Scalar, Shared
from quiverfl.options import Count, UnitInterval
from quiverfl.task import Params, Task


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
        alpha = start.params.shared.new_tensor(self.alpha)
        samples = sample_weight(start, self.weighting)
        return APFLState(*start.params, *start.params, alpha=alpha, samples=samples)

    def phases(self, task: Task) -> tuple[Phase[APFLState], ...]:
        """The own model first: it then sees the global one as it was before the batch."""
        train_own: Train[APFLState] = Train(
            part="whole",
            params=lambda state: Params(state.own_u, state.own_v),
            gradient_at=_mixture,
            gradient=lambda g, _, state: Params(state.alpha * g.shared, state.alpha * g.personal),
            update=lambda state, own: state._replace(own_u=own.shared, own_v=own.personal),
        )
        train_global: Train[APFLState] = Train(
            part="whole",
            params=model_params,
            update=lambda state, trained: state._replace(u=trained.shared, v=trained.personal),
            model=1,
        )
        both = Interleaved((train_own, train_global), epochs=self.epochs)
        adapt = SingleStep(self._adapt, needs_gradient=True)
        return (adapt, both) if self.adaptive else (both,)

    def _adapt(self, state: APFLState, info: StepInfo) -> APFLState:
        """Equation 10: α ← α - η ⟨v - w, ∇F(v̄)⟩, kept in [0, 1]."""
        assert info.gradient is not None
        slope = torch.dot(state.own_u - state.u, info.gradient.shared)
        slope = slope + torch.dot(state.own_v - state.v, info.gradient.personal)
        return state._replace(alpha=(state.alpha - info.lr * slope).clamp(0, 1))

    def message(self, state: APFLState) -> Message:
        return weight_message(state.samples, u=state.u, v=state.v)

    def merge(self, state: APFLState, mixed: Message) -> APFLState:
        return state._replace(u=average_leaf(mixed, "u"), v=average_leaf(mixed, "v"))

    def personal(self, state: APFLState) -> Params:
        return _mixture(Params(state.own_u, state.own_v), state)


def _mixture(own: Params, state: APFLState) -> Params:
    """v̄ = α v + (1 - α) w."""
    return Params(
        state.alpha * own.shared + (1 - state.alpha) * state.u,
        state.alpha * own.personal + (1 - state.alpha) * state.v,
    )
