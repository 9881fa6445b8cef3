"""The theory that can be run: the problem's constants, and the findings of a quick run."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import quiverfl as qv
from quiverfl.cli.main import app
from quiverfl.errors import QuiverError
from quiverfl.paper.theory import experiments as theory_settings
from quiverfl.paper.theory.experiments import fit_slope
from quiverfl.paper.theory.problem import (
    METHOD,
    Problem,
    bounded_error,
    make_corollary_training,
    make_training,
    run_problem,
)

PROBLEM = Problem(clients=7, dimension=5, seed=3)


def point(problem: Problem, seed: int = 0) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    shape = (problem.clients, problem.dimension)
    return random.normal(size=shape), random.normal(size=shape)


def test_the_model_is_the_formula() -> None:
    """Values and gradients of the module on a client's example, against the closed form."""
    u, v = point(PROBLEM)
    losses, slopes = PROBLEM.losses(u, v), PROBLEM.gradients(u, v)
    for client in range(PROBLEM.clients):
        module = PROBLEM.task.model().double()
        with torch.no_grad():
            module.u.copy_(torch.from_numpy(u[client]))
            module.v.copy_(torch.from_numpy(v[client]))
        loss = module(PROBLEM.data.train.of_client(client)[0])[0]
        loss.backward()
        assert loss.item() == pytest.approx(losses[client], rel=1e-12)
        np.testing.assert_allclose(module.u.grad, slopes[0][client], rtol=1e-12)
        np.testing.assert_allclose(module.v.grad, slopes[1][client], rtol=1e-12)


def test_the_constants_are_those_of_the_assumptions() -> None:
    """Differences of gradients divided by differences of points; distances at the optimum."""
    (u, v), (other_u, other_v) = point(PROBLEM), point(PROBLEM, seed=1)

    def lipschitz(part: int, first: Any, second: Any, moved: Any) -> float:
        change = PROBLEM.gradients(*first)[part] - PROBLEM.gradients(*second)[part]
        return float((np.linalg.norm(change, axis=1) / np.linalg.norm(moved, axis=1)).max())

    assert lipschitz(0, (u, v), (other_u, v), u - other_u) == pytest.approx(PROBLEM.smooth_shared)
    assert lipschitz(1, (u, v), (u, other_v), v - other_v) == pytest.approx(PROBLEM.smooth_personal)
    assert lipschitz(0, (u, v), (u, other_v), v - other_v) == pytest.approx(PROBLEM.cross)
    assert lipschitz(1, (u, v), (other_u, v), u - other_u) == pytest.approx(PROBLEM.cross)
    best = np.full_like(u, PROBLEM.optimum)
    shared, personal = PROBLEM.gradients(best, best)
    assert np.abs(shared.mean(axis=0)).max() < 1e-14
    assert np.abs(personal).max() < 1e-14
    assert np.linalg.norm(shared, axis=1).max() == pytest.approx(PROBLEM.diversity)


def test_the_noise_has_exactly_its_variance_and_no_mean() -> None:
    augment = PROBLEM.data.augment
    assert augment is not None
    x = PROBLEM.data.train.of_client(0)[0].repeat(4000, 1)
    keys = np.random.default_rng(0).integers(0, 2**64, len(x), dtype=np.uint64)
    drawn = augment(x, keys)
    size = PROBLEM.dimension
    assert torch.equal(drawn[:, : -2 * size], x[:, : -2 * size])
    for noise, variance in (
        (drawn[:, -2 * size : -size], PROBLEM.noise_shared**2),
        (drawn[:, -size:], PROBLEM.noise_personal**2),
    ):
        np.testing.assert_allclose((noise**2).sum(dim=1), variance, rtol=1e-12)
        assert noise.mean(dim=0).abs().max() < 5 * (variance / size / len(x)) ** 0.5


def test_the_gradients_of_a_run_are_those_of_the_formula() -> None:
    """At the state after the last of some noisy rounds of push-sum."""
    graph = qv.random_push(PROBLEM.clients, 2, seed=1)
    kept: list[dict[str, Any]] = []

    def keep(checkpoint: Any) -> None:
        kept.append({name: leaf.clone().numpy() for name, leaf in checkpoint.tensors.items()})

    records = run_problem(PROBLEM, graph, make_training(PROBLEM, 0.2), 4, checkpoint=keep)
    u, v, mu = (kept[-1][f"state/{name}"] for name in ("u", "v", "mu"))
    shared = PROBLEM.gradients(np.repeat(u.mean(axis=0)[None], len(u), axis=0), v)[0]
    personal = PROBLEM.gradients(u / mu[:, None], v)[1]
    last = records.iloc[-1]
    assert last.gradient_shared == pytest.approx((shared.mean(axis=0) ** 2).sum(), rel=1e-12)
    assert last.gradient_personal == pytest.approx((personal**2).sum(axis=1).mean(), rel=1e-12)
    both = last.gradient_shared / PROBLEM.smooth_shared
    both += last.gradient_personal / PROBLEM.smooth_personal
    assert bounded_error(PROBLEM, records)[-1] == pytest.approx(both)


def test_the_start_is_where_it_is_said_to_be() -> None:
    run = qv.simulate(
        PROBLEM.task,
        PROBLEM.data,
        method=METHOD,
        topology=qv.full(PROBLEM.clients),
        training=make_corollary_training(PROBLEM, 1.0, 100),
        rounds=0,
    )
    begin = run.state(0).u["u"].numpy()
    assert np.linalg.norm(begin - PROBLEM.optimum) == pytest.approx(PROBLEM.start, rel=1e-6)
    everywhere = np.full((PROBLEM.clients, PROBLEM.dimension), PROBLEM.beginning)
    best = np.full_like(everywhere, PROBLEM.optimum)
    gap = PROBLEM.losses(everywhere, everywhere) - PROBLEM.losses(best, best)
    assert PROBLEM.start_gap == pytest.approx(gap.mean())
    assert PROBLEM.start_gap > 0


def test_the_fit_recovers_a_power_and_its_interval() -> None:
    rounds = (10, 100, 1000)
    errors = np.array([[3 * t**-0.4 for t in rounds], [7 * t**-0.6 for t in rounds]])
    slope = fit_slope(rounds, errors)
    assert slope.value == pytest.approx(-0.5)
    # Two slopes 0.2 apart: standard error 0.1, Student's quantile with one degree of freedom.
    assert slope.high - slope.value == pytest.approx(12.7062 * 0.1, rel=1e-4)


def test_dimensions_beyond_the_bits_of_a_visit_are_refused() -> None:
    with pytest.raises(QuiverError, match="dimension = 33"):
        Problem(dimension=33)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """(folder, what was printed, the numbers) of one `quiver theory --quick`."""
    folder = tmp_path_factory.mktemp("theory")
    result = CliRunner().invoke(app, ["theory", "--quick", "--out", str(folder)])
    assert result.exit_code == 0, result.output
    return folder, result.output, json.loads((folder / "theory.json").read_text())


def test_the_rate_is_one_over_the_square_root(quick: Any) -> None:
    whole = quick[2]["rate"]["parts"][0]
    slope = whole["slope"]
    assert slope["low"] <= -0.5 <= slope["high"]
    assert slope["value"] == pytest.approx(-0.5, abs=0.04)
    assert whole["last_slope"] == pytest.approx(-0.5, abs=0.08)


def test_steps_that_do_not_shrink_do_not_have_that_rate() -> None:
    """The measurement can tell: from the optimum, noise alone keeps its level with T."""
    problem = Problem(start=0.0, diversity=0.0)
    errors = [
        bounded_error(
            problem, run_problem(problem, qv.full(problem.clients), make_training(problem, 0.5), t)
        ).mean()
        for t in (8, 72)
    ]
    assert np.log(errors[1] / errors[0]) / np.log(9) > -0.1


def test_diversity_alone_falls_faster(quick: Any) -> None:
    slopes = {part["name"]: part["slope"]["value"] for part in quick[2]["rate"]["parts"]}
    assert slopes["diversity"] < slopes["everything"] - 0.1


def test_better_connectivity_is_better(quick: Any) -> None:
    rows = {row["label"]: row for row in quick[2]["connectivity"]["rows"]}
    pushes = [rows[f"random_push, n = {n}"] for n in (1, 2, 5, 10)]
    family = [*pushes, rows["full"]]
    for name in ("contraction", "error", "disagreement"):
        values = [row[name] for row in family]
        assert values == sorted(values, reverse=True), name
    assert max(rows.values(), key=lambda row: row["error"])["label"] == "directed ring"
    assert rows["full"]["disagreement"] < 1e-25
    assert quick[2]["connectivity"]["rank_correlation"] > 0.8


def test_push_sum_conserves_the_mean_and_pulling_does_not(quick: Any) -> None:
    push, pull, biased = quick[2]["conservation"]["mixing"]
    assert max(push["drift"]) < 1e-14
    assert max(biased["drift"]) < 1e-14
    assert min(pull["drift"]) > 0.01
    assert push["distance"] < 1e-4  # clients agree on the mean they started from
    assert pull["disagreement"] < 1e-4  # clients agree too, but on something else
    assert pull["distance"] == pytest.approx(pull["drift"][-1], rel=1e-3)
    assert biased["disagreement"] > 0.1  # u without its μ never agrees


def test_on_a_fixed_graph_pulling_ends_elsewhere(quick: Any) -> None:
    limits = {x["label"]: x for x in quick[2]["conservation"]["limits"] if x["static"]}
    push, pull, biased = (limits[name] for name in limits)
    assert pull["mean_distance"] > 2 * push["mean_distance"]
    assert biased["client_distance"] > push["client_distance"]


def test_a_bounded_step_falls_at_the_same_rate_and_ends_elsewhere_on_a_fixed_graph(
    quick: Any,
) -> None:
    rows = {(row["rule"], row["neighbors"]): row for row in quick[2]["steps"]}
    for neighbors in (2, 10):
        slopes = [rows[rule, neighbors]["slope"]["value"] for rule in ("paper", "debiased")]
        assert slopes[0] == pytest.approx(slopes[1], abs=0.1)
    # With ten neighbours μ is close to 1 on new graphs; on one graph some clients keep less of it.
    paper, debiased = (rows[rule, 10]["limits"] for rule in ("paper", "debiased"))
    assert debiased[0] == pytest.approx(paper[0], abs=0.05)
    assert debiased[1] > 3 * paper[1]


def test_everything_is_written_and_printed(quick: Any) -> None:
    folder, printed, numbers = quick
    for name in ("rate", "connectivity", "conservation"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        ElementTree.parse(folder / f"{name}.svg")
    page, tables = (folder / "index.html").read_text(), (folder / "tables.md").read_text()
    assert page.count("<svg") == 3
    slope = f"{numbers['rate']['parts'][0]['slope']['value']:.3f}".replace("-", "−")
    for text in (printed, page, tables):
        assert slope in text
        assert "directed ring" in text
        assert "push without μ" in text
    assert numbers["verdicts"][0] in page


def test_json_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = theory_settings.TheorySettings((2, 4), (2, 4), 2, 2, 2, 4, (0.4,))
    monkeypatch.setattr(theory_settings, "QUICK", tiny)
    result = CliRunner().invoke(app, ["theory", "--quick", "--json"])
    printed = json.loads(result.stdout)
    assert printed["page"] is None
    assert len(printed["rate"]["parts"][0]["errors"]) == 2


def test_a_file_in_the_way_is_named_before_anything_is_run(tmp_path: Path) -> None:
    (tmp_path / "here").write_text("mine")
    result = CliRunner().invoke(app, ["theory", "--out", str(tmp_path / "here")])
    assert isinstance(result.exception, QuiverError)
    assert "it is a file" in str(result.exception)
    assert (tmp_path / "here").read_text() == "mine"
