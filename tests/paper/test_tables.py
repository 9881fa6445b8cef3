"""Tables from runs whose numbers are known: means, spreads, targets, equal steps, differences."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from quiverfl.errors import QuiverError
from quiverfl.paper.reproduce import scores as paper_scores
from quiverfl.paper.reproduce import tables as paper_tables
from quiverfl.paper.reproduce.catalogue import ITEMS, Item
from quiverfl.paper.reproduce.scores import Results, collect_results
from quiverfl.paper.reproduce.tables import describe_settings, list_by_method
from quiverfl.paper.reproduce.write import curves_by_method
from quiverfl.results.formatting import Column, Table, TableCell
from quiverfl.results.run_files import finish_history, read_run
from quiverfl.results.summary import EvaluationProtocol, summarize
from quiverfl.results.tables import print_tables
from quiverfl.runs.config import parse_config
from quiverfl.runs.folder import RunFolder
from quiverfl.sweeps.plan import Cell, SweepFolder

CASE = "CIFAR-10 Dir-0.3"
ITEM = ITEMS["table1"]
Curves = Mapping[str, Sequence[float]]
"""Stage → mean over clients, round by round."""


def cell(method: str, seed: int = 0, case: str = CASE, rounds: int = 3) -> Cell:
    tree = {
        "method": {"name": method},
        "data": {"clients": 2},
        "run": {"seed": seed, "rounds": rounds},
        "topology": {"seed": len(case)},  # another case is another experiment
    }
    return Cell(parse_config(tree), case)


def write(
    places: SweepFolder, one: Cell, curves: Curves, steps: int = 10, topology: str = "random_push"
) -> Cell:
    """A finished run of two clients, one 0.1 above and one 0.1 below the mean."""
    folder = places.run(one)
    folder.mkdir(parents=True)
    config = {"config": one.config.model_dump(mode="json"), "identity": one.config.identity()}
    config["topology"] = {"name": topology, "neighbors": 1}
    (folder / "config.json").write_text(json.dumps(config))
    lines, rounds = [], []
    for t in range(len(curves["local"])):
        for stage in ("local", "mixed"):
            values = [curves[stage][t] - 0.1, curves[stage][t] + 0.1]
            lines.append({"round": t, "stage": stage, "metrics": {"accuracy": values}})
        cost: dict[str, Any] = {"round": t, "seconds": 1.0, "steps": [steps // 2] * 2}
        rounds.append({**cost, "network_bytes": 100, "busiest_bytes": 60})
    for name, content in (("history", lines), ("rounds", rounds)):
        text = "".join(json.dumps(line) + "\n" for line in content)
        (folder / f"{name}.jsonl").write_text(text)
    np.savez(folder / "partition.npz", train_counts=np.full((2, 3), 5), test_counts=np.ones((2, 3)))
    finish_history(folder)
    run = read_run(folder)
    summary = {**summarize(run.history, run.rounds), "finished": True}
    summary["protocol"] = EvaluationProtocol().record()
    (folder / "summary.json").write_text(json.dumps(summary))
    assert RunFolder(folder).is_finished()
    return one


def flat(local: float, mixed: float, rounds: int = 3) -> Curves:
    return {"local": [local] * rounds, "mixed": [mixed] * rounds}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """DFedPGP and FedAvg with two seeds each; FedAvg makes a tenth of the steps."""
    places = SweepFolder(tmp_path)
    rising = {"local": [0.50, 0.60, 0.84], "mixed": [0.40, 0.50, 0.70]}
    higher = {"local": [0.54, 0.64, 0.86], "mixed": [0.44, 0.54, 0.74]}
    cells = [
        write(places, cell("dfedpgp", 0), rising, 10),
        write(places, cell("dfedpgp", 1), higher, 10),
        write(places, cell("fedavg", 0), flat(0.80, 0.20), 4),
        write(places, cell("fedavg", 1), flat(0.70, 0.30), 4),
    ]
    return collect_results(cells, places)


def texts(table: Any) -> list[list[str]]:
    return [[one.text for one in row] for row in table.rows]


def test_accuracy_beside_the_papers_with_both_stages(results: Results) -> None:
    table = paper_tables.accuracy_table(ITEM, results, ("local", "mixed"))
    assert [(column.above, column.title) for column in table.columns] == [
        ("", "method"),
        (CASE, "paper"),
        (CASE, "local"),
        (CASE, "mixed"),
    ]
    assert texts(table) == [
        ["FedAvg", "79.66 ± 0.20", "75.00 ± 7.07", "25.00 ± 7.07"],
        ["DFedPGP", "85.61 ± 0.05", "85.00 ± 1.41", "72.00 ± 2.83"],
    ]
    assert [[one.best for one in row] for row in table.rows] == [
        [False, False, False, False],
        [False, False, True, True],
    ]
    for words in ("“local”", "“mixed”", "unweighted mean", "2 seeds", "does not say at which"):
        assert words in table.caption
    assert "2 clients, about 15 training samples each, mlp, 3 rounds, lr 0.1" in table.caption


def test_the_asked_stage_comes_first(results: Results) -> None:
    table = paper_tables.accuracy_table(ITEM, results, ("mixed", "local"), "best")
    assert [column.title for column in table.columns] == ["method", "paper", "mixed", "local"]
    assert "best round" in table.title


def test_a_case_the_paper_does_not_have_has_no_column_for_it(tmp_path: Path) -> None:
    places = SweepFolder(tmp_path)
    found = collect_results([write(places, cell("local", case="Digits"), flat(0.5, 0.4))], places)
    table = paper_tables.accuracy_table(ITEM, found, ("local", "mixed"))
    assert texts(table) == [["Local", "50.00", "40.00"]]
    assert "paper" not in table.caption


def test_graphs_are_named_and_what_theory_does_not_cover(tmp_path: Path) -> None:
    places = SweepFolder(tmp_path)
    cells = [
        write(places, cell("osgp"), flat(0.5, 0.4)),
        write(places, cell("dfedpgp"), flat(0.5, 0.4), topology="random_pull"),
    ]
    words = describe_settings(collect_results(cells, places))
    assert words.endswith(
        "OSGP on random_push (neighbors 1); DFedPGP on random_pull (neighbors 1). "
        "On random_pull μ stays 1 and the paper's theorem does not apply."
    )
    assert "theorem" not in describe_settings(collect_results(cells[:1], places))


def test_who_has_another_rate_or_trained_more_is_named(results: Results) -> None:
    table = paper_tables.accuracy_table(ITEM, results, ("local", "mixed"))
    assert "Local steps of a run, all clients together: " in table.caption
    pairs = [("local", "1"), ("osgp", "2"), ("dfedpgp", "2"), ("osgp", "2")]
    assert list_by_method(pairs) == "2 (1 for Local)"
    assert list_by_method([("osgp", "2"), ("osgp", "2")]) == "2"


def test_rounds_to_the_papers_target_where_somebody_reaches_it(results: Results) -> None:
    table = paper_tables.target_table(ITEMS["table2"], results, "local")
    assert table.columns[1].above == f"{CASE}, acc@80"
    assert texts(table) == [
        ["FedAvg", "–", "–", "–", "–"],
        ["DFedPGP", "131", "2.44 ×", "3.0 ± 0.0", "1.00 ×"],
    ]
    assert "The targets are the paper's." in table.caption


def test_else_the_target_is_what_half_of_the_methods_reach_with_every_seed(
    results: Results,
) -> None:
    frame = paper_scores.target_frame(results, "mixed")
    assert set(frame["target"]) == {0.45}  # the median of 0.70 and 0.20
    assert not frame["paper_target"].any()
    assert frame["paper_rounds"].isna().all()
    rounds = dict(zip(frame["method"], frame["rounds"], strict=True))
    assert rounds["dfedpgp"] == 2.0
    assert math.isnan(rounds["fedavg"])


def test_equal_steps_cut_everybody_at_the_smallest_budget(results: Results) -> None:
    frame = paper_scores.equal_steps_frame(results).set_index("method")
    assert set(frame["steps_allowed"]) == {12.0}
    assert frame.loc["fedavg", "local_rounds"] == 3
    assert frame.loc["dfedpgp", "local_rounds"] == 1
    assert frame.loc["dfedpgp", "local_mean"] == pytest.approx(0.52)
    assert frame.loc["fedavg", "mixed_mean"] == pytest.approx(0.25)
    table = paper_tables.equal_steps_table(ITEM, results, ("local", "mixed"))
    assert table.columns[1].above == f"{CASE}, 12 steps"
    assert texts(table)[1] == ["DFedPGP", "1", "52.00 ± 2.83", "42.00 ± 2.83"]


def test_differences_are_taken_within_seeds(results: Results) -> None:
    table = paper_tables.difference_table(ITEM, results, ("local", "mixed"))
    assert table is not None
    # seed 0: 0.80 - 0.84, seed 1: 0.70 - 0.86
    assert texts(table) == [["FedAvg", "−10.00 ± 8.49", "−47.00 ± 4.24"]]
    frame = paper_scores.difference_frame(results, "last")
    assert list(frame["stage"]) == ["local", "mixed"]
    assert list(frame["seeds"]) == [2, 2]


def test_without_dfedpgp_or_others_there_is_nothing_to_compare(tmp_path: Path) -> None:
    places = SweepFolder(tmp_path)
    for method in ("local", "dfedpgp"):
        found = collect_results([write(places, cell(method), flat(0.5, 0.5))], places)
        assert paper_tables.difference_table(ITEM, found, ("local", "mixed")) is None


def test_what_has_not_finished_is_left_out_and_said(tmp_path: Path) -> None:
    places = SweepFolder(tmp_path)
    done = write(places, cell("dfedpgp", 0), flat(0.6, 0.5))
    diverged = write(places, cell("dfedpgp", 1), flat(0.1, 0.1))
    text = {"finished": False, "diverged": {"round": 2, "client": 1}, "error": "…"}
    (places.run(diverged) / "summary.json").write_text(json.dumps(text))
    found = collect_results([done, diverged, cell("osgp")], places)
    table = paper_tables.accuracy_table(ITEM, found, ("local", "mixed"))
    assert texts(table)[0][2:] == ["60.00", "50.00"]
    assert f"DFedPGP on {CASE}, seed 1, diverged." in table.caption
    assert f"OSGP on {CASE}, seed 0, has not finished." in table.caption
    with pytest.raises(QuiverError, match="nothing has finished yet"):
        collect_results([diverged], places)


def test_a_series_has_cases_in_rows(tmp_path: Path) -> None:
    places = SweepFolder(tmp_path)
    cells = [
        write(places, cell("dfedpgp", case="2 neighbours"), flat(0.6, 0.5)),
        write(places, cell("dfedpgp", case="40 neighbours"), flat(0.7, 0.4)),
    ]
    found = collect_results(cells, places)
    table = paper_tables.series_table(ITEMS["fig3a"], found, ("local", "mixed"))
    assert texts(table) == [
        ["2 neighbours", "60.00", "50.00"],
        ["40 neighbours", "70.00", "40.00"],
    ]
    assert [[one.best for one in row[1:]] for row in table.rows] == [[False, True], [True, False]]
    (groups,) = curves_by_method(found).values()
    assert [group.label for group in groups] == ["2 neighbours", "40 neighbours"]
    assert len({group.style for group in groups}) == 2
    assert list(found.cases) == ["2 neighbours", "40 neighbours"]


def test_traits_of_the_ablation_have_columns(tmp_path: Path) -> None:
    places = SweepFolder(tmp_path)
    cells = [
        write(places, cell(name), flat(0.5, 0.5))
        for name in ("dfedavgm", "dfedavgmp", "osgp", "dfedpgp")
    ]
    item: Item = ITEMS["table4"]
    table = paper_tables.accuracy_table(item, collect_results(cells, places), ("local", "mixed"))
    assert [row[:4] for row in texts(table)] == [
        ["DFedAvgM", "", "", "82.49 ± 0.57"],
        ["DFedAvgM-P", "✓", "", "84.69"],
        ["OSGP", "", "✓", "83.14 ± 0.18"],
        ["DFedPGP", "✓", "✓", "85.61 ± 0.05"],
    ]


def test_a_terminal_that_is_too_narrow_has_every_name_beside_every_number() -> None:
    stages = ("local", "mixed")
    columns = [Column("method", number=False), *(Column("a number", above=s) for s in stages)]
    rows = tuple((TableCell(name), *map(TableCell, "12")) for name in ("Local", "DFedPGP"))
    table = Table("Accuracy", tuple(columns), rows, "A caption.")
    printed = {}
    for width in (26, 80):
        console = Console(width=width, file=io.StringIO(), highlight=False)
        print_tables(console, [table])
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        assert text.count("A caption.") == 1
        printed[width] = [" ".join(line.split()) for line in text.splitlines()]
    assert [line for line in printed[80] if line in ("Local 1 2", "DFedPGP 1 2")] == [
        "Local 1 2",
        "DFedPGP 1 2",
    ]
    assert [line for line in printed[26] if line[-1:].isdigit()] == [
        "Local 1",
        "DFedPGP 1",
        "Local 2",
        "DFedPGP 2",
    ]


def test_a_table_without_headings_to_part_it_by_is_parted_between_its_columns() -> None:
    titles = ("accuracy", "seconds", "bytes")
    columns = [Column("method", number=False), *(Column(title) for title in titles)]
    rows = tuple((TableCell(name), *map(TableCell, "123")) for name in ("Local", "DFedPGP"))
    console = Console(width=32, file=io.StringIO(), highlight=False)
    print_tables(console, [Table("Scores", tuple(columns), rows, "A caption.")])
    assert isinstance(console.file, io.StringIO)
    printed = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert [line for line in printed if line[-1:].isdigit()] == [
        "Local 1 2",
        "DFedPGP 1 2",
        "Local 3",
        "DFedPGP 3",
    ]


def test_columns_without_a_heading_are_a_part_of_their_own() -> None:
    columns = (Column("method"), Column("cost"), Column("a", above="local"), Column("b", above="x"))
    table = Table("T", columns, (tuple(map(TableCell, ("Local", "1", "2", "3"))),), "")
    assert [[cell.text for cell in part.rows[0]] for part in table.parts()] == [
        ["Local", "1"],
        ["Local", "2"],
        ["Local", "3"],
    ]
    (whole,) = Table("T", columns[:1], ((TableCell("Local"),),), "").parts()
    assert whole.rows == ((TableCell("Local"),),)


def test_columns_behind_those_of_a_heading_stay_with_them() -> None:
    above = ("", "local", "local", "mixed", "")
    columns = tuple(Column(str(place), above=text) for place, text in enumerate(above))
    table = Table("T", columns, (tuple(map(TableCell, "01234")),), "")
    assert ["".join(column.title for column in part.columns) for part in table.parts()] == [
        "012",
        "034",
    ]
