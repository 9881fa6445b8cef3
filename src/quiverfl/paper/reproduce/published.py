"""What the paper prints, to stand beside your own numbers."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any


def accuracy(case: str, method: str) -> tuple[float, float] | None:
    """(mean, standard deviation) as shares; NaN where the paper gives no deviation."""
    found = _numbers()["accuracy"].get(case, {}).get(method)
    if found is None:
        return None
    mean, std = (*found, float("nan"))[:2]
    return mean / 100, std / 100


def target(case: str) -> float | None:
    """The accuracy that counts as reached, as a share."""
    found = _numbers()["rounds"].get(case)
    return None if found is None else found["target"] / 100


def rounds(case: str, method: str) -> float | None:
    """Rounds until the target; infinite where it was never reached, None where nothing is said."""
    found = _numbers()["rounds"].get(case, {}).get(method)
    if found is None:
        return None
    return float("inf") if found == "never" else float(found)


def speedup(case: str, method: str) -> float | None:
    """Over the slowest method that reached the target."""
    own = rounds(case, method)
    if own is None:
        return None
    others = [value for name, value in _numbers()["rounds"][case].items() if name != "target"]
    return float(max(value for value in others if value != "never") / own) or None


@cache
def _numbers() -> dict[str, dict[str, dict[str, Any]]]:
    file = resources.files("quiverfl.paper.reproduce").joinpath("paper_numbers.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))
