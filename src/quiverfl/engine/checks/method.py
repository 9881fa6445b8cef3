"""Refuse settings that do not work together, before anything is computed or written."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from quiverfl.data.federated import FederatedData
from quiverfl.engine.checks.functions import check_functions
from quiverfl.engine.checks.model import (
    check_batch_sizes,
    check_model,
    check_own_models,
    check_sent_parts,
)
from quiverfl.engine.checks.probe import ModelProbe
from quiverfl.engine.execution import check_compile, check_kernels
from quiverfl.engine.local.trainer import phase_settings
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.states import statistics_weight
from quiverfl.errors import QuiverError, QuiverWarning, suggest
from quiverfl.methods import METHODS
from quiverfl.methods.contract import (
    Interleaved,
    Lookahead,
    Loss,
    Method,
    Part,
    Phase,
    SingleStep,
    Train,
)
from quiverfl.methods.optional import NamesPersonalPart
from quiverfl.task import Task
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import GraphNeeds, Topology
from quiverfl.training import Training

DECLARED = ("name", "title", "topology", "mass", "delay", "unused")
PHASES = (Train, SingleStep, Interleaved)
FUNCTIONS = ("init", "phases", "message", "merge", "personal")


def check_fit(
    task: Task,
    data: FederatedData,
    method: Method,
    topology: Topology,
    training: Training,
    settings: RunSettings,
    clients: int | None = None,
) -> None:
    """Everything that can be known before the first round.

    `clients` is how many there are, where `data` is that of some of them.
    """
    _check_kinds(task, data, method, topology, training)
    check_method_parts(method)
    clients = data.clients if clients is None else clients
    if topology.clients != clients:
        raise QuiverError(
            f"the topology has {topology.clients} clients and the data {clients}: "
            "they must be the same."
        )
    epochs = settings.epochs_per_client
    if epochs is not None and len(epochs) != clients:
        raise QuiverError(
            f"epochs_per_client has {len(epochs)} entries for {clients} clients: give one each."
        )
    check_phases(method, method.phases(task), epochs is not None)
    for phase in method.phases(task):
        phase_settings(phase, training)
    _rate_is_read(method, method.phases(task), training)
    first = check_graph(method, topology(0))
    if topology.reports is not None:
        _can_look(method, topology.name, first)
    check = check_own_models if task.own_models else check_model
    check(task, data, settings.executor)
    check_batch_sizes(task, data, method.phases(task), training)
    check_compile(task, data, method, settings)
    check_kernels(task, settings)
    probe = ModelProbe.from_data(task, data, settings.dtype)
    if task.own_models:
        check_sent_parts(task, method, probe.first_state(method))
    check_functions(method, task, probe, training, alike=first.one_row)
    if task.buffers == "mixed" and task.statistics_layout.names:
        state = probe.first_state(method)
        statistics_weight(method, state, method.message(state))
    _warn_of_no_effect(task, method, settings)
    if clients == data.clients and not data.test.sizes.any():
        text = "no client has test data: the run has no accuracy, and no model is judged."
        warnings.warn(text, QuiverWarning, stacklevel=3)
    for key in method.unused:
        if not hasattr(training, key):
            known = suggest(key, Training.__dataclass_fields__)
            raise QuiverError(f"{method.title}: unused = {key!r}: no key of [training]; {known}")
        if getattr(training, key) != getattr(Training(), key):
            text = f"{method.title} has no use for training.{key} = {getattr(training, key)}."
            warnings.warn(text, QuiverWarning, stacklevel=3)


def _warn_of_no_effect(task: Task, method: Method, settings: RunSettings) -> None:
    """Say what is allowed and hardly what was meant."""
    if not task.personal_layout.size and any(map(_trains_a_personal_part, method.phases(task))):
        text = (
            f"{method.title} trains a personal part, and nothing in this model is personal: all of "
            "it is shared. Name a part, such as personal = head."
        )
        warnings.warn(text, QuiverWarning, stacklevel=4)
    if isinstance(method, NamesPersonalPart) and not task.personal_layout.size:
        text = (
            f"{method.title} keeps a part of its own choice at a client, and this model has no "
            "such part: all of it is shared, as FedAvg does it."
        )
        warnings.warn(text, QuiverWarning, stacklevel=4)
    if settings.rounds == 0:
        text = "run.rounds = 0: nobody trains, and nothing is recorded. Give at least 1."
        warnings.warn(text, QuiverWarning, stacklevel=4)
    elif settings.epochs_per_client is not None and not any(settings.epochs_per_client):
        text = "every client has 0 epochs: nobody trains what is sent. Give one of them at least 1."
        warnings.warn(text, QuiverWarning, stacklevel=4)
    if method.delay and 0 < settings.rounds <= method.delay:
        text = (
            f"method.delay = {method.delay} with run.rounds = {settings.rounds}: the run ends "
            "before any message arrives. Lower the delay, or give more rounds."
        )
        warnings.warn(text, QuiverWarning, stacklevel=4)
    if task.buffers == "mixed" and not task.statistics_layout.names:
        text = (
            'task.buffers = "mixed": the model keeps no running statistics, so there is nothing to '
            "average. Leave it out."
        )
        warnings.warn(text, QuiverWarning, stacklevel=4)
    cores = _cores()
    if settings.threads is not None and settings.threads > cores:
        text = (
            f"threads = {settings.threads}: this process has {cores} "
            f"core{'s' if cores > 1 else ''}, and more threads than cores are slower. Leave "
            "threads out, or lower it."
        )
        warnings.warn(text, QuiverWarning, stacklevel=4)


def _trains_a_personal_part(phase: Phase) -> bool:
    if isinstance(phase, Interleaved):
        return any(map(_trains_a_personal_part, phase.phases))
    return isinstance(phase, Train) and (phase.part == "personal" or phase.use_personal_lr)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _can_look(method: Method, topology: str, graph: Graph) -> None:
    """Refuse an adaptive topology whose reports would not arrive: they travel with messages."""
    if method.topology == "isolated":
        raise QuiverError(
            f"{method.title} sends nothing, so no report that {topology} needs arrives: "
            'use topology "isolated".'
        )
    if method.delay:
        raise QuiverError(
            f"{method.title} with delay = {method.delay}: {topology} needs the reports of the "
            "round before, which would still be on their way; set delay to 0, or use random_push."
        )
    if graph.hub:
        raise QuiverError(
            f"{topology} is an adaptive star: clients of a star report to a server only, and "
            "nothing reaches the others; give a graph without hub."
        )


def check_method_parts(method: Any) -> None:
    """Refuse an object that lacks a part of what a method is."""
    _misspelt(method)
    for name in (*DECLARED, *FUNCTIONS):
        if not hasattr(method, name):
            what = "declares no" if name in DECLARED else "has no function"
            raise QuiverError(
                f"{type(method).__name__} {what} {name!r}: a method inherits quiverfl.Method, "
                "which has the defaults, and defines the rest (docs/how-to/own-method.md)."
            )
    for name in FUNCTIONS:
        if getattr(type(method), name, None) is getattr(Method, name):
            raise QuiverError(
                f"{type(method).__name__} has no function {name!r}: a method defines all of "
                f"{', '.join(FUNCTIONS)} (docs/how-to/own-method.md)."
            )
    for known in METHODS.values():
        for what in ("name", "title"):
            if type(method) is not known and getattr(method, what) == getattr(known, what):
                raise QuiverError(
                    f"{type(method).__name__} has {what} = {getattr(method, what)!r}, which is "
                    f"one of Quiver's own methods: give it a {what} of its own, so that tables "
                    "and reports tell the two apart."
                )


def _misspelt(method: Any) -> None:
    """A name that is nearly one the engine looks for would be passed over without a word."""
    known = (*DECLARED, *FUNCTIONS, "adapt", "payload", "personal_part")
    fields = set(getattr(method, "__dataclass_fields__", ()))
    for name in {name for kind in type(method).__mro__ for name in vars(kind)}:
        if name.startswith("_") or name in known or name in fields:
            continue
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        if close:
            raise QuiverError(
                f"{type(method).__name__} has {name!r}, which the engine does not know: did you "
                f"mean {close[0]!r}? If it is a helper of your own, let its name begin with an "
                f"underscore, '_{name}'."
            )


def graph_needs(method: Method) -> GraphNeeds:
    """The requirements of this method on the graphs of a run."""
    if not isinstance(method.delay, int) or method.delay < 0:
        raise QuiverError(
            f"{method.title}: delay = {method.delay!r}: it must be a whole number ≥ 0."
        )
    sends = method.topology != "isolated"
    return GraphNeeds(method.title, method.mass is not None, method.delay, sends)


def check_graph(method: Method, graph: Graph) -> Graph:
    """Refuse a method on a graph whose sums it could not make sense of."""
    graph_needs(method).check(graph)
    return graph


def check_phases(method: Method, phases: Sequence[Phase], unequal_epochs: bool) -> None:
    """Refuse phases that are incomplete, contradictory, or ask for what is not carried out."""
    if not isinstance(phases, tuple | list) or not all(isinstance(p, PHASES) for p in phases):
        raise QuiverError(
            f"{method.title}: phases returned {phases!r}; it must return a tuple of Train, "
            "SingleStep or Interleaved, such as (train,) with its comma."
        )
    if not phases or any(isinstance(p, Interleaved) and not p.phases for p in phases):
        raise QuiverError(
            f"{method.title}: {'an Interleaved is empty' if phases else 'phases returned ()'}, so "
            "its clients would never train. Give at least one phase; for communication alone a "
            "Train with epochs=0."
        )
    if unequal_epochs and not any(
        not isinstance(p, SingleStep) and p.trains_message for p in phases
    ):
        raise QuiverError(
            f"{method.title} has no training loop whose epochs could be replaced: leave "
            "epochs_per_client (epoch_groups) out for this method."
        )
    for phase in phases:
        if isinstance(phase, SingleStep):
            continue
        _check_length(method, phase)
        for train in (phase,) if isinstance(phase, Train) else phase.phases:
            _kinds(method, train)
        if phase.steps is not None and phase.trains_message and unequal_epochs:
            raise QuiverError(
                f"{method.title} counts steps, not epochs: epochs_per_client (epoch_groups) has "
                "no meaning for it. Leave it out for this method."
            )
        if isinstance(phase, Interleaved):
            for inner in phase.phases:
                _check_inner(method, inner)


def _rate_is_read(method: Method, phases: Sequence[Phase], training: Training) -> None:
    """Refuse settings of the method's own that put another rate in place of the run's."""
    trains = [phase for phase in phases if isinstance(phase, Train)]
    if "lr" in method.unused or not trains or len(trains) < len(phases):
        return
    other = replace(training, lr=training.lr * 2)
    if all(
        phase.settings is not None
        and phase_settings(phase, other).lr == phase_settings(phase, training).lr
        for phase in trains
    ):
        raise QuiverError(
            f"{method.title} puts a rate of its own in place of training.lr in every phase, so "
            "training.lr would change nothing: multiply it, replace(t, lr=0.5 * t.lr), or declare "
            'unused = ("lr",).'
        )


def _kinds(method: Method, phase: Train | SingleStep) -> None:
    """Parts of a Train phase that are of another kind than they should be."""
    if isinstance(phase, SingleStep):
        return
    if phase.part not in get_args(Part):
        known = suggest(str(phase.part), get_args(Part))
        raise QuiverError(f"{method.title}: part = {phase.part!r}: {known}")
    if phase.model not in (0, 1):
        raise QuiverError(
            f"{method.title}: model = {phase.model!r}: 0 is the model that is evaluated, 1 another "
            "one, such as a global model beside it."
        )
    for name, kind in (("lookahead", Lookahead), ("loss", Loss)):
        given = getattr(phase, name)
        if given is not None and not isinstance(given, kind):
            raise QuiverError(
                f"{method.title}: {name} is a {type(given).__name__}; write {name}="
                f"{kind.__name__}(…)."
            )


def _check_length(method: Method, phase: Train | Interleaved) -> None:
    if (phase.epochs is None) == (phase.steps is None):
        raise QuiverError(
            f"{method.title}: a {type(phase).__name__} phase needs epochs or steps, one of them."
        )


def _check_inner(method: Method, inner: Train | SingleStep) -> None:
    if isinstance(inner, Train):
        wrong = {
            "epochs": inner.epochs is not None,
            "steps": inner.steps is not None,
            "keep_optimizer": inner.keep_optimizer,
        }
    else:
        wrong = {
            "needs_gradient": inner.needs_gradient,
            "needs_noise": inner.needs_noise,
            "statistics": inner.statistics is not None,
            "sequential": inner.sequential,
        }
    for name, given in wrong.items():
        if given:
            remedy = {
                "epochs": "give it to Interleaved itself",
                "steps": "give it to Interleaved itself",
                "needs_gradient": "use a Train whose update takes what it needs from trained",
            }.get(name, "put it before or after, as a phase of its own")
            raise QuiverError(
                f"{method.title}: a {type(inner).__name__} inside Interleaved cannot have {name}: "
                f"{remedy}."
            )


def _check_kinds(
    task: object, data: object, method: object, topology: object, training: object
) -> None:
    """Refuse common slips: a model for a task, a class or a name for a method."""
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
    if not isinstance(training, Training):
        raise QuiverError(f"training is a {type(training).__name__}: give qv.Training(lr=0.1, …).")
