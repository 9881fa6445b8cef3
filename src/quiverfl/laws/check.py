"""All laws for one method: what `quiver check` and `qv.check_method` do."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from quiverfl.engine.checks.method import check_method_parts
from quiverfl.engine.settings import RunSettings
from quiverfl.errors import Diverged, QuiverError, QuiverWarning
from quiverfl.laws import round_laws, run_laws
from quiverfl.laws.problem import (
    CLIENTS,
    SIZES,
    TRAINING,
    Case,
    tiny_task,
    topologies_for,
    training_for,
)
from quiverfl.methods.contract import Method
from quiverfl.options import refuse_old_names
from quiverfl.runs.simulate import use_threads
from quiverfl.topologies import Topology

Verdict = Literal["kept", "broken", "skipped"]


@dataclass(frozen=True)
class Law:
    number: int
    words: str
    breach: Callable[[Case], str | None]
    every_graph: bool = True
    """One law. Some are tried on all graphs of a method, others on its usual one."""


LAWS = (
    Law(1, "identity mixing leaves the model in use as it is", round_laws.identity_mixing, False),
    Law(2, "agreement survives every legal graph", round_laws.agreement),
    Law(3, "permuting clients permutes results", round_laws.permutation),
    Law(4, "what is sent is conserved, and mass", round_laws.conservation),
    Law(5, "what a phase does not train stays bit-identical", round_laws.untrained_parts, False),
    Law(6, "evaluating changes nothing", run_laws.evaluating),
    Law(7, "the loss falls on quadratics", run_laws.falling_loss, False),
    Law(8, "clients that do not train keep what they have", round_laws.inactive_clients),
    Law(9, "a message survives the wire format", round_laws.wire_format, False),
    Law(10, "interrupted and resumed equals uninterrupted", run_laws.resuming),
    Law(11, "vectorised equals one by one", run_laws.vectorising),
    Law(12, "one shard equals several", round_laws.several_shards),
    Law(13, "the same seed gives the same run", run_laws.reproducing, False),
)


@dataclass(frozen=True)
class LawVerdict:
    """The verdict on one law."""

    number: int
    law: str
    verdict: Verdict
    graphs: tuple[str, ...]
    """Graphs on which it was tried; if it is broken, those on which it is broken."""
    sentence: str = ""
    """What was expected and what came out, if it is broken."""

    def __str__(self) -> str:
        where = f" (on {', '.join(self.graphs)})" if self.graphs else ""
        return f"law {self.number}, {self.law}: {self.sentence or self.verdict}{where}"


@refuse_old_names(broken="broken_laws")
@dataclass(frozen=True)
class MethodCheck:
    """The result of `check_method`."""

    title: str
    verdicts: tuple[LawVerdict, ...]

    @property
    def broken_laws(self) -> tuple[LawVerdict, ...]:
        """The laws that the method breaks."""
        return tuple(one for one in self.verdicts if one.verdict == "broken")

    @property
    def lawful(self) -> bool:
        """Whether it breaks none of those that were tried."""
        return not self.broken_laws

    def __str__(self) -> str:
        tried = [one for one in self.verdicts if one.verdict != "skipped"]
        head = f"{self.title}: {len(tried) - len(self.broken_laws)} of {len(tried)} laws kept"
        return "\n".join([f"{head}.", *(str(one) for one in self.broken_laws)])


def check_method(
    method: Method,
    skip: Collection[int] = (),
    progress: Callable[[LawVerdict], None] = lambda _: None,
) -> MethodCheck:
    """Try the laws that every method keeps (docs/explanation/concepts.md) on a method of your own.

    Takes a few seconds: federations of six clients, on the graphs that fit the method. What
    `simulate` would refuse is refused with the same sentence. `skip` has the numbers of laws that
    the method breaks on purpose. `progress` is called with every
    verdict.
    """
    if isinstance(skip, int):
        raise QuiverError(f"skip = {skip}: give a list of laws, such as [{skip}].")
    unknown = sorted(set(skip) - {law.number for law in LAWS})
    if unknown:
        raise QuiverError(f"skip = {unknown}: laws are numbered from 1 to {len(LAWS)}.")
    settings = RunSettings(rounds=1, threads=1)
    with use_threads(tiny_task(), CLIENTS, max(SIZES), TRAINING, settings):
        cases, verdicts = _cases(method), []
        for law in LAWS:
            verdicts.append(_verdict(law, cases, law.number in skip))
            progress(verdicts[-1])
    return MethodCheck(method.title, tuple(verdicts))


def _cases(method: Method) -> list[Case]:
    """One per graph, once a round of the method has been carried out."""
    if isinstance(method, type | str):
        raise QuiverError(f"method is {method!r}: give a method object, such as MyMethod().")
    check_method_parts(method)
    training = training_for(method)
    usual = Case(method, topologies_for(method)[0], training)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "run.rounds = 0", QuiverWarning)  # the start is wanted
        state = type(usual.run(rounds=0)._shard.state)
    with contextlib.suppress(Diverged):  # law 7 says so
        usual.run(rounds=1)
    return [Case(method, topology, training) for topology in topologies_for(method, state)]


def _verdict(law: Law, cases: list[Case], skipped: bool) -> LawVerdict:
    if skipped:
        return LawVerdict(law.number, law.words, "skipped", ())
    cases = cases if law.every_graph else cases[:1]
    breaches = [(_graph_name(case.topology), _describe_breach(law, case)) for case in cases]
    broken = [(name, sentence) for name, sentence in breaches if sentence is not None]
    if not broken:
        return LawVerdict(law.number, law.words, "kept", tuple(name for name, _ in breaches))
    names = tuple(name for name, _ in broken)
    return LawVerdict(law.number, law.words, "broken", names, broken[0][1])


def _describe_breach(law: Law, case: Case) -> str | None:
    """Say that a run stopped, which breaks the law under test."""
    try:
        return law.breach(case)
    except QuiverError as error:
        return f"it could not be tried: {error}"


def _graph_name(topology: Topology) -> str:
    away = "participation" in topology.options
    return f"{topology.name} with half of the clients" if away else topology.name
