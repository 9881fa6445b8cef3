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

from quiverfl.methods.blocks import model_params, train_personal, train_shared, train_whole
from quiverfl.methods.contract import Message, Method, Start, Train
from quiverfl.methods.state import Model
from quiverfl.options import Count
from quiverfl.task import Params, Task


@dataclass(frozen=True)
class DFedAvgMP(Method[Model]):
    personal_epochs: Count = 1
    shared_epochs: Count = 5
    alternating: bool = True

    name = "dfedavgmp"
    title = "DFedAvgM-P"
    topology = "random_regular"

    def init(self, task: Task, start: Start) -> Model:
        return Model(*start.params)

    def phases(self, task: Task) -> tuple[Train, ...]:
        if not self.alternating:
            return (train_whole(self.shared_epochs, use_personal_lr=True),)
        return train_personal(self.personal_epochs), train_shared(self.shared_epochs)

    def message(self, state: Model) -> Message:
        return {"u": state.u}

    def merge(self, state: Model, mixed: Message) -> Model:
        return Model(u=mixed["u"], v=state.v)

    def personal(self, state: Model) -> Params:
        return model_params(state)
