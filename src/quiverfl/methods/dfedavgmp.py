"""DFedAvgM-P: DFedAvgM that mixes only the shared part; the undirected half of DFedPGP's Table 4.

Liu et al., CVPR 2024, module ablation: {whole, partial} × {undirected, directed}.

    paper      here       meaning
    u_i        state.u    shared parameters, mixed on an undirected graph
    v_i        state.v    the classifier, which stays

The paper does not say how it trains. `alternating` (v, then u, exactly as DFedPGP does) isolates
what direction adds; without it both parts are trained jointly for `shared_epochs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quiverfl.methods.contract import Message, Start, Train, check_epochs
from quiverfl.methods.plain import PlainState
from quiverfl.task import Point, Task


@dataclass(frozen=True)
class DFedAvgMP:
    personal_epochs: int = 1
    shared_epochs: int = 5
    alternating: bool = True

    name: ClassVar[str] = "dfedavgmp"
    title: ClassVar[str] = "DFedAvgM-P"
    carries_mass: ClassVar[bool] = False
    delay: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_epochs(self)

    def init(self, task: Task, start: Start) -> PlainState:
        return PlainState(*start.point)

    def phases(self, task: Task) -> tuple[Train, ...]:
        train_personal = Train(
            part="personal",
            epochs=self.personal_epochs,
            point=self.personal,
            absorb=lambda state, point: PlainState(*point),
            personal_rate=True,
            sent=False,
        )
        train_shared = Train(
            part="shared" if self.alternating else "whole",
            epochs=self.shared_epochs,
            point=self.personal,
            absorb=lambda state, point: PlainState(*point),
            personal_rate=not self.alternating,
        )
        return (train_personal, train_shared) if self.alternating else (train_shared,)

    def message(self, state: PlainState) -> Message:
        return {"u": state.u}

    def merge(self, state: PlainState, mixed: Message) -> PlainState:
        return PlainState(u=mixed["u"], v=state.v)

    def personal(self, state: PlainState) -> Point:
        return Point(state.u, state.v)
