"""A topology: the graph of every round; and how graphs are built and counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse

from quiverfl.errors import QuiverError
from quiverfl.options import python_number, refuse_old_names
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.reports import ReportSpec, ReportView
from quiverfl.topologies.shown_graph import TopologyCard
from quiverfl.types import Flags, Floats, Integers

if TYPE_CHECKING:
    from quiverfl.topologies.membership import Membership


@refuse_old_names(looks="reports", fixed="from_graph", checked="with_check")
@dataclass(frozen=True, repr=False)
class Topology(TopologyCard):
    """Round → Graph, a pure function of (seed, round), with the options that made it.

    The graph of an adaptive topology depends on the clients' reports, too (see ReportView).
    """

    name: str
    clients: int
    draw: Callable[..., Graph] = field(repr=False, compare=False)
    """round → Graph, or (round, view) → Graph if the topology is adaptive."""
    options: Mapping[str, Any] = field(default_factory=dict)
    reports: ReportSpec | None = None
    """Contents of the clients' reports; set for an adaptive topology."""
    membership: Membership | None = None
    """Members of each round, if members join or leave (`with_members`)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", python_number(self.clients))
        object.__setattr__(self, "options", python_number(self.options))
        for name in ("seed", "participation_seed", "link_failure_seed"):
            seed = self.options.get(name, 0)
            if isinstance(seed, bool) or not isinstance(seed, int):
                raise QuiverError(f"{self.name}: {name} = {seed!r}: it must be a whole number.")

    @classmethod
    def from_graph(cls, name: str, graph: Graph, **options: Any) -> Topology:
        """The same graph in every round."""
        return cls(name, graph.clients, partial(_return_graph, graph), options)

    def with_check(self, needs: GraphNeeds) -> Topology:
        """The same topology; a graph that does not fit is refused as soon as it is drawn."""
        return replace(self, draw=partial(_draw_checked, self.draw, needs))

    def __call__(self, round: int, view: ReportView | None = None) -> Graph:
        if self.reports is None:
            return self.draw(round)
        if view is None and round:
            raise QuiverError(
                f"{self.name} is adaptive, so its graph of round {round} is not known without the "
                "reports of the rounds before: give topology(round, view), or run it and look at "
                "what the run recorded (quiver topology show FOLDER)."
            )
        return self.draw(
            round, ReportView.empty(self.reports, self.clients) if view is None else view
        )


@dataclass(frozen=True)
class GraphNeeds:
    """Requirements of a method on every graph, so that its sums are correct."""

    method: str
    """Its title."""
    mass: bool
    """Whether it carries push-sum's weight."""
    delay: int = 0
    sends: bool = True

    def check(self, graph: Graph) -> None:
        """Refuse a graph that the method could not use."""
        if not self.sends:
            return  # any weights will do
        if self.mass and not (graph.column_stochastic or graph.row_stochastic):
            raise QuiverError(
                f"{self.method} needs mixing weights whose columns (push) or rows (pull) sum to 1; "
                "this graph has neither."
            )
        if not self.mass and not graph.row_stochastic:
            raise QuiverError(
                f"{self.method} averages models and carries no push-sum mass, so every row of the "
                "mixing matrix must sum to 1; this graph only conserves columns. Use random_pull, "
                "random_regular, star or another row-stochastic topology, or a push-sum method "
                "(dfedpgp, osgp)."
            )
        if not self.mass and self.delay:
            raise QuiverError(
                f"{self.method} carries no push-sum mass, so a delay of {self.delay} would shrink "
                "its models: set delay to 0, or use osgp, whose μ accounts for messages in flight."
            )
        if self.delay and not keeps_own_weight(graph):
            raise QuiverError(
                f"{self.method} with delay = {self.delay} needs a graph on which every client "
                "keeps a part of its own message, since nothing else arrives at first; on a star "
                "those who are not sampled keep none. Set delay to 0, or use random_push."
            )


def _draw_checked(draw: Callable[..., Graph], needs: GraphNeeds, *given: Any) -> Graph:
    graph = draw(*given)
    needs.check(graph)
    return graph


def _return_graph(graph: Graph, round: int) -> Graph:
    """A function of the module and no closure, so that a Topology pickles."""
    return graph


def build_graph(
    clients: int, receivers: Integers, senders: Integers, weights: Floats, **options: Any
) -> Graph:
    """A graph from (receiver, sender, weight) triples; duplicates add up."""
    matrix = sparse.csr_array((weights, (receivers, senders)), shape=(clients, clients))
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    options.setdefault("active", np.ones(clients, dtype=bool))
    return Graph(_fold_equal_rows(matrix), **options)


def build_one_row_graph(
    senders: Integers, weights: Floats, active: Flags, hub: bool = False
) -> Graph:
    """Every client receives the same weighted sum of these senders' messages."""
    order = np.argsort(senders)
    ends = np.array([0, len(senders)])
    matrix = sparse.csr_array((weights[order], senders[order], ends), shape=(1, len(active)))
    return Graph(matrix, active, hub)


def count_links(graph: Graph) -> int:
    """Count the weights of the whole matrix without making it."""
    return int(graph.matrix.nnz) * (len(graph.active) // graph.matrix.shape[0])


def count_uploads(graph: Graph) -> Integers:
    """Messages each client puts on the network."""
    return graph.active.astype(np.int64) if graph.hub else _off_diagonal(graph, axis=0)


def count_downloads(graph: Graph) -> Integers:
    """Messages each client takes from the network."""
    return graph.active.astype(np.int64) if graph.hub else _off_diagonal(graph, axis=1)


def keeps_own_weight(graph: Graph) -> bool:
    """Whether every client's own weight is positive."""
    if graph.one_row:
        return len(graph.senders) == graph.clients
    return bool((graph.matrix.diagonal() > 0).all())


def own_weights(graph: Graph) -> Floats:
    """The weight of every client's own message, without making the whole matrix of one row."""
    if not graph.one_row:
        own: Floats = graph.matrix.diagonal()
        return own
    own = np.zeros(graph.clients)
    own[graph.matrix.indices] = graph.matrix.data
    return own


def find_offline(graph: Graph) -> Flags:
    """Clients that neither train nor receive anything from others."""
    offline: Flags = ~graph.active & (_off_diagonal(graph, axis=1) == 0)
    return offline


def _off_diagonal(graph: Graph, axis: int) -> Integers:
    """Links to (axis 1) or from (axis 0) other clients."""
    if graph.one_row:
        own = np.zeros(graph.clients, dtype=np.int64)
        own[graph.senders] = 1
        return own * (graph.clients - 1) if axis == 0 else len(graph.senders) - own
    links = graph.matrix.tocoo()
    across = (links.row != links.col) & (links.data != 0)
    ends = links.col if axis == 0 else links.row
    counts: Integers = np.bincount(ends[across], minlength=graph.clients).astype(np.int64)
    return counts


def _fold_equal_rows(matrix: sparse.csr_array) -> sparse.csr_array:
    """The one row where all rows are equal."""
    counts = np.diff(matrix.indptr)
    if len(counts) < 2 or not matrix.has_sorted_indices or (counts != counts[0]).any():
        return matrix
    senders = matrix.indices.reshape(len(counts), counts[0])
    weights = matrix.data.reshape(len(counts), counts[0])
    if (senders != senders[0]).any() or (weights != weights[0]).any():
        return matrix
    return matrix[[0]]
