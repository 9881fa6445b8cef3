"""The example of docs/add-a-method.md, as it stands there, keeps the law."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import quiverfl as qv
from small import CLIENTS, REGULAR, simulate, states

PAGE = Path(__file__).parents[1] / "docs" / "add-a-method.md"


def example() -> Any:
    """The class in the page's first block of Python."""
    block = re.search(r"```python\n(# src.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None

    names: dict[str, Any] = {"__name__": __name__}
    exec(block.group(1), names)
    return names["DFedProx"]


def test_the_example_runs_and_its_pull_can_be_seen() -> None:
    kind = example()
    weak, strong = (
        simulate(kind(epochs=2, proximal=p), REGULAR(CLIENTS), rounds=2) for p in (0.0, 5.0)
    )
    plain = simulate(qv.DFedAvgM(epochs=2), REGULAR(CLIENTS), rounds=2)
    torch.testing.assert_close(states(weak)[0], states(plain)[0], rtol=0, atol=1e-14)
    assert (states(strong)[0] - states(plain)[0]).abs().max() > 1e-3
