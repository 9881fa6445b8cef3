"""All clients in one process: `simulate`, and the run it returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from quiverfl.data.federated import FederatedData
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.exchange import MatrixExchange
from quiverfl.engine.history import History, Metrics, Record, Recorder
from quiverfl.engine.rounds import Schedule, checked, play
from quiverfl.engine.shard import Shard
from quiverfl.errors import QuiverError, Stopped, nearest
from quiverfl.methods.contract import Method, options_of
from quiverfl.results.summary import summarize
from quiverfl.task import Point, Task
from quiverfl.topologies.graph import Topology
from quiverfl.training import Training

if TYPE_CHECKING:
    import pandas as pd

EXECUTORS = ("auto", "vectorized", "sequential")


class ClientState(dict[str, Any]):
    """A client's state by field; `state.u` and `state["u"]` are the same."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no field {name!r}; {nearest(name, self)}") from None


class Run:
    """What a simulation leaves behind."""

    def __init__(self, task: Task, method: Method, shard: Shard, history: History) -> None:
        self._task, self._method, self._shard, self._history = task, method, shard, history

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
        return {
            "method": {"name": self._method.name, **options_of(self._method)},
            **summarize(self.history, self.rounds),
        }

    def personal(self, client: int, stage: Literal["mixed", "local"] = "mixed") -> nn.Module:
        """The client's own model, ready to use: after the last communication, or before it."""
        if stage not in ("mixed", "local"):
            raise QuiverError(f"stage {stage!r}: {nearest(stage, ('mixed', 'local'))}")
        row = self._row(client)
        rounds = len(self._history.records)
        if stage == "local" and row not in self._shard.local and rounds:
            raise QuiverError(
                "the models before the last communication were not kept: pass keep_local=True."
            )
        return self._task.module(self._shard.model(row, stage))

    def state(self, client: int) -> ClientState:
        """The client's state; u and v as named tensors. Without push-sum, mu is 1."""
        row = self._row(client)
        fields = {
            name: self._named(name, leaf[row].clone())
            for name, leaf in self._shard.state._asdict().items()
        }
        return ClientState({"mu": torch.ones((), dtype=torch.float64), **fields})

    def _named(self, field: str, leaf: torch.Tensor) -> Any:
        layouts = {"u": self._task.shared_layout, "v": self._task.personal_layout}
        layout = layouts.get(field.rsplit("_", 1)[-1])
        return leaf if layout is None else layout.split(leaf)

    def _row(self, client: int) -> int:
        count = len(self._shard.ids)
        if not 0 <= client < count:
            raise QuiverError(f"client {client}: there are {count} clients, 0 … {count - 1}.")
        return client


def simulate(
    task: Task,
    data: FederatedData,
    *,
    method: Method,
    topology: Topology,
    training: Training,
    rounds: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    threads: int | None = None,
    epochs_per_client: Sequence[int] | None = None,
    common_init: bool = True,
    executor: Literal["auto", "vectorized", "sequential"] = "auto",
    evaluate_every: int = 1,
    keep_local: bool = True,
    gradients: bool = False,
    recorder: Recorder | None = None,
    resume: Checkpoint | None = None,
    checkpoint: Callable[[Checkpoint], None] | None = None,
    checkpoint_every: int = 10,
    stop: Callable[[], bool] = lambda: False,
) -> Run:
    """Run a method on federated data over a topology and return its history and models.

    `rounds=0` returns the initial states. `threads=None` leaves torch's setting alone.
    `epochs_per_client` replaces the epochs of the phase that trains what is sent.
    `keep_local` keeps, at the end, every client's model from before the last communication: one
    more copy of all models. `gradients` measures, in every evaluated round, the gradients that
    DFedPGP's theorem bounds (engine/gradients.py). `recorder` is told of every evaluation and
    round as it happens; `checkpoint` is given the whole state every `checkpoint_every` rounds and
    at the end, and `resume` takes it back: the result is that of an uninterrupted run. `stop` is
    asked after every round but the last; once it is true, the state is given to `checkpoint` and
    `Stopped` raised.
    """
    check(task, data, method, topology, epochs_per_client, device)
    _check_numbers(rounds, executor, evaluate_every)
    with _threads(threads):
        shard = Shard(
            task,
            data,
            method,
            training,
            rounds=rounds,
            seed=seed,
            dtype=dtype,
            device=device,
            executor=executor,
            epochs_per_client=epochs_per_client,
            common_init=common_init,
        )
        exchange = MatrixExchange(method.delay)
        history = History()
        if resume is not None:
            resume.apply(shard, exchange)
            history = resume.history
        start = 0 if resume is None else resume.round

        def after_round(round: int) -> None:
            stopping = round + 1 < rounds and stop()
            due = stopping or (round + 1) % checkpoint_every == 0 or round + 1 == rounds
            if checkpoint is not None and due:
                checkpoint(Checkpoint.take(round + 1, shard, exchange, history))
            if stopping:
                raise Stopped(round + 1)

        both = _Both(history, recorder)
        schedule = Schedule(rounds, evaluate_every, keep_local, gradients)
        play(
            shard, exchange, topology, method, both, schedule, start=start, after_round=after_round
        )
    return Run(task, method, shard, history)


class _Both:
    def __init__(self, history: History, other: Recorder | None) -> None:
        self._recorders = [history] if other is None else [history, other]

    def evaluated(self, round: int, stage: str, metrics: Metrics) -> None:
        for recorder in self._recorders:
            recorder.evaluated(round, stage, metrics)

    def finished(self, record: Record) -> None:
        for recorder in self._recorders:
            recorder.finished(record)


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None and count < 1:
        raise QuiverError(f"threads = {count}: it must be at least 1.")
    try:
        torch.set_num_threads(count or before)
        yield
    finally:
        torch.set_num_threads(before)


def check(
    task: Task,
    data: FederatedData,
    method: Method,
    topology: Topology,
    epochs_per_client: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Refuse what cannot work together before anything is computed or written."""
    _check_kinds(task, data, method, topology)
    epochs = epochs_per_client
    if topology.clients != data.clients:
        raise QuiverError(
            f"the topology has {topology.clients} clients and the data {data.clients}: "
            "they must be the same."
        )
    if epochs is not None and len(epochs) != data.clients:
        raise QuiverError(
            f"epochs_per_client has {len(epochs)} entries for {data.clients} clients: one each."
        )
    if epochs is not None and min(int(e) for e in epochs) < 0:
        raise QuiverError("epochs_per_client: the numbers of epochs must be 0 or more.")
    checked(method, topology(0))
    _check_device(device)
    _check_outputs(task, data)


def _check_kinds(task: object, data: object, method: object, topology: object) -> None:
    """The slips of a first try: a model for a task, a class or a name for a method."""
    if not isinstance(task, Task):
        raise QuiverError(
            f"task is a {type(task).__name__}: wrap the model, qv.Task(model=make_model, "
            "personal=('head',))."
        )
    if not isinstance(data, FederatedData):
        raise QuiverError(
            f"data is a {type(data).__name__}: make it with qv.FederatedData.from_arrays."
        )
    if isinstance(method, type | str):
        raise QuiverError(f"method is {method!r}: give a method object, such as qv.DFedPGP().")
    if not isinstance(topology, Topology):
        raise QuiverError(
            f"topology is a {type(topology).__name__}: give a topology, such as "
            "qv.random_push(clients=20, neighbors=5, seed=0), or wrap your own in qv.custom."
        )


def _check_numbers(rounds: int, executor: str, evaluate_every: int) -> None:
    if rounds < 0:
        raise QuiverError(f"rounds = {rounds}: it must be 0 or more.")
    if evaluate_every < 1:
        raise QuiverError(f"evaluate_every = {evaluate_every}: it must be at least 1.")
    if executor not in EXECUTORS:
        raise QuiverError(f"executor = {executor!r}: {nearest(executor, EXECUTORS)}")


def _check_device(device: torch.device | str) -> None:
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise QuiverError(
            f"device {str(device)!r} cannot be used: {first}. Use 'cpu', or install a torch "
            "build for your GPU (README)."
        ) from error


def _check_outputs(task: Task, data: FederatedData) -> None:
    """One sample through the model: labels must fit its outputs, inputs its first layer."""
    x = data.train.x[:1]
    x = data.prepare(x) if data.prepare is not None else x
    x = x.to(torch.float32) if x.is_floating_point() else x
    point = Point(torch.zeros(task.shared_layout.size), torch.zeros(task.personal_layout.size))
    try:
        with torch.no_grad():
            outputs = task.module(point)(x)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise QuiverError(
            f"the model does not take inputs of shape {tuple(x.shape[1:])} ({x.dtype}): {error}"
        ) from error
    classes = data.classes
    if classes is not None and outputs.ndim == 2 and outputs.shape[1] < classes:
        raise QuiverError(
            f"labels go up to {classes - 1} but the model has {outputs.shape[1]} outputs: "
            f"labels are out of range; give the model {classes} outputs."
        )
