"""A reader who follows a share between peers has to enter few files."""

from __future__ import annotations

from benchmarks.walk import trace_share

FILES = 20
"""Of `peer/`, at most, from two trained models to two shares that are merged and acknowledged."""


def test_a_share_crosses_few_files() -> None:
    walk = trace_share()
    assert len(walk.files) <= FILES, walk.files
    # The trace saw both ends: the push, the stream, the receipt and the merge.
    ends = {"rounds.py", "accounts/transactions.py", "link/link.py", "link/receiver.py", "node.py"}
    assert {f"peer/{file}" for file in ends} <= set(walk.files)
