"""Topologies from networkx graphs, a matrix or your own function; Metropolis weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from scipy import sparse

from quiverfl.errors import QuiverError, suggest
from quiverfl.options import refuse_old_names
from quiverfl.support.references import describe_origin
from quiverfl.topologies.arguments import check_clients
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.reports import ReportSpec, ReportView, check_client_count
from quiverfl.topologies.topology import Topology, build_graph
from quiverfl.types import Floats, Integers

if TYPE_CHECKING:  # only to name the type: networkx is the caller's, and slow to import
    import networkx as nx

Matrix: TypeAlias = Floats | sparse.sparray
Weighting: TypeAlias = Literal["metropolis", "out", "in"]
_WEIGHTINGS = ("metropolis", "out", "in")


def metropolis(adjacency: Any) -> sparse.csr_array:
    """Symmetric, doubly stochastic weights for any undirected graph, dense or sparse.

    1/(1 + the larger of the two degrees) on an edge, the rest of the row on the diagonal.
    """
    links = _check_square("metropolis", adjacency)
    links.eliminate_zeros()
    first, second = (ends.astype(np.int64) for ends in links.nonzero())
    if not _is_symmetric(links.shape[0], first, second):
        raise QuiverError(
            "metropolis: the adjacency matrix is not symmetric, so its graph is directed; "
            "use from_networkx(graph, weights='out') or weights='in'."
        )
    return metropolis_graph(links.shape[0], first, second).sparse


def metropolis_graph(clients: int, first: Integers, second: Integers) -> Graph:
    """Metropolis weights for the edges first[k] – second[k]; either direction, any repeats."""
    low, high = np.minimum(first, second), np.maximum(first, second)
    edges = np.unique(low[low != high] * clients + high[low != high])
    low, high = edges // clients, edges % clients
    degrees = np.bincount(low, minlength=clients) + np.bincount(high, minlength=clients)
    edge_weights = 1 / (1 + np.maximum(degrees[low], degrees[high]))
    given = np.bincount(low, edge_weights, clients) + np.bincount(high, edge_weights, clients)
    everyone = np.arange(clients)
    return build_graph(
        clients,
        np.concatenate([low, high, everyone]),
        np.concatenate([high, low, everyone]),
        np.concatenate([edge_weights, edge_weights, 1 - given]),
    )


def from_networkx(graph: nx.Graph[Any], weights: Weighting | None = None) -> Topology:
    """Any networkx graph, every round. An edge a → b of a DiGraph means that a sends to b.

    `metropolis`: symmetric and doubly stochastic (undirected graphs only, their default).
    `out`: a client splits its mass evenly over itself and its out-neighbours, columns sum to 1
    (the default of directed graphs). `in`: a client averages itself and its in-neighbours evenly,
    rows sum to 1. Nodes 0 … m - 1 are the clients of that number, other labels are numbered in
    the graph's own order. Edge weights and self-loops of the networkx graph are not used.
    """
    if not hasattr(graph, "number_of_nodes"):
        raise QuiverError(f"from_networkx: a {type(graph).__name__} is no graph of networkx.")
    clients = check_clients("from_networkx", graph.number_of_nodes())
    chosen = weights or ("out" if graph.is_directed() else "metropolis")
    if chosen not in _WEIGHTINGS:
        raise QuiverError(f"from_networkx: weights = {chosen!r}: {suggest(chosen, _WEIGHTINGS)}")
    if chosen == "metropolis" and graph.is_directed():
        raise QuiverError(
            "from_networkx: metropolis weights need an undirected graph and this one is directed; "
            "use weights='out' or weights='in', or graph.to_undirected()."
        )
    senders, receivers = _read_edges(graph)
    if chosen == "metropolis":
        drawn = metropolis_graph(clients, senders, receivers)
    else:
        drawn = _even_weights(clients, senders, receivers, by=chosen)
    return Topology.from_graph("from_networkx", drawn, weights=chosen)


def from_matrix(matrix: Any) -> Topology:
    """A fixed matrix, dense or sparse: weights[receiver, sender]."""
    return Topology.from_graph("from_matrix", as_graph("from_matrix", matrix, None))


@refuse_old_names(looks="reports")
def custom(
    function: Callable[..., Graph | Matrix], clients: int, reports: ReportSpec | None = None
) -> Topology:
    """Your own function of the round: a Graph, or a matrix weights[receiver, sender].

    It must be pure: the same round gives the same graph, however often it is asked for. With
    `reports` it is a function of (round, view), and the view has the reports asked for.
    """
    if not callable(function):
        raise QuiverError(
            f"custom: function is a {type(function).__name__}: give a function of the round that "
            "returns a matrix; one matrix for all rounds goes into qv.from_matrix."
        )
    clients = check_clients("custom", clients)
    if reports is not None:
        check_client_count("custom", clients)
    return Topology(
        "custom", clients, partial(_call_own_function, function, clients), reports=reports
    )


def as_graph(name: str, matrix: Any, clients: int | None) -> Graph:
    """A checked Graph from a Graph or from a dense or sparse matrix."""
    graph = matrix if isinstance(matrix, Graph) else _from_matrix(name, matrix)
    if clients is not None and graph.clients != clients:
        raise QuiverError(
            f"{name}: the matrix has {graph.clients} clients, the topology was made for {clients}."
        )
    if not (graph.row_stochastic or graph.column_stochastic):
        raise QuiverError(
            f"{name}: neither the rows nor the columns of the matrix sum to 1. Divide each row by "
            "its sum (plain averaging) or each column by its sum (push-sum)."
        )
    return graph


def _from_matrix(name: str, matrix: Any) -> Graph:
    links = _check_square(name, matrix).astype(np.float64).tocoo()
    receivers, senders = (ends.astype(np.int64) for ends in (links.row, links.col))
    return build_graph(links.shape[0], receivers, senders, links.data)


def _check_square(name: str, matrix: Any) -> sparse.csr_array:
    try:
        shape = matrix.shape if hasattr(matrix, "shape") else np.shape(matrix)
    except ValueError:
        shape = "rows of unequal lengths"
    if len(shape) != 2 or shape[0] != shape[1] or not shape[0]:
        raise QuiverError(f"{name}: a square matrix, clients × clients, is needed, got {shape}.")
    try:
        return sparse.csr_array(matrix)
    except (TypeError, ValueError) as problem:
        raise QuiverError(f"{name}: the matrix does not hold numbers: {problem}") from None


def _read_edges(graph: nx.Graph[Any]) -> tuple[Integers, Integers]:
    nodes = list(graph.nodes)
    if set(nodes) == set(range(len(nodes))):
        nodes = list(range(len(nodes)))
    number = {node: client for client, node in enumerate(nodes)}
    pairs = [(number[a], number[b]) for a, b, *_ in graph.edges]
    ends: Integers = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    if not graph.is_directed():
        ends = np.concatenate([ends, ends[:, ::-1]])
    return ends[:, 0], ends[:, 1]


def _even_weights(
    clients: int, senders: Integers, receivers: Integers, by: Literal["out", "in"]
) -> Graph:
    links = np.unique(np.concatenate([receivers * clients + senders, _diagonal_links(clients)]))
    receivers, senders = links // clients, links % clients
    owner = senders if by == "out" else receivers
    return build_graph(
        clients, receivers, senders, 1 / np.bincount(owner, minlength=clients)[owner]
    )


def _is_symmetric(clients: int, first: Integers, second: Integers) -> bool:
    return np.array_equal(np.sort(first * clients + second), np.sort(second * clients + first))


def _diagonal_links(clients: int) -> Integers:
    return np.arange(clients) * (clients + 1)


def _call_own_function(
    function: Callable[..., Graph | Matrix], clients: int, round: int, *view: ReportView
) -> Graph:
    name = f"custom topology, round {round}"
    try:
        drawn = function(round, *view)
    except QuiverError:
        raise
    except Exception as error:  # any error of the user's function is shown to the user
        raise QuiverError(
            f"{name}: {type(error).__name__}: {error} ({describe_origin(error)})."
        ) from error
    return as_graph(name, drawn, clients)
