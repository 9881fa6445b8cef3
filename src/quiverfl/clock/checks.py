"""Checks of a clock, before anything is computed."""

from __future__ import annotations

import warnings

from quiverfl.clock.devices import MICROSECONDS, microseconds
from quiverfl.clock.settings import Timing
from quiverfl.engine.checks.peers import choose_message_split, count_checked_rounds
from quiverfl.engine.exchange.build import changes_updates
from quiverfl.errors import QuiverError, QuiverWarning
from quiverfl.methods.contract import Interleaved, Method, Phase, SingleStep
from quiverfl.methods.optional import SizesMessages
from quiverfl.task import Task
from quiverfl.topologies.topology import Topology
from quiverfl.transforms import Transforms


def check_timing(
    timing: Timing, task: Task, method: Method, topology: Topology, transforms: Transforms
) -> None:
    """Refuse what cannot be timed, in one sentence."""
    timing.devices.check_clients(topology.clients)
    waits = f'clock.waits = "{timing.clock.waits}"'
    if timing.clock.asynchronous:
        _check_traces(timing)
        _check_method(waits, task, method)
        _check_transforms(waits, transforms)
        _check_topology(timing, waits, method, topology)
    elif timing.clock.away == "skip" or timing.clock.deadline is not None:
        name = "clock.deadline" if timing.clock.deadline is not None else 'clock.away = "skip"'
        if topology.reports is not None:
            raise QuiverError(
                f"{name} with the adaptive topology {topology.name!r}: its graphs are not known "
                "before the run, so nobody can say who would be late; leave one of them out."
            )
        _check_sizes(name, method)


def warn_of_step(method: Method) -> None:
    """Warn of the paper's step where mass gathers at slow clients."""
    if getattr(method, "step", None) == "paper" and getattr(method, "step_floor", None) is None:
        warnings.warn(
            f"{method.title} takes the paper's step η/μ, and without waiting mass gathers at slow "
            'clients: fast ones then move by many times η. Give step="debiased".',
            QuiverWarning,
            stacklevel=3,
        )


def _check_sizes(name: str, method: Method) -> None:
    if isinstance(method, SizesMessages):
        raise QuiverError(
            f"{name} with {method.title}: the size of its messages depends on their values, so "
            "the times are not known before the run; take another method."
        )


def _check_traces(timing: Timing) -> None:
    assert timing.clock.until is not None
    until = microseconds(timing.clock.until)
    for client, trace in enumerate(timing.devices.traces):
        if trace.period is None and trace.ends[-1] < until:
            raise QuiverError(
                f"the trace of client {client} ends at {trace.ends[-1] / MICROSECONDS:g} s, before "
                f"clock.until = {timing.clock.until:g}: give a longer trace, or one with a period, "
                "which repeats."
            )


def _check_method(waits: str, task: Task, method: Method) -> None:
    if method.topology == "star":
        raise QuiverError(
            f'{waits} with {method.title}: it needs a server, which waits; use waits = "all", or '
            "dfedavgmp or dfedpgp, which need none."
        )
    if method.delay:
        raise QuiverError(
            f"{waits} with method.delay = {method.delay}: messages take the time that the network "
            "says; set delay = 0."
        )
    if task.buffers == "mixed" and task.statistics_layout.names:
        raise QuiverError(
            f'{waits} with task.buffers = "mixed": running statistics are averaged in rounds; set '
            'task.buffers = "personal".'
        )
    _check_sizes(waits, method)
    if any(map(_has_single_step, method.phases(task))):
        raise QuiverError(
            f"{waits} with {method.title}: a step of it is planned by the rounds of the run, which "
            'nobody counts; use waits = "graph".'
        )


def _has_single_step(phase: Phase) -> bool:
    inner = phase.phases if isinstance(phase, Interleaved) else (phase,)
    return any(isinstance(one, SingleStep) for one in inner)


def _check_transforms(waits: str, transforms: Transforms) -> None:
    given = {
        "compression": transforms.compression is not None,
        "robustness": transforms.robustness is not None,
        "privacy": transforms.privacy is not None,
        "adversary": transforms.adversary is not None and not transforms.adversary.flips_labels,
    }
    for section, in_use in given.items():
        if in_use:
            raise QuiverError(
                f"{waits} with [{section}]: messages are sent one by one there, and what changes "
                'their size, their mass or their update is made for rounds; use waits = "graph", '
                "or real peers in async mode."
            )
    assert transforms.adversary is None or changes_updates(transforms)


def _check_topology(timing: Timing, waits: str, method: Method, topology: Topology) -> None:
    if topology.reports is not None:
        raise QuiverError(
            f"{waits} with the adaptive topology {topology.name!r}: the schedule is made before "
            "anything is trained; take a topology that does not look, such as random_push."
        )
    if timing.clock.waits == "pairs":
        if topology.name not in ("full", "isolated"):
            raise QuiverError(
                f"{waits} with topology {topology.name!r}: who is ready meets whoever is ready, so "
                'no graph would be used; leave [topology] out, or name "full".'
            )
        return
    checked = count_checked_rounds(topology, 1 << 10)
    if choose_message_split(method, topology, checked) == "copies":
        raise QuiverError(
            f"{waits} with topology {topology.name!r}: shares of a message need columns that sum "
            "to 1, since their mass must come to nobody twice; use random_push or random_regular."
        )
    for round in range(min(8, checked)):
        if not topology(round).active.all():
            raise QuiverError(
                f"{waits} with a topology in which some clients rest (participation): nobody has "
                "rounds to rest in; say with devices.away or devices.traces who is not there."
            )
