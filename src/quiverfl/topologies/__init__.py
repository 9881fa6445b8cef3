"""Who sends to whom: functions from a round to its graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import signature
from typing import Any

from quiverfl.errors import QuiverError, leave_out, nearest
from quiverfl.references import is_reference, load_callable, origin
from quiverfl.topologies.analysis import TopologyReport, analyse
from quiverfl.topologies.choosing import bandit_push, loss_push, similar_push
from quiverfl.topologies.fixed import (
    directed_ring,
    exponential,
    full,
    grid,
    isolated,
    one_peer_exponential,
    ring,
    torus,
)
from quiverfl.topologies.from_graphs import custom, from_matrix, from_networkx, metropolis
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.participation import participating
from quiverfl.topologies.random import erdos_renyi, random_pull, random_push, random_regular
from quiverfl.topologies.star import star
from quiverfl.topologies.topology import Topology
from quiverfl.topologies.unreliable import Exchange, unreliable
from quiverfl.topologies.view import Looks, View

__all__ = [
    "TOPOLOGIES",
    "Graph",
    "Looks",
    "Topology",
    "TopologyReport",
    "View",
    "analyse",
    "bandit_push",
    "custom",
    "directed_ring",
    "erdos_renyi",
    "exponential",
    "find_topology",
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
    "similar_push",
    "star",
    "topology_options",
    "torus",
    "unreliable",
]

EXCHANGES: dict[str, Exchange] = {
    "random_push": "push",
    "random_pull": "pull",
    "loss_push": "push",
    "similar_push": "push",
    "bandit_push": "push",
}
"""What these are whatever their weights; others are judged by their matrix."""
COMMON_OPTIONS = ("participation", "link_failure")
"""Those that all topologies have."""

TOPOLOGIES: dict[str, Callable[..., Topology]] = {
    "isolated": isolated,
    "star": star,
    "random_push": random_push,
    "random_pull": random_pull,
    "random_regular": random_regular,
    "erdos_renyi": erdos_renyi,
    "ring": ring,
    "directed_ring": directed_ring,
    "exponential": exponential,
    "one_peer_exponential": one_peer_exponential,
    "grid": grid,
    "torus": torus,
    "full": full,
    "loss_push": loss_push,
    "similar_push": similar_push,
    "bandit_push": bandit_push,
}


def find_topology(name: str) -> Callable[..., Any]:
    """What makes the topology of this name: one of TOPOLOGIES, or your own `module:function`."""
    if is_reference(name):
        return load_callable(name)
    if name not in TOPOLOGIES:
        raise QuiverError(
            f"unknown topology {name!r}: {nearest(name, TOPOLOGIES)} Your own: module:function."
        )
    return TOPOLOGIES[name]


def topology_options(name: str) -> list[str]:
    """The options of its own that a topology has by name."""
    return [option for option in signature(find_topology(name)).parameters if option != "clients"]


def make_topology(name: str, clients: int, **options: Any) -> Topology:
    """A topology by its name, as a configuration gives it; unknown or missing options are refused.

    `participation`, a fraction below 1 (see participating), and `link_failure`, a probability (see
    unreliable), are options of all of them. Your own function is called with clients=… and the
    options; it returns a Topology, or a function from a round to its matrix or Graph (see custom).
    """
    participation = options.pop("participation", 1.0)
    failure = options.pop("link_failure", 0.0)
    function = find_topology(name)
    if is_reference(name) and "seed" in topology_options(name):
        options.setdefault("seed", 0)
    _check(name, function, options)
    topology: Topology = (
        _own(name, function, clients, options)
        if is_reference(name)
        else function(clients, **options)
    )
    seed = options.get("seed", 0)
    if failure != 0:
        topology = unreliable(topology, failure, seed, EXCHANGES.get(name))
    return topology if participation == 1 else participating(topology, participation, seed)


def _check(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
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
                f"{nearest(option, {*known, *COMMON_OPTIONS} - {'clients'})} "
                f"{leave_out(f'topology.{option}')}"
            )
    for option, parameter in known.items():
        needed = parameter.default is parameter.empty and parameter.kind.name != "VAR_POSITIONAL"
        if needed and option not in {"clients", *options}:
            raise QuiverError(f"topology {name!r} needs the option {option!r}.")


def _own(
    name: str, function: Callable[..., Any], clients: int, options: Mapping[str, Any]
) -> Topology:
    """The topology of your own function, under the name and options it was asked for with."""
    try:
        made = function(clients=clients, **options)
    except QuiverError:
        raise
    except Exception as error:
        # Whatever the user's function raises is theirs to see, in one line.
        raise QuiverError(
            f"topology {name!r} failed ({origin(error)}): {type(error).__name__}: {error}"
        ) from error
    if isinstance(made, Topology):
        topology = made
    elif callable(made):
        _of_the_round(name, made)
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


def _of_the_round(name: str, function: Callable[..., Any]) -> None:
    """Refuse a function of (round, view) that does not say what it looks at."""
    try:
        signature(function).bind(0)
    except TypeError:
        raise QuiverError(
            f"topology {name!r} returned a function that cannot be called with the round alone: "
            "one of (round, view) is returned as custom(function, clients, looks=Looks(loss=True))."
        ) from None
    except ValueError:
        return  # Python does not know what it takes
