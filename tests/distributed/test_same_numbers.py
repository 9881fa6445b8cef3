"""Law 12 on ranks: many processes find the numbers of one, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quiverfl as qv
import rank_cases as tried
from quiverfl.engine.exchange.matrix import mix
from small import AWAY, CLIENTS, TRAINING, normed_task, tiny_data, tiny_task

NAMES = [f"{method}-{graphs(6).name}" for method, graphs in tried.CASES]
WORKS = ["methods", "mixed", "refused", "resumed", "transformed", "overspent", "normed"]
TIMES = ("seconds", "train_seconds", "evaluate_seconds", "mix_seconds")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What two ranks found; they are started once."""
    folder = tmp_path_factory.mktemp("pair")
    return tried.on_ranks(2, WORKS, folder)


def assert_same(
    parts: list[dict[str, Any]],
    method: Any,
    graphs: Any,
    *how: str,
    since: int = 0,
    transforms: dict[str, Any] | None = None,
    task: qv.Task | None = None,
) -> None:
    """States, kept models, every evaluation and every record but the seconds, since a round."""
    whole = qv.simulate(
        task or tiny_task(),
        tiny_data(),
        method=method,
        topology=graphs(CLIENTS),
        training=TRAINING,
        **(transforms or {}),
        settings=tried.settings(method, *how),
    )
    states = [torch.cat(leaves) for leaves in zip(*(p["state"] for p in parts), strict=True)]
    for name, one, other in zip(
        whole._shard.state._fields, whole._shard.state, states, strict=True
    ):
        assert torch.equal(one, other), name
    if whole._shard.statistics is not None:
        assert torch.equal(whole._shard.statistics, torch.cat([p["statistics"] for p in parts]))
    kept = {client: point for part in parts for client, point in part["local"].items()}
    assert kept.keys() == whole._shard.local.points.keys()
    for client, point in whole._shard.local.points.items():
        assert all(torch.equal(a, b) for a, b in zip(point, kept[client], strict=True))
    evaluations = [e for e in whole._history.evaluations if e[0] >= since]
    records = [record for record in whole._history.records if record["round"] >= since]
    for part in parts:
        for one, other in zip(evaluations, part["evaluations"], strict=True):
            assert one[:2] == other[:2]
            assert one[2].keys() == other[2].keys()
            assert all(np.array_equal(one[2][key], other[2][key]) for key in one[2])
        for one, other in zip(records, part["records"], strict=True):
            assert {k: v for k, v in one.items() if k not in TIMES} == {
                k: v for k, v in other.items() if k not in TIMES
            }


@pytest.mark.parametrize("case", range(len(tried.CASES)), ids=NAMES)
def test_two_ranks_find_the_numbers_of_one_process(pair: dict[str, list[Any]], case: int) -> None:
    """With ragged data and unequal epochs; some graphs have clients that are away, or a delay."""
    assert_same([found[case] for found in pair["methods"]], *tried.CASES[case])


@pytest.mark.parametrize("case", range(len(tried.TRANSFORMED)))
def test_transformed_messages_are_those_of_one_process(
    pair: dict[str, list[Any]], case: int
) -> None:
    method, graphs, transforms = tried.TRANSFORMED[case]
    parts = [found[case] for found in pair["transformed"]]
    assert_same(parts, method, graphs, transforms=transforms)


@pytest.mark.parametrize("case", range(len(tried.RESUMED)))
def test_what_clients_were_told_had_and_spent_is_in_the_checkpoint_of_all_ranks(
    pair: dict[str, list[Any]], case: int
) -> None:
    method, graphs, transforms = tried.RESUMED[case]
    parts = [found[case] for found in pair["resumed"]]
    assert_same(parts, method, graphs, since=2, transforms=transforms)


@pytest.mark.parametrize("case", range(len(tried.OVERSPENT)), ids=["update", "dp_sgd"])
def test_a_budget_ends_all_ranks_with_the_sentence_of_one_process(
    pair: dict[str, list[Any]], case: int
) -> None:
    method = tried.DFEDPGP
    with pytest.raises(qv.QuiverError) as alone:
        qv.simulate(
            tiny_task(),
            tiny_data(),
            method=method,
            topology=AWAY(CLIENTS),
            training=TRAINING,
            privacy=tried.OVERSPENT[case],
            settings=tried.settings(method),
        )
    assert "privacy.epsilon_budget" in str(alone.value)
    assert [found[case] for found in pair["overspent"]] == [str(alone.value)] * 2


def same_mixing(found: list[dict[str, torch.Tensor]]) -> None:
    for name, graph in ((name, make()) for name, make in tried.GRAPHS.items()):
        for leaf, shape in tried.LEAVES.items():
            for dtype in (torch.float32, torch.float64):
                expected = mix(graph, tried.message(shape, dtype))
                key = f"{name} {leaf} {dtype}"
                assert torch.equal(expected, torch.cat([part[key] for part in found])), key


@pytest.mark.parametrize("case", range(len(tried.NORMED)))
def test_running_statistics_are_those_of_one_process(pair: dict[str, list[Any]], case: int) -> None:
    """In a whole run, and after a checkpoint that both ranks wrote."""
    method, graphs, options = tried.NORMED[case]
    for place, since in ((2 * case, 0), (2 * case + 1, 2)):
        parts = [found[place] for found in pair["normed"]]
        task = normed_task(**options)
        assert_same(parts, method, graphs, "sequential", since=since, task=task)


def test_mixing_is_that_of_one_process(pair: dict[str, list[Any]]) -> None:
    same_mixing(pair["mixed"])


def test_a_checkpoint_that_cannot_be_written_is_refused_on_every_rank(
    pair: dict[str, list[Any]],
) -> None:
    first, second = pair["refused"]
    assert "File exists" in first
    assert "File exists" in second


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    """Every method on its graphs and on a ring, both executors."""
    found = tried.on_ranks(ranks, ["methods", "rings", "sequential", "single", "mixed"], tmp_path)
    same_mixing(found["mixed"])
    for work, cases, how in (
        ("methods", tried.CASES, ()),
        ("rings", tried.RINGS, ()),
        ("sequential", tried.CASES, ("sequential",)),
        ("single", tried.CASES, ("sequential", "float32")),
    ):
        for place, case in enumerate(cases):
            assert_same([part[place] for part in found[work]], *case, *how)
