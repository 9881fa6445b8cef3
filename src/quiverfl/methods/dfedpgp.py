"""DFedPGP: decentralized federated partial gradient push.

Liu et al., "Decentralized Directed Collaboration for Personalized Federated Learning", CVPR 2024.
Line numbers are those of its Algorithm 1.

    paper      here             meaning
    u_i        state.u          shared parameters, as push-sum carries them (biased)
    v_i        state.v          personal parameters: the classifier
    μ_i        state.mu         push-sum weight, 1 at the start
    z_i        debias(u, mu)    u_i / μ_i
    K_v, K_u   personal_epochs, shared_epochs
    η_v, η_u   Training.personal_lr, Training.lr
    p_{j,i}    graph.weights    chosen by the topology, not here

Differences from the paper: K counts epochs, as in its experiments, not single steps. The gradient
at z is applied to u with η, as line 10 says, so z moves by η/μ; `step_floor` bounds μ in that
quotient (off unless asked for). On `random_pull`, which the appendix says the experiments used,
rows sum to 1, μ stays 1 and de-biasing does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quiverfl.methods.contract import Message, Start, Train, check_epochs
from quiverfl.methods.pushsum import (
    PushSumState,
    bias,
    check_floor,
    debias,
    started,
    step_scale,
)
from quiverfl.task import Point, Task


@dataclass(frozen=True)
class DFedPGP:
    personal_epochs: int = 1
    shared_epochs: int = 5
    step_floor: float | None = None

    name: ClassVar[str] = "dfedpgp"
    title: ClassVar[str] = "DFedPGP"
    carries_mass: ClassVar[bool] = True
    delay: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_epochs(self)
        check_floor(self.step_floor)

    def init(self, task: Task, start: Start) -> PushSumState:
        """Line 1: z⁰ = u⁰, μ⁰ = 1."""
        return started(start)

    def phases(self, task: Task) -> tuple[Train, ...]:
        """Lines 5-8: v at fixed z. Lines 9-12: u at fixed v, its gradient taken at z."""
        train_personal = Train(
            part="personal",
            epochs=self.personal_epochs,
            point=self.personal,
            absorb=lambda state, point: state._replace(v=point.personal),
            personal_rate=True,
            sent=False,
        )
        train_shared = Train(
            part="shared",
            epochs=self.shared_epochs,
            point=self.personal,
            absorb=lambda state, point: state._replace(u=bias(point.shared, state.mu)),
            scale=lambda state: step_scale(state.mu, self.step_floor),
        )
        return train_personal, train_shared

    def message(self, state: PushSumState) -> Message:
        """Line 13: what is pushed, before the exchange weighs it with p."""
        return {"u": state.u, "mu": state.mu}

    def merge(self, state: PushSumState, mixed: Message) -> PushSumState:
        """Lines 14-15: the sums of what arrived, one's own share included."""
        return state._replace(u=mixed["u"], mu=mixed["mu"])

    def personal(self, state: PushSumState) -> Point:
        """Line 16 and the output: (z, v)."""
        return Point(debias(state.u, state.mu), state.v)
