"""The benchmark's tables: which edition a figure was measured on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import crowd, limit, machine, report, training
from benchmarks.figures import Figure
from benchmarks.frameworks import compare
from benchmarks.product import Product
from benchmarks.works import VARIANTS, C

MARKS = "\n".join(
    f"{report.begin_mark(part)}\nold\n{report.END}"
    for part in (*report.QUESTIONS, report.INSTEAD, "runs")
)


def _about(commit: str) -> dict:
    described = {**machine.describe(), "quiverfl": "0.3.0", "commit": commit}
    run = {"threads": 1, "clock": "cpu", "quick": False, "load": "0.1", "date": "2026-01-01"}
    return {**run, "machine": described}


def test_figures_of_several_editions_stand_together_only_if_asked(tmp_path: Path) -> None:
    result, page = tmp_path / "result.json", tmp_path / "page.md"
    page.write_text(f"before\n{MARKS}\nafter\n")
    report.write(result, [Figure("A", "naive / ours", 8.0, "≥", 5)], _about("aaa"))
    report.render(result, page)
    assert "edition" not in page.read_text()
    assert "Quiver 0.3.0 (aaa). Cpu time" in page.read_text().replace("\n", " ")
    report.write(result, [Figure("B", "naive / ours", 2.0)], _about("bbb"))
    with pytest.raises(SystemExit, match=r"2 editions \(0.3.0 \(aaa\): A; 0.3.0 \(bbb\): B\)"):
        report.render(result, page)
    report.render(result, page, mixed=True)
    lines = page.read_text().splitlines()
    assert "| A | naive / ours | 8.00 | ≥ 5 | pass | 0.3.0 (aaa) |" in lines
    assert "| B | naive / ours | 2.00 | – | – | 0.3.0 (bbb) |" in lines
    assert lines[0] == "before"
    assert lines[-1] == "after"
    assert "old" not in lines
    page.write_text(MARKS.replace("growth", "size"))
    with pytest.raises(SystemExit, match="marks"):
        report.render(result, page, mixed=True)


@pytest.mark.parametrize(
    ("work", "name", "question"),
    [
        ("A", "naive / ours", "others"),
        ("frameworks", "A: Flower / ours", "others"),
        ("A", "ours / limit", "limit"),
        ("D", "extra memory of mixing, m = 100", "limit"),
        ("T", "ours / batched products, 20,000 clients", "limit"),
        ("T", "peak memory, 100,000 clients", "growth"),
        ("T", "whole round per client at 100,000 / at 10,000", "growth"),
        ("E", "time per client at 10 / at 100", "growth"),
        ("C", "naive / ours, compiled, bf16", "others"),
        ("C", "evaluation / bare forward, compiled", "limit"),
        ("fedrep", "FedRep: Flower / Quiver", "instead"),
        ("run", "`quiver run` / its training and mixing, A, 60 rounds", "limit"),
    ],
)
def test_every_figure_answers_one_of_three_questions(work: str, name: str, question: str) -> None:
    assert report._question(Figure(work, name, 1.0)) == question


def test_figures_of_before_commits_were_written_are_an_edition_of_their_own(
    tmp_path: Path,
) -> None:
    result, page = tmp_path / "result.json", tmp_path / "page.md"
    page.write_text(MARKS)
    report.write(result, [Figure("A", "one", 1.0), Figure("B", "two", 1.0)], _about("aaa"))
    records = json.loads(result.read_text())
    del records["figures"][0]["run"]["machine"]["commit"]
    result.write_text(json.dumps(records))
    with pytest.raises(SystemExit, match="unknown"):
        report.render(result, page)


def test_a_run_says_its_commit_and_whether_files_were_changed() -> None:
    commit = machine.describe()["commit"]
    assert commit == "unknown" or set(commit) <= set("0123456789abcdef+")


def test_the_bare_loop_computes_the_products_of_the_tiny_model() -> None:
    work = replace(crowd.T, clients=3)
    assert sum(leaf.numel() for leaf in work.model().parameters()) == 1_188
    crowd.bare_products(work)()
    model, x = work.model(), torch.randn(3, 10, crowd.INPUTS)
    stacked = [leaf.detach().expand(3, *leaf.shape) for leaf in model.parameters()]
    together = crowd._model(*stacked, x)
    alone = model(x.flatten(0, 1)).view_as(together)
    assert torch.allclose(together, alone, atol=1e-6)


def test_a_run_is_shown_with_its_time_memory_and_lines(tmp_path: Path) -> None:
    result, page = tmp_path / "result.json", tmp_path / "page.md"
    page.write_text(MARKS)
    details = {"version": "1.2", "megabytes": 1234.5, "lines": 17}
    skipped = Figure(
        "fedrep", "FedRep: other / Quiver", None, note="does not install: no such name"
    )
    given = [Figure("fedrep", "FedRep: a loop / Quiver", 2.345, details=details), skipped]
    report.write(result, given, _about("aaa"))
    report.render(result, page)
    assert "| a loop 1.2 | 2.35 | 1,234 MB | 17 |" in page.read_text()
    assert "| other: does not install: no such name | – | – | – |" in page.read_text()


def test_lines_of_a_user_are_those_between_the_marks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os\n{compare.BEGIN}\na = 1\n\n# why\nb = 2\n{compare.END}\nc = 3\n")
    assert compare.count_lines(script) == 3
    for framework in compare.FRAMEWORKS:
        if framework.fedrep:
            assert compare.count_lines(compare.HERE / framework.fedrep) > 10


def test_of_three_runs_the_middle_one_counts() -> None:
    found = training._middle(tuple(Figure("C", "one", value) for value in (1.5, 1.2, 1.9)))
    assert found.value == 1.5
    assert found.details["runs"] == [1.5, 1.2, 1.9]


@pytest.mark.parametrize("name", VARIANTS["C"])
def test_compiled_layers_are_measured_against_their_own_bare_pass(name: str) -> None:
    """In the same precision: a limit in float32 would make bfloat16 look better than it is."""
    work = replace(VARIANTS["C"][name], clients=2, samples=8, test=4)
    assert limit.forms(work) == ("channels_last",)
    assert limit.forms(C) == ("contiguous", "channels_last")
    product, types = Product(work), []
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, y: types.append(y.dtype) if isinstance(module, torch.nn.Conv2d) else None
    )
    try:
        product.round()
        ours = set(types)
        types.clear()
        limit.phases(work, "channels_last")()
    finally:
        hook.remove()
    expected = torch.bfloat16 if "bf16" in name else torch.float32
    assert ours == set(types) == {expected}
