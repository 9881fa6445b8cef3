"""What a simulation leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quiverfl.data.federated import InputTransform
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.exchange.exchange import Exchange
from quiverfl.engine.history import History
from quiverfl.engine.shard import Shard
from quiverfl.errors import QuiverError, suggest
from quiverfl.methods.state import Role, field_roles
from quiverfl.options import python_number, read_options
from quiverfl.results.summary import summarize_attacked
from quiverfl.support.cards import ReprCard, format_thousands
from quiverfl.task import InputStyle, Params, call_arguments
from quiverfl.transforms.attacks import choose_attackers
from quiverfl.trees import Tree, tree_map
from quiverfl.types import Stage

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from quiverfl.engine.simulate import Simulation


def format_last_scores(summary: Mapping[str, Any]) -> dict[str, str]:
    """The last mean over clients at each stage, in words."""
    return {
        f"{stage} {summary['metric']}": f"{reports['last']['mean']:.4f}"
        for stage, reports in summary["stages"].items()
    }


class ClientState(dict[str, Any]):
    """A client's state by field; `state.u` and `state["u"]` are the same."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no field {name!r}; {suggest(name, self)}") from None


class Prepared(nn.Module):
    """A model that takes inputs as they were in the data, before they were normalised."""

    def __init__(
        self, model: nn.Module, prepare: InputTransform, inputs: InputStyle = "arguments"
    ) -> None:
        super().__init__()
        self.model, self.prepare, self._inputs = model, prepare, inputs

    def forward(self, *several: Tree, **named: Tree) -> Any:
        """Several inputs come as the model takes them, or as one dictionary or tuple."""
        x = named or (several[0] if len(several) == 1 else several)
        like = next(self.model.parameters())

        def cast(leaf: Tensor) -> Tensor:
            return leaf.to(like.device, like.dtype if leaf.is_floating_point() else None)

        arguments, keywords = call_arguments(tree_map(cast, self.prepare(x)), self._inputs)
        return self.model(*arguments, **keywords)


class Run(ReprCard):
    """History, states and models of a simulation."""

    config: dict[str, Any] | None = None
    """What it was made from, where that was a configuration."""
    made_from: object = None
    """The Experiment it was made from, where there was one."""

    def __init__(
        self, simulation: Simulation, shard: Shard, exchange: Exchange, history: History
    ) -> None:
        self.simulation = simulation
        self._task, self._data = simulation.task, simulation.data
        self._shard, self._exchange, self._history = shard, exchange, history

    def title(self) -> str:
        return f"Run of {self._shard.method.title}"

    def fields(self) -> dict[str, str]:
        done, planned = len(self._history.records), self.simulation.settings.rounds
        rounds = (
            format_thousands(done)
            if done == planned
            else f"{format_thousands(done)} of {format_thousands(planned)}"
        )
        return {
            "clients": format_thousands(len(self._shard.ids)),
            "rounds": rounds,
            **(format_last_scores(self.summary) if self._history.evaluations else {}),
        }

    @property
    def complete(self) -> bool:
        """Whether all its rounds were run: not if it was stopped early, interrupted or diverged."""
        return len(self._history.records) >= self.simulation.settings.rounds

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
            "method": {"name": method.name, **read_options(method)},
            **summarize_attacked(self.history, self.rounds, self.attackers),
            "carried_out": self._shard.execution.record,
        }

    @property
    def attackers(self) -> list[int]:
        """Clients that were made to attack: not among those whose means are reported."""
        made = self.simulation
        found = choose_attackers(
            made.transforms.adversary, made.settings.seed, made.topology.clients
        )
        return [int(client) for client in found]

    def personal(self, client: int, stage: Stage = "mixed") -> nn.Module:
        """The client's own model, ready to use: after the last communication, or before it.

        It takes inputs as they are in the data. Where the data were normalised for training the
        model does that itself (`.prepare`), and the bare model is its `.model`.
        """
        model = self._task.make_module(self._point(client, stage))
        normalize = self._data.normalize or self._data.prepare
        return model if normalize is None else Prepared(model, normalize, self._task.inputs).eval()

    def state(self, client: int) -> ClientState:
        """The client's state; parts like u and v as named tensors. Without push-sum, mu is 1."""
        row = self._row(client)
        state = self._shard.state
        kinds = field_roles(type(state))
        fields = {
            name: self._named(role, getattr(state, name)[row].clone())
            for name, role in kinds.items()
        }
        return ClientState({"mu": torch.ones((), dtype=torch.float64), **fields})

    def parameters(self, client: int, stage: Stage = "mixed") -> dict[str, Tensor]:
        """The trained parameters of the client's model, by name."""
        return self._task.named_params(self._point(client, stage))

    def _point(self, client: int, stage: Stage) -> Params:
        if stage not in ("mixed", "local"):
            raise QuiverError(f"stage {stage!r}: {suggest(stage, ('mixed', 'local'))}")
        row = self._row(client)
        rounds = len(self._history.records)
        if stage == "local" and row not in self._shard.local.points and rounds:
            why = "pass keep_local=True." if self.complete else "the run ended early."
            raise QuiverError(f"the models before the last communication were not kept: {why}")
        return self._shard.model(row, stage)

    def checkpoint(self) -> Checkpoint:
        """The whole state as it is, a copy: `simulate(resume=…)` with the same arguments continues
        from it, or, after the last round, gives the same Run back without computing anything."""
        rounds = len(self._history.records)
        return Checkpoint.take(rounds, self._shard, self._exchange, self._history).copy()

    def save(self, folder: Path | str, name: str | None = None) -> Path:
        """Write a run folder, as the command line does: `quiver report` and `load_run` read it.

        `name` says what the data is called there, if no configuration says it.
        """
        from quiverfl.runs.reader import save_run

        return save_run(self, Path(folder), name)

    def plot(self, metric: str | None = None, stage: Stage | None = None) -> Figure:
        """Learning curves: the mean over clients at both stages or one, and their quartiles."""
        from quiverfl.results.figures import plot_run

        return plot_run(self.history, self._shard.method.title, metric, stage)

    def _named(self, role: Role, leaf: Tensor) -> Any:
        layouts = {"shared": self._task.shared_layout, "personal": self._task.personal_layout}
        return leaf if role not in layouts else layouts[role].split(leaf)

    def _row(self, client: int) -> int:
        count = len(self._shard.ids)
        number = python_number(client)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
            raise QuiverError(f"client {client!r}: there are {count} clients, 0 … {count - 1}.")
        return number
