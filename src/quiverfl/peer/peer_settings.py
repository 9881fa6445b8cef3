"""How a peer runs, and how that ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quiverfl.transforms.robustness import Robustness


@dataclass(frozen=True)
class Settings:
    """How one peer runs; `rounds`, `mode` and `deadline` are the same for all of a run."""

    rounds: int
    mode: Literal["sync", "async"] = "sync"
    deadline: float = 60.0  # seconds a round waits for missing shares before it continues
    staleness: int | None = None  # async: rounds a peer may be ahead of the slowest it has heard
    lend: float = 0.25  # async: mass a neighbour may have of this peer's before it gives some back
    pause: float = 0.0  # async: seconds between rounds
    linger: float = 30.0  # seconds without news before a finished peer stops serving others
    bind: str = "127.0.0.1:0"
    metrics: str = ""
    trust_store: bool = False
    evaluate_every: int = 1
    copies: bool = False  # of messages are sent, as the graph has it, in place of shares with mass
    rule: Robustness | None = None  # what is taken of others' messages


@dataclass
class Outcome:
    """How a run of the process ended."""

    finished: bool = False
    left: bool = False
    stopped: bool = False  # on request, before its time
    undelivered: int = 0  # shares in the outbox: safe, and sent when it starts again
    metrics: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)  # by neighbour, why its shares wait
