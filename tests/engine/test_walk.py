"""A reader who follows one round has to enter few files, and to change between them seldom."""

from __future__ import annotations

import pytest
from benchmarks.walk import trace_rounds

FILES, CHANGES = 30, 300
"""At most, in each of the two rounds of the quick start."""


@pytest.fixture(scope="module")
def walks() -> list:
    return trace_rounds()


def test_a_round_enters_few_files_and_seldom_changes_between_them(walks: list) -> None:
    assert len(walks) == 2
    for walk in walks:
        assert len(walk.files) <= FILES, walk.files
        assert walk.changes <= CHANGES


def test_a_round_contains_no_check(walks: list) -> None:
    """What can be known before the first round is refused there (engine/checks)."""
    for walk in walks:
        assert not [file for file in walk.files if file.startswith("engine/checks/")]
