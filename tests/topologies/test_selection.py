"""Topologies that look: legal whatever they see, pure, by their rules, and closed to nobody."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiverfl.errors import QuiverError
from quiverfl.topologies import (
    ReportSpec,
    ReportView,
    Topology,
    bandit_push,
    custom,
    loss_push,
    make_topology,
    participating,
    random_push,
    similar_pull,
    similar_push,
    unreliable,
)
from quiverfl.topologies.analysis import (
    check_connectivity,
    draw_first_graphs,
    find_connected_ends,
    find_connectivity_window,
    graph_from_text,
    graph_to_text,
    unite_graphs,
)
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.reports import MOST_CLIENTS
from quiverfl.topologies.topology import count_uploads

RULES = {
    "loss": lambda m, n, **o: loss_push(m, n, **o),
    "similar": lambda m, n, **o: similar_push(m, n, sketch=4, **o),
    "bandit": lambda m, n, **o: bandit_push(m, n, **o),
    "bandit by similarity": lambda m, n, **o: bandit_push(m, n, by="similarity", sketch=4, **o),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def any_view(looks: ReportSpec, clients: int, random: np.random.Generator) -> ReportView:
    """Whatever could be told, and what should not: nothing, infinity, all the same."""
    told = random.normal(size=(clients, clients, looks.width)).astype(np.float32)
    told[random.random(told.shape) < 0.3] = random.choice([np.nan, np.inf, -np.inf, 0.0])
    heard = random.integers(-1, 50, (clients, clients)).astype(np.int32)
    return ReportView(
        looks, told, heard, random.integers(0, 9, (clients, clients)).astype(np.int32)
    )


def losses(rows: list[list[float]], sent: list[list[int]] | None = None) -> ReportView:
    told = np.array(rows, dtype=np.float32)[:, :, None]
    counts = np.zeros(told.shape[:2], dtype=np.int32) if sent is None else np.array(sent)
    return ReportView(ReportSpec(loss=True), told, np.zeros(told.shape[:2], dtype=np.int32), counts)


def chosen(topology: Topology, view: ReportView, round: int = 1) -> list[set[int]]:
    """Whom every client sends to."""
    links = topology(round, view).weights > 0
    return [set(np.flatnonzero(links[:, me])) - {me} for me in range(topology.clients)]


@every_rule
@settings(deadline=None, max_examples=40)
@given(
    clients=st.integers(2, 12),
    share=st.floats(0, 1),
    drawn=st.floats(0, 1),
    seed=st.integers(0, 2**40),
    round=st.integers(0, 10_000),
)
def test_columns_sum_to_one_whatever_is_seen(rule, clients, share, drawn, seed, round):
    neighbors = 1 + int(share * (clients - 2))
    explore = int(drawn * neighbors)
    topology = rule(clients, neighbors, explore=explore, seed=seed)
    view = any_view(topology.reports, clients, np.random.default_rng(seed))
    graph = topology(round, view)
    links = graph.weights > 0
    assert graph.column_stochastic
    assert links.diagonal().all()
    assert (links.sum(axis=0) == neighbors + 1).all()
    assert (graph.weights[links] == 1 / (neighbors + 1)).all()
    assert explore == 0 or (links.sum(axis=1) > explore).all()  # nobody is left out
    assert explore == 0 or find_connectivity_window([graph]) == 1
    again = pickle.loads(pickle.dumps(topology))(round, view)
    assert np.array_equal(graph.weights, again.weights)  # pure, and the same elsewhere


@every_rule
def test_seed_and_round_decide_what_the_view_leaves_open(rule):
    first, other = (rule(30, 3, seed=seed) for seed in (0, 1))
    nothing = ReportView.empty(first.reports, 30)
    drawn = first(0, nothing).weights
    assert np.array_equal(drawn, first(0).weights)  # before round 0 nobody was told anything
    assert not np.array_equal(drawn, other(0).weights)
    assert not np.array_equal(drawn, first(1, nothing).weights)


def test_by_loss():
    nan = np.nan
    view = losses([[9, 1, 3, 2], [1, 9, 2, 3], [5, 4, 9, nan], [nan, nan, nan, 9]])
    topology = loss_push(4, 1, candidates=3, explore=0)
    found = chosen(topology, view)
    assert found[:3] == [{2}, {3}, {0}]  # one's own loss, 9, is nobody's reason
    assert len(found[3]) == 1


def test_one_unknown_counts_as_the_average_of_the_known():
    nan = np.nan
    below = losses([[0, 4, 2, nan]] + [[nan] * 4] * 3)  # the average is 3: second
    two = loss_push(4, 2, candidates=3, explore=0)
    assert chosen(two, below)[0] == {1, 3}


def test_power_of_choice_takes_the_best_of_those_it_drew():
    """With n candidates the loss decides nothing; with all of them it decides everything."""
    view = losses([list(range(20))] * 20)
    for round in range(20):
        few = chosen(loss_push(20, 3, candidates=3, explore=0), view, round)
        every = chosen(loss_push(20, 3, candidates=19, explore=0), view, round)
        assert every[0] == {17, 18, 19}
        assert every[19] == {16, 17, 18}
    assert few[0] != {17, 18, 19}


def test_by_similarity():
    looks = ReportSpec(sketch=2)
    directions = np.array([[1, 0], [0.9, 0.1], [0, 5], [0.1, 3]], dtype=np.float32)
    told = np.repeat(directions[None], 4, axis=0)
    ages = np.zeros((4, 4), dtype=np.int32)
    found = chosen(similar_push(4, 1, explore=0, sketch=2), ReportView(looks, told, ages, ages))
    assert found == [{1}, {0}, {3}, {2}]  # by angle, not by length


@settings(deadline=None, max_examples=40)
@given(
    clients=st.integers(2, 12),
    share=st.floats(0, 1),
    drawn=st.floats(0, 1),
    sharpness=st.floats(0, 50),
    own=st.none() | st.floats(0.01, 0.99),
    seed=st.integers(0, 2**40),
)
def test_who_pulls_by_similarity_averages_whatever_is_seen(
    clients, share, drawn, sharpness, own, seed
):
    neighbors = 1 + int(share * (clients - 2))
    options = {"sharpness": sharpness, "own": own, "explore": int(drawn * neighbors)}
    topology = similar_pull(clients, neighbors, sketch=4, seed=seed, **options)
    view = any_view(topology.reports, clients, np.random.default_rng(seed))
    graph = topology(3, view)
    assert graph.row_stochastic
    links = graph.weights > 0
    assert (links.sum(axis=1) <= neighbors + 1).all()
    assert np.allclose(graph.weights.diagonal(), 1 / (neighbors + 1) if own is None else own)
    again = pickle.loads(pickle.dumps(topology))(3, view)
    assert np.array_equal(graph.weights, again.weights)
    # Before anybody was told anything, all are alike.
    first = topology(0).weights[~np.eye(clients, dtype=bool)]
    assert np.allclose(first[first > 0], (1 - graph.weights[0, 0]) / neighbors)
    assert (first > 0).sum() == clients * neighbors


def test_weights_by_similarity_of_models():
    """exp(σ cos), by hand; of two neighbours the most similar ones."""
    spec = ReportSpec(model=2)
    directions = np.array([[2, 0], [1, 1], [0, 3], [-1, 0]], dtype=np.float32)
    ages = np.zeros((4, 4), dtype=np.int32)
    view = ReportView(spec, np.repeat(directions[None], 4, axis=0), ages, ages)
    weights = similar_pull(4, 3, sharpness=2.0, own=0.4, sketch=2)(1, view).weights
    cosines = np.array([np.sqrt(0.5), 0.0, -1.0])  # of client 0 with 1, 2 and 3
    expected = 0.6 * np.exp(2 * cosines) / np.exp(2 * cosines).sum()
    assert np.allclose(weights[0], [0.4, *expected])
    two = similar_pull(4, 2, sharpness=2.0, explore=0, sketch=2)(1, view).weights
    expected = 2 / 3 * np.exp(2 * cosines[:2]) / np.exp(2 * cosines[:2]).sum()
    assert np.allclose(two[0], [1 / 3, *expected, 0])
    unknown = view.values.copy()
    unknown[0, 3] = np.nan  # counts as the average of the others
    some = ReportView(spec, unknown, ages, ages)
    row = similar_pull(4, 3, sharpness=2.0, own=0.4, sketch=2)(1, some).weights[0]
    filled = np.exp(2 * np.array([*cosines[:2], cosines[:2].mean()]))
    assert np.allclose(row[1:], 0.6 * filled / filled.sum())


def test_by_upper_confidence_bounds():
    rows = [[0.0, 1.0, 0.5, 0.0]] * 4
    sent = [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    topology = bandit_push(4, 1, confidence=1.0, explore=0)
    assert chosen(topology, losses(rows, sent), 3)[0] == {1}
    sent[0] = [0, 50, 3, 0]  # scaled losses 1, ½, 0; bounds √(ln 4 / (1 + sent))
    bounds = np.array([1, 0.5, 0]) + np.sqrt(np.log(4) / (1 + np.array([50, 3, 0])))
    assert bounds.argmax() == 2
    assert chosen(topology, losses(rows, sent), 3)[0] == {3}
    assert chosen(bandit_push(4, 1, confidence=0.0, explore=0), losses(rows, sent), 3)[0] == {1}


@every_rule
def test_exploration_keeps_every_link_possible(rule):
    """However firm the view is, in enough rounds everybody has sent to everybody."""
    topology, firm = (rule(8, 2, explore=explore, seed=3) for explore in (1, 0))
    view = any_view(topology.reports, 8, np.random.default_rng(0))
    told = np.random.default_rng(1).random(view.values.shape).astype(np.float32)
    view = ReportView(view.spec, told, view.heard, 0 * view.sent)
    explored = sum(topology(round, view).weights > 0 for round in range(200))
    assert (explored > 0).all()
    if firm.name != "loss_push":  # whose candidates are drawn
        assert graph_to_text(firm(50, view)) == graph_to_text(firm(51, view))


def test_all_is_chance_where_everybody_is_drawn():
    topology = loss_push(10, 3, explore=3, seed=0)
    view = losses([list(range(10))] * 10)
    counts = sum((topology(round, view).weights > 0).astype(int) for round in range(600))
    others = counts[~np.eye(10, dtype=bool)]
    assert others.min() > 150  # 200 expected of 600, with a deviation of 11.5
    assert others.max() < 250


def test_nobody_is_starved_of_mass():
    """Everybody wants to send to the same three: without exploring the others' μ would vanish."""
    view = losses([[9.0, 8.0, 7.0] + [1.0] * 7] * 10)
    smallest = {}
    for explore in (0, 1):
        topology, mu = loss_push(10, 2, candidates=9, explore=explore, seed=0), np.ones(10)
        for round in range(60):
            mu = topology(round, view).sparse @ mu
        smallest[explore] = mu.min()
    assert smallest[0] < 1e-3 < smallest[1]


@every_rule
def test_mass_is_conserved_over_500_rounds(rule):
    """Σμ and Σu, in float64, where every choice depends on what was mixed before."""
    clients = 10
    topology = rule(clients, 3, seed=1)
    random = np.random.default_rng(0)
    u, mu = random.normal(size=(clients, 7)), np.ones(clients)
    total, view = u.sum(axis=0), ReportView.empty(topology.reports, clients)
    for round in range(500):
        graph = topology(round, view)
        telling = np.resize(u / mu[:, None], (clients, topology.reports.width)).astype(np.float32)
        view = view.with_messages(round, graph, telling)
        u, mu = graph.sparse @ u, graph.sparse @ mu
        assert abs(mu.sum() - clients) < 1e-12
    assert np.abs(u.sum(axis=0) - total).max() < 1e-12
    assert mu.min() > 0


def test_clients_know_what_they_were_told_and_nothing_else():
    view = ReportView.empty(ReportSpec(loss=True, norm=True), 3)
    ring = np.array([[0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0.5, 0.5]])  # 0 → 1 → 2 → 0
    topology = custom(lambda _: ring, 3)
    first = view.with_messages(
        0, topology(0), np.array([[1, 10], [2, 20], [3, 30]], dtype=np.float32)
    )
    nan = np.nan
    assert np.array_equal(first.loss, [[1, nan, 3], [1, 2, nan], [nan, 2, 3]], equal_nan=True)
    assert np.array_equal(first.norm[0], [10, nan, 30], equal_nan=True)
    assert first.heard.tolist() == [[-1, -1, 0], [0, -1, -1], [-1, 0, -1]]
    assert first.sent.tolist() == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]
    back = custom(lambda _: ring.T, 3)
    second = first.with_messages(1, back(1), np.array([[4, 0], [5, 0], [6, 0]], dtype=np.float32))
    assert second.loss.tolist() == [[4, 5, 3], [1, 5, 6], [4, 2, 6]]  # the old beside the new
    assert np.isnan(view.values).all()
    with pytest.raises(QuiverError, match=r"no sketch.*reports=ReportSpec\(sketch=32\)"):
        _ = first.sketch


def test_clients_away_and_links_that_fail_see_the_same_view():
    plain = loss_push(12, 3, seed=0)
    view = losses(np.random.default_rng(0).random((12, 12)).tolist())
    for wrapped in (
        participating(plain, 0.5, seed=4),
        unreliable(plain, 0.4, seed=4, exchange="push"),
        make_topology("loss_push", 12, neighbors=3, participation=0.5, link_failure=0.2),
    ):
        assert wrapped.reports == plain.reports
        graph = wrapped(5, view)
        assert graph.column_stochastic
        across = (graph.weights > 0) & ~np.eye(12, dtype=bool)
        assert (plain(5, view).weights[across] > 0).all()  # a part of the same links
        assert 0 < across.sum() < 36


def test_a_later_round_is_not_known_without_a_view():
    with pytest.raises(QuiverError, match="loss_push is adaptive, so its graph"):
        loss_push(6, 2)(1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: loss_push(6, 2, candidates=1), "candidates = 1"),
        (lambda: loss_push(6, 6), "neighbors = 6"),
        (lambda: similar_push(6, 2, sketch=1), "sketch = 1"),
        (lambda: similar_push(6, 2, explore=3), "explore = 3"),
        (lambda: similar_push(6, 2, explore=0.5), "explore = 0.5"),
        (lambda: bandit_push(6, 2, by="luck"), "by = 'luck'"),
        (lambda: bandit_push(6, 2, confidence=-1.0), "confidence = -1.0"),
        (lambda: loss_push(MOST_CLIENTS + 1, 2), "2,001 clients"),
        (lambda: similar_pull(6, 2, sketch=1), "sketch = 1"),
        (lambda: similar_pull(6, 2, own=0), r"own = 0: it must be in \(0, 1\]"),
        (lambda: similar_pull(6, 2, sharpness=-1), "sharpness = -1"),
        (lambda: ReportSpec(), "nothing to report"),
    ],
)
def test_what_makes_no_sense_is_refused(make, words):
    with pytest.raises(QuiverError, match=words):
        make()


def test_links_are_written_down_and_read_again():
    graph = random_push(9, 2, seed=0)(0)
    text = graph_to_text(graph)
    assert text.count(";") == 8
    assert np.array_equal(graph_from_text(text).weights, graph.weights)
    assert graph_to_text(random_push(2, 1, seed=0)(0)) == "1;0"
    for damaged in ("1;x", "1;7", "1;-1"):
        with pytest.raises(QuiverError, match="damaged"):
            graph_from_text(damaged)


def test_a_union_that_falls_apart_is_told():
    apart, across = graph_from_text("1;0;3;2"), graph_from_text("2;;0;")
    watched = check_connectivity([apart] * 4 + [across] + [apart] * 5, 3)
    assert watched.window == 6
    assert watched.disconnected == (0, 1, 5, 6, 7)
    assert (
        "of 8 windows of 3 rounds 5 are not strongly connected (rounds 1–3, 2–4, 6–8 and 2 more)"
        in (watched.describe())
    )
    assert check_connectivity([apart] * 4).window is None
    assert "all 4 rounds together are not" in check_connectivity([apart] * 4).describe()
    assert (
        check_connectivity([across, apart] * 4, 2).describe().startswith("any 2 consecutive rounds")
    )
    assert check_connectivity([random_push(4, 3)(0)] * 3).describe().startswith("every round")


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 5), st.integers(1, 9), st.integers(0, 10**6), st.floats(0.02, 0.6))
def test_windows_are_those_that_trying_all_of_them_finds(clients, rounds, seed, density):
    random = np.random.default_rng(seed)
    graphs = []
    for _ in range(rounds):
        names = [
            " ".join(str(j) for j in range(clients) if j != i and random.random() < density)
            for i in range(clients)
        ]
        graphs.append(graph_from_text(";".join(names)))

    def connected(begin: int, end: int) -> bool:
        reach = sum(graph.weights for graph in graphs[begin:end]) > 0
        return bool((np.linalg.matrix_power(reach.astype(float), clients) > 0).all())

    ends = [
        next((end for end in range(begin, rounds) if connected(begin, end + 1)), None)
        for begin in range(rounds)
    ]
    assert find_connected_ends(graphs) == ends
    window = next(
        (
            b
            for b in range(1, rounds + 1)
            if all(connected(t, t + b) for t in range(rounds - b + 1))
        ),
        None,
    )
    assert find_connectivity_window(graphs) == window


def test_without_exploring_similar_clients_keep_to_themselves():
    """What `quiver topology show` warns of: two kinds of clients that stop talking."""
    kinds = np.repeat([[1.0, 0.0], [0.0, 1.0]], 5, axis=0).astype(np.float32)

    def graphs(explore: int) -> list[Graph]:
        topology = similar_push(10, 3, explore=explore, sketch=2, seed=0)
        view, found = ReportView.empty(topology.reports, 10), []
        for round in range(60):
            found.append(topology(round, view))
            view = view.with_messages(round, found[-1], kinds)
        return found[20:]

    assert check_connectivity(graphs(0)).window is None
    assert check_connectivity(graphs(1)).window == 1


def test_the_first_graphs_are_those_of_clients_that_always_tell_the_same():
    topology = loss_push(12, 3, candidates=11, explore=0, seed=0)
    graphs = draw_first_graphs(topology, 40)
    assert all((count_uploads(graph) == 3).all() for graph in graphs)
    plain = random_push(12, 3, seed=0)
    assert (
        unite_graphs(graphs[20:]).nnz < unite_graphs(draw_first_graphs(plain, 40)[20:]).nnz == 144
    )
    assert np.array_equal(draw_first_graphs(plain, 3)[2].weights, plain(2).weights)
