"""Measure a topology on its first rounds: is it legal, connected, fast, cheap?

Everything works on sparse matrices. Figures that need a dense m × m matrix are left out above a
number of clients, and the report says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import sparse

from quiverfl.errors import QuiverError
from quiverfl.seeds import key_hashes
from quiverfl.topologies.arguments import check_whole
from quiverfl.topologies.graph import TOLERANCE, Graph
from quiverfl.topologies.reports import ReportSpec, ReportValues, ReportView
from quiverfl.topologies.topology import (
    Topology,
    build_graph,
    count_downloads,
    count_links,
    count_uploads,
)
from quiverfl.types import Floats, Integers


def draw_first_graphs(topology: Topology, rounds: int) -> list[Graph]:
    """Rounds 0 … rounds - 1.

    For an adaptive topology, clients always report the same numbers, drawn once: its choices are
    most rigid then, and its links fewest.
    """
    if topology.reports is None:
        return [topology(round) for round in range(rounds)]
    view, graphs = ReportView.empty(topology.reports, topology.clients), []
    telling = _constant_reports(topology.reports, topology.clients)
    for round in range(rounds):
        graphs.append(topology(round, view))
        view = view.with_messages(round, graphs[-1], telling)
    return graphs


def _constant_reports(spec: ReportSpec, clients: int) -> ReportValues:
    """Losses and norms in (0, 1), sketches around 0."""
    places = np.arange(spec.width)
    bits = key_hashes(spec.seed, "unchanging", np.arange(clients)[:, None], places)
    drawn = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.where(places < spec.width - spec.sketch - spec.model, drawn, 2 * drawn - 1).astype(
        np.float32
    )


PRODUCT_LIMIT = 500
"""Clients up to which products of matrices and their norms are computed."""
PATH_LIMIT = 2_000
"""Clients up to which all shortest paths are computed."""
LINK_LIMIT = 20_000_000
"""Links, over all rounds looked at, up to which connectivity is examined."""
FLOOR = 1e-12
"""Distances below it are rounding and say nothing about the rate."""


@dataclass(frozen=True)
class Spread:
    """Smallest, mean and largest."""

    low: float
    mean: float
    high: float


@dataclass(frozen=True)
class TopologyReport:
    """Figures over `rounds` rounds; None where a figure does not exist or was left out.

    `rate` and `constant` are q and C of the paper's Lemma 3 (Assran et al. 2019, Lemma 3) as
    measured: the distance between what clients hold and what they should agree on is at most
    C · q^t after t rounds of mixing, for every t looked at.
    """

    name: str
    clients: int
    options: Mapping[str, Any]
    rounds: int
    row_stochastic: bool
    column_stochastic: bool
    symmetric: bool
    fixed: bool  # the same graph in every round
    active: float  # clients that train in a round, mean
    sent: Spread  # messages a client sends in a round
    received: Spread
    window: int | None  # B: every B consecutive graphs together are strongly connected
    diameter: int | None  # of round 0's graph; None: a client cannot be reached
    window_diameter: int | None  # of the union of rounds 0 … B - 1
    rate: float | None  # q
    constant: float | None  # C
    spectral_gap: float | None  # 1 - |second eigenvalue|, of a fixed symmetric matrix
    mu_low: float  # over all clients and rounds, from μ = 1
    mu_high: float
    mu_deviation: float  # standard deviation of μ over clients, mean over the later half of rounds
    skewness: float | None  # see measure_skewness
    messages: float  # that cross the network in a round, mean
    busiest_messages: float  # in and out of the busiest client, or of the server, mean
    message_bytes: int
    bytes: float
    busiest_bytes: float
    left_out: tuple[str, ...]  # what was not computed, and why

    @property
    def doubly_stochastic(self) -> bool:
        return self.row_stochastic and self.column_stochastic

    @property
    def delta(self) -> float:
        """δ: the smallest row sum of the products. A row sum of Φ is μ = Φ1, so it is one of μ."""
        return self.mu_low

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        derived = {"doubly_stochastic": self.doubly_stochastic, "delta": self.delta}
        return {**asdict(self), **derived}


def analyze_topology(
    topology: Topology, rounds: int = 50, message_bytes: int = 0
) -> TopologyReport:
    """Look at rounds 0 … rounds - 1 (see first_graphs for adaptive topologies)."""
    rounds = check_whole("analyse", "rounds", rounds, 1, None, "there is no round to look at")
    graphs = draw_first_graphs(topology, rounds)
    fixed = all(_is_same(graphs[0], graph) for graph in graphs[1:])
    columns = all(graph.column_stochastic for graph in graphs)
    symmetric = all(_is_symmetric(graph) for graph in _drop_repeats(graphs, fixed))
    masses = _compute_masses(graphs)
    traffic = [_count_traffic(graph) for graph in graphs]
    left_out: list[str] = []
    contraction = _is_small(topology, PRODUCT_LIMIT, "contraction", left_out)
    rate, constant = measure_contraction(graphs, columns) if contraction else (None, None)
    gap = None
    if fixed and symmetric and _is_small(topology, PRODUCT_LIMIT, "spectral gap", left_out):
        gap = compute_spectral_gap(graphs[0])
    window, diameter, window_diameter = _measure_connectivity(topology, graphs, fixed, left_out)
    return TopologyReport(
        name=topology.name,
        clients=topology.clients,
        options=dict(topology.options),
        rounds=rounds,
        row_stochastic=all(graph.row_stochastic for graph in graphs),
        column_stochastic=columns,
        symmetric=symmetric,
        fixed=fixed,
        active=float(np.mean([graph.active.sum() for graph in graphs])),
        sent=measure_spread([count_uploads(graph) for graph in graphs]),
        received=measure_spread([count_downloads(graph) for graph in graphs]),
        window=window,
        diameter=diameter,
        window_diameter=window_diameter,
        rate=rate,
        constant=constant,
        spectral_gap=gap,
        mu_low=min(float(mass.min()) for mass in masses),
        mu_high=max(float(mass.max()) for mass in masses),
        mu_deviation=float(np.mean([mass.std() for mass in masses[rounds // 2 :]])),
        skewness=measure_skewness(graphs, masses[rounds // 2 :] if columns else None),
        messages=float(np.mean([total for total, _ in traffic])),
        busiest_messages=float(np.mean([busiest for _, busiest in traffic])),
        message_bytes=message_bytes,
        bytes=float(np.mean([total for total, _ in traffic])) * message_bytes,
        busiest_bytes=float(np.mean([busiest for _, busiest in traffic])) * message_bytes,
        left_out=tuple(left_out),
    )


def find_connectivity_window(graphs: Sequence[Graph]) -> int | None:
    """The smallest B such that the union of any B consecutive graphs is strongly connected."""
    return find_smallest_window(find_connected_ends(graphs))


def find_smallest_window(ends: Sequence[int | None]) -> int | None:
    """B from what `connected_by` found."""
    rounds = len(ends)
    lengths = [rounds + 1 if end is None else end - t + 1 for t, end in enumerate(ends)]
    windows = range(1, rounds + 1)
    return next((b for b in windows if max(lengths[: rounds - b + 1]) <= b), None)


def find_connected_ends(graphs: Sequence[Graph]) -> list[int | None]:
    """For every round the one by which the graphs since then are strongly connected together."""
    patterns = [graph.sparse.astype(bool).astype(np.int64) for graph in graphs]
    links, end = sparse.csr_array(patterns[0].shape, dtype=np.int64), -1
    ends: list[int | None] = []
    for start in range(len(graphs)):
        while end < start or not is_strongly_connected(links):
            end += 1
            if end == len(graphs):
                return ends + [None] * (len(graphs) - start)
            links = links + patterns[end]
        ends.append(end)
        links = links - patterns[start]
        links.eliminate_zeros()
    return ends


def unite_graphs(graphs: Sequence[Graph]) -> sparse.csr_array:
    """The union of all links."""
    links = graphs[0].sparse
    for graph in graphs[1:]:
        links = links + graph.sparse
    return links


def is_strongly_connected(links: sparse.csr_array) -> bool:
    from scipy.sparse.csgraph import connected_components

    parts, _ = connected_components(links, directed=True, connection="strong")
    return parts == 1


def measure_contraction(
    graphs: Sequence[Graph], column_stochastic: bool
) -> tuple[float, float] | tuple[None, None]:
    """(q, C) with distance_t ≤ C · q^t in every round, q by least squares on the logarithms.

    The distance is ‖diag(Φ1)⁻¹ Φ − limit‖₂ for the product Φ of the first t matrices: what
    de-biasing (z = u/μ) makes of them. Where columns sum to 1 the limit is 1/m everywhere, since
    the mean is conserved (Assran et al., Lemma 3); elsewhere clients agree on something that the
    product itself decides, and the distance is the one to their own mean. Then
    ‖Z − limit · U‖ ≤ C q^t ‖U‖ for any start U. None where a client is left without mass.
    """
    product = np.eye(graphs[0].clients)
    distances = [_distance(product, column_stochastic)]
    for graph in graphs:
        product = _mix(graph, product)
        if not product.sum(axis=1).all():
            return None, None
        distances.append(_distance(product, column_stochastic))
        if distances[-1] <= FLOOR:
            break
    return _fit_envelope(np.array(distances))


def compute_spectral_gap(graph: Graph) -> float:
    """1 - |λ₂| of a symmetric matrix: 1 is an exact average in one round, 0 is no agreement."""
    if graph.clients == 1:
        return 1.0
    return float(1 - np.sort(np.abs(np.linalg.eigvalsh(graph.weights)))[-2])


def compute_diameter(links: sparse.csr_array) -> int | None:
    """The longest of the shortest paths; None if a client cannot be reached."""
    from scipy.sparse.csgraph import shortest_path

    longest = shortest_path(links, unweighted=True).max()
    return int(longest) if np.isfinite(longest) else None


def _measure_connectivity(
    topology: Topology, graphs: list[Graph], fixed: bool, left_out: list[str]
) -> tuple[int | None, int | None, int | None]:
    """(window, diameter, diameter of the window)."""
    distinct = _drop_repeats(graphs, fixed)
    total = sum(count_links(graph) for graph in distinct)
    if total > LINK_LIMIT:
        left_out.append(
            f"window and diameter: {total:,} links in these rounds, the limit is {LINK_LIMIT:,}"
        )
        return None, None, None
    window = find_connectivity_window(distinct)
    if not _is_small(topology, PATH_LIMIT, "diameter", left_out):
        return window, None, None
    diameter = compute_diameter(distinct[0].sparse)
    if window is None or window == 1:
        return window, diameter, diameter if window else None
    return window, diameter, compute_diameter(unite_graphs(distinct[:window]))


def _is_small(topology: Topology, limit: int, figure: str, left_out: list[str]) -> bool:
    if topology.clients <= limit:
        return True
    left_out.append(
        f"{figure}: needs dense {topology.clients:,} × {topology.clients:,} matrices, "
        f"the limit is {limit:,} clients"
    )
    return False


def _drop_repeats(graphs: list[Graph], fixed: bool) -> list[Graph]:
    return graphs[:1] if fixed else graphs


def _is_same(one: Graph, other: Graph) -> bool:
    if one is other:
        return True
    if one.matrix.shape != other.matrix.shape or count_links(one) != count_links(other):
        return False
    return not abs(one.matrix - other.matrix).max()


def _is_symmetric(graph: Graph) -> bool:
    if graph.one_row:
        weights = graph.matrix.data
        return len(weights) == graph.clients and bool(np.ptp(weights) <= TOLERANCE)
    return bool(np.abs(graph.matrix - graph.matrix.T).max() <= TOLERANCE)


def _mix(graph: Graph, values: Floats) -> Floats:
    """P · values, without making the matrix of a graph whose rows are all equal."""
    mixed: Floats = graph.matrix @ values
    return np.repeat(mixed, graph.clients, axis=0) if graph.one_row else mixed


def _compute_masses(graphs: Sequence[Graph]) -> list[Floats]:
    """μ after every round: 1 at the start, then μ ← P μ."""
    masses = []
    mass = np.ones(graphs[0].clients)
    for graph in graphs:
        mass = _mix(graph, mass)
        masses.append(mass)
    return masses


def measure_skewness(graphs: Sequence[Graph], masses: Sequence[Floats] | None) -> float | None:
    """ln(largest / smallest) of the clients' long-run weights; 0 if all weights are equal.

    Where columns sum to 1 that is `masses`, μ of some rounds (their mean is returned); elsewhere it
    is how much each start counts in the mean of what clients hold in the end. Unequal weights slow
    push-sum as a small spectral gap does (Liang et al. 2023). None where a weight is 0.
    """
    if masses is None:
        weights = np.full(graphs[0].clients, 1 / graphs[0].clients)
        for graph in reversed(graphs):
            weights = graph.sparse.T @ weights
        masses = [weights]
    if any(mass.min() <= 0 for mass in masses):
        return None
    return float(np.mean([np.log(mass.max() / mass.min()) for mass in masses]))


def _distance(product: Floats, column_stochastic: bool) -> float:
    debiased = product / product.sum(axis=1, keepdims=True)
    limit = 1 / len(product) if column_stochastic else debiased.mean(axis=0)
    return float(np.linalg.norm(debiased - limit, ord=2))


def _fit_envelope(distances: Floats) -> tuple[float, float]:
    rounds = np.flatnonzero(distances > FLOOR)
    if len(rounds) < 2:
        return 0.0, float(distances[0])
    slope = np.polyfit(rounds, np.log(distances[rounds]), deg=1)[0]
    rate = min(1.0, float(np.exp(slope)))
    return rate, float((distances[rounds] / rate**rounds).max())


def _count_traffic(graph: Graph) -> tuple[int, int]:
    """(messages on the network, messages in and out of the busiest): a server sees them all."""
    both = count_uploads(graph) + count_downloads(graph)
    if graph.hub:
        return int(both.sum()), int(both.sum())
    return int(count_uploads(graph).sum()), int(both.max())


def measure_spread(counts: list[Integers]) -> Spread:
    """Minimum, mean and maximum over all clients and rounds."""
    everything = np.concatenate(counts)
    return Spread(float(everything.min()), float(everything.mean()), float(everything.max()))


# Record adaptive graphs and check their connectivity afterwards.


CONNECTIVITY_WINDOW = 10
"""Rounds that should be strongly connected together, by default."""
FAMOUS = 3
"""Windows that a sentence lists; the rest are counted."""


def graph_to_text(graph: Graph) -> str:
    """The receivers of each client: "1 4;0 2;…"; weights and activity are left out."""
    links = graph.sparse.tocoo()
    across = (links.row != links.col) & (links.data != 0)
    receivers: list[list[str]] = [[] for _ in range(graph.clients)]
    for sender, receiver in sorted(zip(links.col[across], links.row[across], strict=True)):
        receivers[sender].append(str(receiver))
    return ";".join(map(" ".join, receivers))


def graph_from_text(text: str) -> Graph:
    """The links that `graph_to_text` wrote; a client splits its mass evenly over itself and its
    receivers."""
    try:
        chosen = [[int(name) for name in names.split()] for names in text.split(";")]
        counts = np.array([1 + len(names) for names in chosen])
        everyone = np.arange(len(chosen))
        receivers = np.concatenate([[me, *names] for me, names in enumerate(chosen)])
        senders = np.repeat(everyone, counts)
        return build_graph(len(chosen), receivers, senders, 1 / counts[senders])
    except ValueError:
        raise QuiverError(
            f"{text[:40]!r} are no links of a graph: the record is damaged."
        ) from None


@dataclass(frozen=True)
class ConnectivityReport:
    """Whether the unions of consecutive graphs stayed strongly connected."""

    rounds: int
    window_rounds: int
    """Number of consecutive rounds in each union."""
    window: int | None
    """B: every B consecutive graphs together are strongly connected; None: not even all are."""
    disconnected: tuple[int, ...]
    """The first rounds, from 0, of the windows that are not connected."""

    def describe(self) -> str:
        if self.window is None:
            return f"falls apart: all {self.rounds} rounds together are not strongly connected."
        if not self.disconnected:
            span = "every round" if self.window == 1 else f"any {self.window} consecutive rounds"
            return f"{span} strongly connected (B = {self.window}) in {self.rounds} rounds."
        examples = ", ".join(
            f"{t + 1}–{t + self.window_rounds}" for t in self.disconnected[:FAMOUS]
        )
        more = len(self.disconnected) - FAMOUS
        return (
            f"falls apart: of {self.rounds - self.window_rounds + 1} windows of "
            f"{self.window_rounds} rounds {len(self.disconnected)} are not strongly connected "
            f"(rounds {examples}"
            f"{f' and {more} more' if more > 0 else ''}); "
            f"any {self.window} consecutive rounds are (B = {self.window})."
        )


def check_connectivity(
    graphs: Sequence[Graph], window_rounds: int = CONNECTIVITY_WINDOW
) -> ConnectivityReport:
    """Unite every window of so many rounds, or of all if there are fewer."""
    window_rounds = min(window_rounds, len(graphs))
    ends = find_connected_ends(graphs)
    starts = range(len(graphs) - window_rounds + 1)
    last = [len(graphs) if end is None else end for end in ends]
    disconnected = tuple(t for t in starts if last[t] >= t + window_rounds)
    return ConnectivityReport(len(graphs), window_rounds, find_smallest_window(ends), disconnected)
