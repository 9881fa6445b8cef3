"""Topologies: functions from a round to its graph, which has the links and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import signature
from typing import Any

from quiverfl.errors import QuiverError, say_leave_out, suggest
from quiverfl.support.references import Registry, describe_origin, is_reference
from quiverfl.topologies.adaptive import bandit_push, loss_push, similar_pull, similar_push
from quiverfl.topologies.analysis import TopologyReport, analyze_topology
from quiverfl.topologies.balanced import balanced_push, base_graph, epidemic
from quiverfl.topologies.fixed import (
    directed_ring,
    exponential,
    full,
    grid,
    isolated,
    one_peer_exponential,
    ring,
    star,
    torus,
)
from quiverfl.topologies.from_graphs import custom, from_matrix, from_networkx, metropolis
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.membership import Membership, with_members
from quiverfl.topologies.participation import Exchange, Keeper, participating, unreliable
from quiverfl.topologies.random import erdos_renyi, random_pull, random_push, random_regular
from quiverfl.topologies.reports import ReportSpec, ReportView
from quiverfl.topologies.topology import Topology

__all__ = [
    "TOPOLOGIES",
    "Graph",
    "Membership",
    "ReportSpec",
    "ReportView",
    "Topology",
    "TopologyReport",
    "analyze_topology",
    "balanced_push",
    "bandit_push",
    "base_graph",
    "custom",
    "directed_ring",
    "epidemic",
    "erdos_renyi",
    "exponential",
    "from_matrix",
    "from_networkx",
    "full",
    "grid",
    "isolated",
    "loss_push",
    "make_topology",
    "metropolis",
    "one_peer_exponential",
    "participating",
    "random_pull",
    "random_push",
    "random_regular",
    "ring",
    "similar_pull",
    "similar_push",
    "star",
    "topology_options",
    "torus",
    "unreliable",
    "with_members",
]

EXCHANGES: dict[str, Exchange] = {
    "random_push": "push",
    "random_pull": "pull",
    "balanced_push": "push",
    "epidemic": "pull",
    "loss_push": "push",
    "similar_push": "push",
    "similar_pull": "pull",
    "bandit_push": "push",
}
"""Exchange of these topologies; for all others it follows from the matrix."""
KEEPERS: dict[Exchange, Keeper] = {"push": "sender", "pull": "receiver"}
COMMON_OPTIONS = ("participation", "link_failure", "exchange")
"""Options of all topologies."""

_TOPOLOGIES: dict[str, Callable[..., Topology]] = {
    "isolated": isolated,
    "star": star,
    "random_push": random_push,
    "random_pull": random_pull,
    "balanced_push": balanced_push,
    "epidemic": epidemic,
    "random_regular": random_regular,
    "erdos_renyi": erdos_renyi,
    "ring": ring,
    "directed_ring": directed_ring,
    "exponential": exponential,
    "one_peer_exponential": one_peer_exponential,
    "base_graph": base_graph,
    "grid": grid,
    "torus": torus,
    "full": full,
    "loss_push": loss_push,
    "similar_push": similar_push,
    "similar_pull": similar_pull,
    "bandit_push": bandit_push,
}
TOPOLOGIES = Registry("topology", _TOPOLOGIES, own="module:function")


def topology_options(name: str) -> list[str]:
    """Names of a topology's own options."""
    return [option for option in signature(TOPOLOGIES.find(name)).parameters if option != "clients"]


def make_topology(name: str, clients: int, **options: Any) -> Topology:
    """A topology by its name, as a configuration gives it; unknown or missing options are refused.

    `participation`, a fraction below 1 (see participating), and `link_failure`, a probability with
    an `exchange` (see unreliable), are options of all of them. Your own function is called with
    clients=… and the options; it returns a Topology, or a function from a round to its matrix or
    Graph (see custom).
    """
    participation = options.pop("participation", 1.0)
    failure = options.pop("link_failure", 0.0)
    exchange = options.pop("exchange", None)
    if exchange is not None and failure == 0:
        raise QuiverError(
            f"topology.exchange = {exchange!r} says what a failed link means; give "
            "topology.link_failure as well, or leave exchange out."
        )
    function = TOPOLOGIES.find(name)
    if is_reference(name) and "seed" in topology_options(name):
        options.setdefault("seed", 0)
    _check_options(name, function, options)
    topology: Topology = (
        _make_own(name, function, clients, options)
        if is_reference(name)
        else function(clients, **options)
    )
    seed = options.get("seed", 0)
    if failure != 0:
        topology = unreliable(topology, failure, seed, exchange or EXCHANGES.get(name))
        if exchange is not None:
            topology = replace(topology, options={**topology.options, "exchange": exchange})
    if participation == 1:
        return topology
    # A pull's round may have columns that sum to 1 by chance: its weights are the receiver's still.
    kept_by = KEEPERS.get(EXCHANGES.get(name, "both"))
    online = participating(topology, participation, seed, kept_by)
    options = {option: value for option, value in online.options.items() if option != "kept_by"}
    return replace(online, options=options)


def _check_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    known = signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    if "clients" not in known:
        raise QuiverError(
            f"topology {name!r} does not take the number of clients: write "
            f"def {name.rpartition(':')[2]}(clients, …)."
        )
    for option in options:
        if option not in known:
            raise QuiverError(
                f"topology {name!r} has no option {option!r}: "
                f"{suggest(option, {*known, *COMMON_OPTIONS} - {'clients'})} "
                f"{say_leave_out(f'topology.{option}')}"
            )
    for option, parameter in known.items():
        needed = parameter.default is parameter.empty and parameter.kind.name != "VAR_POSITIONAL"
        if needed and option not in {"clients", *options}:
            raise QuiverError(f"topology {name!r} needs the option {option!r}.")


def _make_own(
    name: str, function: Callable[..., Any], clients: int, options: Mapping[str, Any]
) -> Topology:
    """The topology of your own function, with the requested name and options."""
    try:
        made = function(clients=clients, **options)
    except QuiverError:
        raise
    except Exception as error:
        # Any error of the user's function is shown to the user, in one line.
        raise QuiverError(
            f"topology {name!r} failed ({describe_origin(error)}): {type(error).__name__}: {error}"
        ) from error
    if isinstance(made, Topology):
        topology = made
    elif callable(made):
        _check_signature(name, made)
        topology = custom(made, clients)
    else:
        raise QuiverError(
            f"topology {name!r} returned a {type(made).__name__}: return a Topology, such as "
            "from_matrix(weights), or a function from a round to its matrix or Graph."
        )
    if topology.clients != clients:
        raise QuiverError(
            f"topology {name!r} returned a graph of {topology.clients} clients where {clients} "
            "were asked for: make it from the argument `clients`, or change data.clients."
        )
    return replace(topology, name=name, options=dict(options))


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    """Refuse a function of (round, view) that does not say which reports it needs."""
    try:
        signature(function).bind(0)
    except TypeError:
        raise QuiverError(
            f"topology {name!r} returned a function that cannot be called with the round alone: "
            "one of (round, view) is returned as custom(function, clients, "
            "reports=ReportSpec(loss=True))."
        ) from None
    except ValueError:
        return  # Python does not know what it takes
