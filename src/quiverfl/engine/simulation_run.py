"""What a simulation leaves behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from quiverfl.data.federated import FederatedData, Prepare
from quiverfl.engine.history import History
from quiverfl.engine.shard import Shard
from quiverfl.errors import QuiverError, nearest
from quiverfl.methods.options import options_of
from quiverfl.methods.state import Role, roles
from quiverfl.results.summary import summarize
from quiverfl.task import Inputs, Task, given
from quiverfl.trees import Tree, mapped

if TYPE_CHECKING:
    import pandas as pd


class ClientState(dict[str, Any]):
    """A client's state by field; `state.u` and `state["u"]` are the same."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no field {name!r}; {nearest(name, self)}") from None


class Prepared(nn.Module):
    """A model that takes inputs as they were in the data, before they were normalised."""

    def __init__(self, model: nn.Module, prepare: Prepare, inputs: Inputs = "arguments") -> None:
        super().__init__()
        self.model, self.prepare, self._inputs = model, prepare, inputs

    def forward(self, x: Tree) -> Any:
        """Inputs that are several arguments of the model are one dictionary or tuple here."""
        like = next(self.model.parameters())

        def cast(leaf: Tensor) -> Tensor:
            return leaf.to(like.device, like.dtype if leaf.is_floating_point() else None)

        arguments, keywords = given(mapped(cast, self.prepare(x)), self._inputs)
        return self.model(*arguments, **keywords)


class Run:
    """History, states and models of a simulation."""

    def __init__(self, task: Task, data: FederatedData, shard: Shard, history: History) -> None:
        self._task, self._data, self._shard, self._history = task, data, shard, history

    def __repr__(self) -> str:
        title, done = self._shard.method.title, len(self._history.records)
        return f"<Run: {title}, {len(self._shard.ids)} clients, {done} rounds>"

    @property
    def history(self) -> pd.DataFrame:
        """round, stage, client, and a column per metric."""
        return self._history.frame()

    @property
    def rounds(self) -> pd.DataFrame:
        """One row per round: seconds, bytes, steps, the range of μ, consensus distance."""
        return self._history.rounds()

    @property
    def summary(self) -> dict[str, Any]:
        """last / best / mean of the last ten, per stage; bytes, steps, seconds."""
        method = self._shard.method
        return {
            "method": {"name": method.name, **options_of(method)},
            **summarize(self.history, self.rounds),
        }

    def personal(self, client: int, stage: Literal["mixed", "local"] = "mixed") -> nn.Module:
        """The client's own model, ready to use: after the last communication, or before it.

        It takes inputs as they are in the data. Where the data were normalised for training the
        model does that itself (`.prepare`), and the bare model is its `.model`.
        """
        if stage not in ("mixed", "local"):
            raise QuiverError(f"stage {stage!r}: {nearest(stage, ('mixed', 'local'))}")
        row = self._row(client)
        rounds = len(self._history.records)
        if stage == "local" and row not in self._shard.local.points and rounds:
            raise QuiverError(
                "the models before the last communication were not kept: pass keep_local=True."
            )
        model = self._task.module(self._shard.model(row, stage))
        normalize = self._data.normalize or self._data.prepare
        return model if normalize is None else Prepared(model, normalize, self._task.inputs).eval()

    def state(self, client: int) -> ClientState:
        """The client's state; parts like u and v as named tensors. Without push-sum, mu is 1."""
        row = self._row(client)
        state = self._shard.state
        kinds = roles(type(state))
        fields = {
            name: self._named(role, getattr(state, name)[row].clone())
            for name, role in kinds.items()
        }
        return ClientState({"mu": torch.ones((), dtype=torch.float64), **fields})

    def _named(self, role: Role, leaf: Tensor) -> Any:
        layouts = {"shared": self._task.shared_layout, "personal": self._task.personal_layout}
        return leaf if role not in layouts else layouts[role].split(leaf)

    def _row(self, client: int) -> int:
        count = len(self._shard.ids)
        if not 0 <= client < count:
            raise QuiverError(f"client {client}: there are {count} clients, 0 … {count - 1}.")
        return client
