"""Per-FedAvg (first order): a model that is good after one step of each client.

Fallah, Mokhtari and Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach", NeurIPS 2020, Algorithm 1 without the Hessian (FO).

    paper      here           meaning
    w          (state.u, .v)  the meta-model, averaged
    α          inner_lr       the step a client takes to make it its own
    β          Training.lr    the step of the meta-model
    D, D'      the first half of a batch, and the rest

What is evaluated is a copy after one step with α on the client's own data.
"""

from __future__ import annotations

from dataclasses import dataclass

from quiverfl.methods.blocks import (
    ServerState,
    Weighting,
    average_leaf,
    model_params,
    plain_steps,
    sample_weight,
    train_whole,
    weight_message,
)
from quiverfl.methods.contract import Lookahead, Message, Method, Start, Train
from quiverfl.options import Count, Positive
from quiverfl.task import Params, Task


@dataclass(frozen=True)
class PerFedAvg(Method[ServerState]):
    epochs: Count = 5
    inner_lr: Positive = 0.01
    weighting: Weighting = "samples"

    name = "perfedavg"
    title = "Per-FedAvg"
    topology = "star"

    def init(self, task: Task, start: Start) -> ServerState:
        return ServerState(*start.params, samples=sample_weight(start, self.weighting))

    def phases(self, task: Task) -> tuple[Train, ...]:
        """Lines 7-8: w̃ = w - α ∇f(w, D), then w ← w - β ∇f(w̃, D')."""
        return (train_whole(self.epochs, lookahead=Lookahead(self._inner, split_batch=True)),)

    def _inner(self, gradient: Params, w: Params, state: ServerState) -> Params:
        return Params(
            w.shared - self.inner_lr * gradient.shared,
            w.personal - self.inner_lr * gradient.personal,
        )

    def message(self, state: ServerState) -> Message:
        return weight_message(state.samples, u=state.u, v=state.v)

    def merge(self, state: ServerState, mixed: Message) -> ServerState:
        return state._replace(u=average_leaf(mixed, "u"), v=average_leaf(mixed, "v"))

    def personal(self, state: ServerState) -> Params:
        return model_params(state)

    def adapt(self, task: Task) -> Train[Params]:
        """One inner step on the copy that is evaluated: the state here is that copy."""
        return Train(
            part="whole",
            steps=1,
            params=lambda copy: copy,
            update=lambda _, adapted: Params(adapted.shared, adapted.personal),
            settings=lambda training: plain_steps(training, self.inner_lr),
        )
