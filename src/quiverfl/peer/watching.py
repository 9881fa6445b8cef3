"""What the metrics of some peers show. Nothing else is asked of them, and nothing changed."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quiverfl.errors import QuiverError
from quiverfl.peer.peer_folder import PEER, PeerFolder

LARGEST = 1 << 22
"""Bytes that are read of an endpoint's answer; a peer's is far smaller."""
LATE = 1.0
"""Seconds after which a share counts as waiting: every one takes a moment."""
KEPT = 600
"""Moments that are kept for the curves."""


@dataclass
class SeenLink:
    """What a peer says of one neighbour."""

    neighbour: str
    given: float = 0.0
    taken: float = 0.0
    waiting_seconds: float = 0.0


@dataclass
class SeenPeer:
    """One peer at one moment."""

    source: str
    name: str
    run: str = ""
    state: str = ""
    values: dict[str, float] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    refusals: dict[str, float] = field(default_factory=dict)
    links: list[SeenLink] = field(default_factory=list)
    problem: str = ""  # why nothing can be seen of it now


def source_of(text: str) -> str:
    """A peer's folder, HOST:PORT or an address → the address of its metrics."""
    if text.startswith(("http://", "https://")):
        return text
    path = Path(text)
    if (path / PEER).exists():
        metrics = PeerFolder.read(path).own.metrics
        if not metrics:
            raise QuiverError(
                f'{path / PEER} has metrics = "", so nothing can be seen of this peer: write '
                'metrics = "127.0.0.1:9464" there and start it again.'
            )
        return f"http://{metrics}/metrics"
    if text.rpartition(":")[2].isdigit():
        return f"http://{text}/metrics"
    raise QuiverError(
        f"{text!r} is neither a peer's folder nor HOST:PORT of its metrics, such as 127.0.0.1:9464."
    )


def look(source: str, timeout: float = 3.0) -> SeenPeer:
    """What an endpoint says now; a peer that does not answer is seen as such."""
    try:
        with urllib.request.urlopen(source, timeout=timeout) as answer:
            text = answer.read(LARGEST).decode()
        return understood(source, text)
    except (urllib.error.URLError, OSError, ValueError) as problem:
        reason = getattr(problem, "reason", None) or problem
        return SeenPeer(source, source, problem=f"cannot be seen: {reason}")


def understood(source: str, text: str) -> SeenPeer:
    """A peer from the text of its metrics; `ValueError` if it is not a peer's."""
    from prometheus_client.parser import text_string_to_metric_families

    seen = SeenPeer(source, "")
    links: dict[str, SeenLink] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith("quiver_"):
                continue
            name, labels = sample.name.removeprefix("quiver_"), sample.labels
            if name == "peer_info":
                seen.name, seen.run = labels["name"], labels["run"]
            elif name == "state":
                seen.state = labels["state"]
            elif name == "score":
                seen.scores[labels["metric"]] = sample.value
            elif name == "refusals_total":
                seen.refusals[labels["reason"]] = sample.value
            elif name.startswith("link_"):
                link = links.setdefault(labels["neighbour"], SeenLink(labels["neighbour"]))
                setattr(link, name.removeprefix("link_"), sample.value)
            elif not labels:
                seen.values[name.removesuffix("_total")] = sample.value
    if not seen.name:
        raise ValueError("these are not the metrics of a peer")
    seen.links = [links[name] for name in sorted(links)]
    return seen


class Watch:
    """Looks at all sources together, and remembers a while."""

    def __init__(self, sources: Sequence[str]) -> None:
        self._sources = list(sources)
        self._names: dict[str, str] = {}
        self._past: dict[str, deque[tuple[float, float, float, float | None]]] = {}
        self.peers: list[SeenPeer] = []
        self.at = 0.0

    def look(self) -> list[SeenPeer]:
        with ThreadPoolExecutor(min(16, len(self._sources))) as pool:
            found = list(pool.map(look, self._sources))
        self.at = time.time()
        for peer in found:
            if peer.problem:  # it keeps the name it had
                peer.name = self._names.get(peer.source, peer.source)
                continue
            self._names[peer.source] = peer.name
            moment = (self.at, peer.values["round"], peer.values["mass"], main_score(peer))
            self._past.setdefault(peer.name, deque(maxlen=KEPT)).append(moment)
        self.peers = found
        return found

    def picture(self) -> dict[str, Any]:
        """Everything, for the page."""
        past = {name: list(moments) for name, moments in self._past.items()}
        return {"at": self.at, "peers": [asdict(peer) for peer in self.peers], "past": past}


def main_score(peer: SeenPeer) -> float | None:
    """Accuracy where there is one, else the first."""
    return peer.scores.get("accuracy", next(iter(peer.scores.values()), None))


def waiting(peers: Iterable[SeenPeer]) -> list[tuple[str, SeenLink]]:
    """Links whose share has not been taken for a while, longest first."""
    found = [(p.name, link) for p in peers for link in p.links if link.waiting_seconds >= LATE]
    return sorted(found, key=lambda pair: -pair[1].waiting_seconds)
