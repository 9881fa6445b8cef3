"""Who is where, and which columns are whose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import quiverfl as qv
from quiverfl.distributed.columns import cut
from quiverfl.distributed.memory import RankNeeds
from quiverfl.distributed.ranks import Placement


def test_equal_clients_are_shared_out_equally_and_in_order() -> None:
    placement = Placement.balance(np.full(10, 7), 4)
    assert sorted(placement.counts) == [2, 2, 3, 3]
    assert np.concatenate([placement.clients_of(rank) for rank in range(4)]).tolist() == list(
        range(10)
    )
    assert Placement(np.array([0, 2, 5, 7, 10])).count_per_rank(np.array([0, 5, 6, 9])) == [
        1,
        0,
        2,
        1,
    ]


def test_work_is_balanced_not_clients() -> None:
    work = np.array([100] * 5 + [10] * 50)
    placement = Placement.balance(work, 2)
    loads = [work[placement.clients_of(rank)].sum() for rank in (0, 1)]
    assert placement.counts[0] < 15
    assert max(loads) <= 0.6 * work.sum()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_rank_has_a_client_however_unequal(ranks: int) -> None:
    for work in ([1000, 1, 1, 1, 1], [1, 1, 1, 1, 1000], [0, 0, 0, 0, 0]):
        placement = Placement.balance(np.array(work), ranks)
        assert min(placement.counts) >= 1
        assert sum(placement.counts) == 5


def test_more_ranks_than_clients_are_refused() -> None:
    with pytest.raises(qv.QuiverError, match="at most 3 ranks"):
        Placement.balance(np.ones(3), 4)


@pytest.mark.parametrize(("columns", "ranks"), [(1, 2), (48, 4), (100_000, 3), (0, 2)])
def test_blocks_cut_at_chunks_and_cover_every_column(columns: int, ranks: int) -> None:
    blocks = cut(columns, 48, 4000, ranks)
    edges = [place for block in blocks for place in block.cuts]
    assert edges == sorted(edges)
    assert all(edge % 48 == 0 or edge == columns for edge in edges)
    assert sum(sum(block.widths) for block in blocks) == columns


def test_what_a_thousand_resnets_need() -> None:
    """45 GB of states do not fit 24 GB, and half of them do."""
    model = 11_200_000 * 4
    needs = RankNeeds(
        work=np.full(1000, 50),
        state=model,
        kept=0,
        message=model,
        shared=model,
        training=6 * model,
        chunk=1,
        examples=np.full(1000, 50 * 3072),
        graph=qv.random_push(clients=1000, neighbors=10)(0),
    )
    assert 45e9 < needs.memory(1) < 47e9
    assert needs.ranks_for(24 * 10**9) == 2
    assert needs.traffic(2) == 2 * 1000 * model // 4
    assert needs.ranks_for(10**8) is None
    more = replace(needs, copies=model, view=10**9)
    assert more.memory(1) - needs.memory(1) == 1000 * model + 10**9
    assert more.memory(2) - needs.memory(2) == 500 * model + 10**9
