"""The summary: exact numbers on histories small enough to check by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest

from quiverfl.errors import QuiverError
from quiverfl.results.summary import (
    EvaluationProtocol,
    client_frame,
    client_scores,
    describe_spread,
    summarize,
)


def frame(stage: str, table: list[list[float]], metric: str = "accuracy") -> pd.DataFrame:
    """One row of `table` per round, one column per client."""
    return pd.DataFrame(
        [
            {"round": t, "stage": stage, "client": i, metric: value}
            for t, row in enumerate(table)
            for i, value in enumerate(row)
        ]
    )


def costs(**columns: list[float]) -> pd.DataFrame:
    return pd.DataFrame({"round": range(len(next(iter(columns.values())))), **columns})


NONE = pd.DataFrame({"round": []})


def test_last_best_and_last_ten_of_both_stages_by_hand() -> None:
    local = [[0.1, 0.3], [0.9, 0.5], [0.4, 0.6]]
    mixed = [[0.2, 0.2], [0.3, 0.3], [0.8, 0.6]]
    history = pd.concat([frame("local", local), frame("mixed", mixed)])
    stages = summarize(history, NONE)["stages"]
    assert stages["local"]["last"] == pytest.approx(
        {"mean": 0.5, "std": 0.1, "worst10": 0.4, "round": 2}
    )
    assert stages["local"]["best"] == pytest.approx(
        {"mean": 0.7, "std": 0.2, "worst10": 0.5, "round": 1}
    )
    # Per client over the three rounds: (0.1 + 0.9 + 0.4) / 3 and (0.3 + 0.5 + 0.6) / 3.
    assert stages["local"]["last10"] == pytest.approx(
        {"mean": 1.4 / 3, "std": 0.0, "worst10": 1.4 / 3, "rounds": 3}
    )
    assert stages["mixed"]["best"]["round"] == 2


def test_last_ten_counts_evaluated_rounds_only() -> None:
    """Evaluated every fifth round: ten evaluated rounds are fifty rounds."""
    history = frame("local", [[float(t)] for t in range(12)])
    history["round"] *= 5
    last10 = summarize(history, NONE)["stages"]["local"]["last10"]
    assert last10["mean"] == np.mean(range(2, 12))
    assert last10["rounds"] == 10


def test_a_client_without_test_data_is_left_out_of_every_figure() -> None:
    nan = float("nan")
    history = frame("mixed", [[0.2, nan, 0.6], [0.4, nan, 0.8]])
    last = summarize(history, NONE)["stages"]["mixed"]["last"]
    assert last == pytest.approx({"mean": 0.6, "std": 0.2, "worst10": 0.4, "round": 1})


def test_a_stage_nobody_was_tested_at_is_absent() -> None:
    nan = float("nan")
    history = pd.concat([frame("local", [[nan, nan]]), frame("mixed", [[0.5, nan]])])
    assert list(summarize(history, NONE)["stages"]) == ["mixed"]


@pytest.mark.parametrize(("clients", "worst"), [(1, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_the_worst_tenth_is_rounded_up_to_whole_clients(clients: int, worst: int) -> None:
    scores = pd.Series(np.arange(clients)[::-1] / clients)
    assert describe_spread(scores, "accuracy")["worst10"] == pytest.approx(
        np.arange(worst).mean() / clients
    )


def test_regression_is_judged_by_the_lowest_loss_and_its_worst_are_the_highest() -> None:
    history = frame("local", [[3.0, 5.0], [1.0, 2.0], [2.0, 2.0]], metric="loss")
    summary = summarize(history, NONE)
    assert summary["metric"] == "loss"
    assert summary["stages"]["local"]["best"] == {
        "mean": 1.5,
        "std": 0.5,
        "worst10": 2.0,
        "round": 1,
    }


def test_the_first_of_equally_good_rounds_is_the_best_one() -> None:
    history = frame("local", [[0.1], [0.5], [0.5]])
    assert summarize(history, NONE)["stages"]["local"]["best"]["round"] == 1


def test_weights_move_the_mean_and_the_choice_of_the_best_round() -> None:
    values = client_frame(frame("local", [[0.0, 0.9], [0.5, 0.1]]), "local", "accuracy")
    weights = pd.Series([9, 1])
    assert client_scores(values, "best", "accuracy").tolist() == [0.0, 0.9]
    best = client_scores(values, "best", "accuracy", weights)
    assert best.tolist() == [0.5, 0.1]
    assert describe_spread(best, "accuracy", weights)["mean"] == pytest.approx(0.46)


def test_costs_are_totals_and_the_busiest_node_is_a_maximum() -> None:
    rounds = costs(
        network_bytes=[100, 200], busiest_bytes=[40, 30], steps=[7, 8], seconds=[0.5, 0.25]
    )
    summary = summarize(frame("local", [[1.0]]), rounds)
    assert (summary["bytes"], summary["busiest_bytes"]) == (300, 40)
    assert (summary["steps"], summary["seconds"]) == (15, 0.75)


def test_nothing_evaluated_and_nothing_run_is_a_summary_too() -> None:
    empty = pd.DataFrame({"round": [], "stage": [], "client": [], "accuracy": [], "loss": []})
    summary = summarize(empty, NONE)
    assert summary["stages"] == {}
    assert (summary["bytes"], summary["steps"], summary["seconds"]) == (0, 0, 0.0)


def test_a_summary_is_plain_json() -> None:
    rounds = costs(network_bytes=[100], steps=[7], seconds=[0.5])
    summary = summarize(frame("local", [[0.5, 1.0]]), rounds)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_no_scores_have_no_spread() -> None:
    assert all(
        math.isnan(v) for v in describe_spread(pd.Series([float("nan")]), "accuracy").values()
    )


def test_a_protocol_says_in_one_sentence_which_accuracy_it_is() -> None:
    caption = EvaluationProtocol(stage="mixed", report="last10").caption()
    assert caption.count(".") == 1
    for words in ("mixed", "right after communication", "last ten", "unweighted", "own test data"):
        assert words in caption
    tuned = EvaluationProtocol(finetune="5 epochs of fine-tuning").caption("loss")
    assert "after 5 epochs of fine-tuning" in tuned
    assert tuned.startswith("Test loss")


def test_a_protocol_that_does_not_exist_is_refused() -> None:
    with pytest.raises(QuiverError, match="did you mean 'mixed'"):
        EvaluationProtocol(stage="mixd")  # type: ignore[arg-type]


def test_a_protocol_is_recorded_whole() -> None:
    protocol = EvaluationProtocol(report="best", weighting="samples")
    assert EvaluationProtocol(**protocol.record()) == protocol
