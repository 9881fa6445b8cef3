"""Tests of differences: exact numbers by hand, from scipy, and from published tables."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from typer.testing import CliRunner

from quiverfl.cli.main import app
from quiverfl.results.figures import make_figure, save_figure
from quiverfl.results.groups import Group, group_runs
from quiverfl.results.run_files import find_runs
from quiverfl.results.statistics import (
    MeanRanks,
    critical_difference,
    describe_ranks,
    draw_ranks,
    holm,
    interval,
    p_value,
    paired_differences,
    power,
    rank_methods,
    seeds_needed,
)
from run_folders import write_exact

DIFFERENCES = [0.02, 0.05, -0.01, 0.03]


@pytest.fixture
def groups(tmp_path: Path) -> list[Group]:
    """FedAvg against DFedPGP on three clients with two seeds."""
    for name, method, seed, scores in (
        ("a0", "fedavg", 0, [0.7, 0.9, 0.5]),
        ("a1", "fedavg", 1, [0.6, 0.8, 0.5]),
        ("d0", "dfedpgp", 0, [0.8, 0.9, 0.3]),
        ("d1", "dfedpgp", 1, [0.7, 0.9, 0.3]),
    ):
        write_exact(tmp_path / name, method, seed, [scores], [scores])
    return group_runs(find_runs([tmp_path]))


def test_p_and_interval_are_those_of_students_paired_test() -> None:
    expected = stats.ttest_1samp(DIFFERENCES, 0.0)
    assert p_value(DIFFERENCES) == pytest.approx(expected.pvalue)
    reach = expected.confidence_interval(0.95)
    assert interval(DIFFERENCES) == pytest.approx((reach.low, reach.high))
    # Steps of a small test set that happen to coincide prove nothing.
    assert math.isnan(p_value([0.1, 0.3 - 0.2]))
    assert all(math.isnan(end) for end in interval([0.1, 0.3 - 0.2]))
    assert p_value([0.0, 0.0]) == 1
    assert math.isnan(p_value([0.1]))


def test_holm_by_hand() -> None:
    """0.01·4, 0.02·3, 0.03·2 and 0.04·1, never less than the one before."""
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    found = holm([0.04, math.nan, 0.01])
    assert found[[0, 2]] == pytest.approx([0.04, 0.02])  # two comparisons, not three
    assert math.isnan(found[1])


@pytest.mark.parametrize(("effect", "seeds"), [(0.5, 34), (0.8, 15), (1.0, 10)])
def test_the_seeds_needed_are_those_of_published_tables(effect: float, seeds: int) -> None:
    """Cohen's sample sizes for a paired test: two-sided 5 %, power 80 %."""
    assert power(effect, seeds) >= 0.8 > power(effect, seeds - 1)
    half = effect * math.sqrt(2) / 2
    assert seeds_needed([half - 0.5, half + 0.5]) == pytest.approx(_needed(half, 0.5))


def _needed(mean: float, reach: float) -> float:
    """The same by simulation-free search over scipy's noncentral t."""
    std = reach * math.sqrt(2)
    for seeds in range(2, 1001):
        limit = stats.t.ppf(0.975, seeds - 1)
        if stats.nct.sf(limit, seeds - 1, mean / std * math.sqrt(seeds)) >= 0.8 - 1e-6:
            return float(seeds)
    return math.inf


def test_no_difference_is_found_by_no_number_of_seeds() -> None:
    assert seeds_needed([0.1, -0.1]) == math.inf
    assert seeds_needed([0.0, 0.0]) == math.inf
    assert math.isnan(seeds_needed([0.001, 0.001]))
    assert seeds_needed([0.5, 0.5001]) == 2
    assert math.isnan(seeds_needed([0.1]))


def test_clients_are_counted_within_their_seed(groups: list[Group]) -> None:
    (row,) = paired_differences(groups, "dfedpgp").to_dict("records")
    assert (row["clients_won"], row["clients_lost"], row["clients_tied"]) == (2, 3, 1)
    differences = [0.7 - 2.0 / 3, 1.9 / 3 - 1.9 / 3]
    assert row["difference"] == pytest.approx(np.mean(differences))
    assert row["p"] == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)


def test_the_report_prints_and_writes_them(groups: list[Group], tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    words = ["report", str(tmp_path), "--out", str(tmp_path / "r.html"), "--table", str(table)]
    words += ["--columns", "all"]
    shown = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    for text in (shown.output, table.read_text(), (tmp_path / "r.html").read_text()):
        assert "p (Holm)" in text
        assert "2 : 3" in text
    (row, _) = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["differences"]
    assert row["clients_lost"] == 3
    assert row["p_holm"] == pytest.approx(min(1.0, 2 * row["p"]))


@pytest.mark.parametrize(("methods", "q"), [(2, 1.960), (5, 2.728), (10, 3.164)])
def test_the_critical_difference_has_demsars_constants(methods: int, q: float) -> None:
    """Table 5a of Demšar 2006."""
    found = critical_difference(methods, 14) / math.sqrt(methods * (methods + 1) / (6 * 14))
    assert found == pytest.approx(q, abs=1e-3)


SCORES = pd.DataFrame(
    {"a": [0.9, 0.8, 0.7, 0.9], "b": [0.8, 0.8, 0.6, 0.7], "c": [0.1, 0.2, 0.3, 0.4]}
)


def test_ranks_are_friedmans() -> None:
    found = rank_methods(SCORES)
    assert found is not None
    assert found.methods == ("a", "b", "c")
    assert found.mean == pytest.approx((1.125, 1.875, 3.0))  # one tie
    assert found.p == pytest.approx(stats.friedmanchisquare(*SCORES.to_numpy().T).pvalue)
    assert found.cliques() == [(0, 1), (1, 2)]
    assert "p = " in describe_ranks(found)


def test_cases_with_a_gap_are_left_out_and_few_are_not_ranked() -> None:
    holed = SCORES.copy()
    holed.loc[0, "b"] = math.nan
    assert rank_methods(holed).cases == 3
    assert rank_methods(SCORES[:1]) is None
    assert rank_methods(SCORES[["a", "b"]]) is None


def test_cliques_are_as_long_as_can_be() -> None:
    found = MeanRanks(("a", "b", "c", "d"), (1.0, 1.5, 2.5, 4.0), 5, 0.01, 1.6)
    assert found.cliques() == [(0, 2), (2, 3)]
    alone = MeanRanks(("a", "b", "c"), (1.0, 2.0, 3.0), 5, 0.01, 0.5)
    assert alone.cliques() == []


def test_the_picture_names_every_method(tmp_path: Path) -> None:
    found = rank_methods(SCORES)
    assert found is not None
    titles = ["Alpha", "Beta", "Gamma"]
    figure = make_figure(lambda axes: draw_ranks(axes, found, titles), width=7, height=3)
    save_figure(figure, tmp_path / "ranks.svg")
    text = (tmp_path / "ranks.svg").read_text()
    assert all(title in text for title in titles)
    assert f"CD = {found.critical:.2f}" in text
