"""How long a sync round waits for its neighbours: for all, for a quorum, for a deadline.

    quorum   deadline_floor   a round goes on
    none     none             when all are here, or after `deadline`
    none     set              … or after the deadline that follows what was measured
    q        none             … or as soon as q of them are here
    q        set              … or when q are here and that deadline has passed

After `deadline` it goes on in any case.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quiverfl.peer.node import Node

REMEMBERED = 256
"""The number of past arrivals that the deadline follows."""
ROUNDS = 64
"""The number of past rounds whose late shares still count."""
FEWEST = 8
"""With fewer arrivals the deadline is `deadline`."""


class Patience:
    """Measures when shares arrive, counted from when their round began to wait."""

    def __init__(self) -> None:
        self._delays: deque[float] = deque(maxlen=REMEMBERED)
        self._began: dict[int, float] = {}

    def begin(self, round: int, now: float | None = None) -> None:
        self._began.setdefault(round, time.monotonic() if now is None else now)
        while len(self._began) > ROUNDS:
            del self._began[next(iter(self._began))]

    def note_arrival(self, round: int, now: float | None = None) -> None:
        """Measure a share, also a late one: a slower network makes the deadline longer."""
        began = self._began.get(round)
        if began is not None:
            self._delays.append((time.monotonic() if now is None else now) - began)
        elif not self._began or round > max(self._began):
            self._delays.append(0.0)  # here before this peer waited

    def deadline(self, percentile: float, factor: float, floor: float, ceiling: float) -> float:
        """A percentile of the delays times a factor, within bounds."""
        if len(self._delays) < FEWEST:
            return ceiling
        ordered = sorted(self._delays)
        place = min(len(ordered) - 1, math.ceil(percentile * len(ordered)) - 1)
        return min(ceiling, max(floor, factor * ordered[max(0, place)]))


def measured_deadline(node: Node) -> float:
    """Seconds after which a round waits no longer than it must."""
    settings = node.settings
    if settings.deadline_floor is None:
        return settings.deadline
    return node.patience.deadline(
        settings.deadline_percentile,
        settings.deadline_factor,
        settings.deadline_floor,
        settings.deadline,
    )


async def wait_for_peers(
    node: Node, promised: Collection[str], missing: Callable[[], set[str]], by_mass: bool = False
) -> set[str]:
    """Wait for what neighbours have promised. Returns those that let their deadline pass.

    A neighbour without which a quorum is complete before then is only late: it is waited for again
    in the next round.
    """
    settings, began, soft = node.settings, time.monotonic(), measured_deadline(node)

    def is_complete() -> bool:
        late = missing()
        if not late or settings.quorum == 1:
            return not late
        weigh = node.receiver.last_mass if by_mass and settings.quorum_by == "mass" else len
        all_of_them = set(promised) | late
        return weigh(all_of_them - late) >= settings.quorum * weigh(all_of_them) - 1e-9

    node.waits_for = missing
    try:
        if settings.deadline_floor is None:
            await node.wait_until(is_complete)
        else:
            await node.wait_until(lambda: not missing(), soft)
            if settings.quorum < 1 and missing():
                seconds = settings.deadline - (time.monotonic() - began)
                await node.wait_until(is_complete, max(0.0, seconds))
    finally:
        node.waits_for = set
    return missing() if time.monotonic() - began >= soft else set()
