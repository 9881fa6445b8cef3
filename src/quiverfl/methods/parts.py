"""Training phases that many methods have, for states whose model is (u, v)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quiverfl.methods.contract import Train
from quiverfl.task import Point


def model(state: Any) -> Point:
    """(u, v) as they stand in the state."""
    return Point(state.u, state.v)


def train_whole(epochs: int, **more: Any) -> Train:
    """u and v together."""
    return Train(
        part="whole",
        epochs=epochs,
        point=model,
        absorb=lambda state, trained: state._replace(u=trained.shared, v=trained.personal),
        **more,
    )


def train_personal(epochs: int, point: Callable[[Any], Point] = model) -> Train:
    """v with its own rate; the rest of the point stands still."""
    return Train(
        part="personal",
        epochs=epochs,
        point=point,
        absorb=lambda state, trained: state._replace(v=trained.personal),
        personal_rate=True,
        sent=False,
    )


def train_shared(epochs: int) -> Train:
    """u; v stands still."""
    return Train(
        part="shared",
        epochs=epochs,
        point=model,
        absorb=lambda state, trained: state._replace(u=trained.shared),
    )
