"""Counters and logs of a peer, its Prometheus endpoint on loopback, and a client for that."""

from __future__ import annotations

import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from quiverfl.errors import QuiverError


@dataclass
class PeerMetrics:
    """Counts since the start of the process; gauges are read from the node on demand."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    tap: Callable[[bytes], None] | None = None  # a test hook that sees every byte that leaves
    _last: dict[str, int] = field(default_factory=dict)  # byte counts at the last call

    def add(self, name: str, amount: int = 1) -> None:
        self.counts[name] += amount

    def count_refusal(self, reason: str) -> None:
        self.refusals[reason] += 1

    def count_sent(self, frame: bytes) -> bytes:
        """Count a frame on its way out."""
        self.counts["sent_bytes"] += len(frame)
        if self.tap is not None:
            self.tap(frame)
        return frame

    def count_new_bytes(self) -> dict[str, int]:
        """Count the bytes sent and received since the last call."""
        counts = {name: self.counts[name] for name in ("sent_bytes", "received_bytes")}
        new = {name: count - self._last.get(name, 0) for name, count in counts.items()}
        self._last = counts
        return new


COUNTERS = {
    "rounds": "rounds finished",
    "sent_bytes": "bytes put on the network",
    "received_bytes": "bytes taken from the network",
    "relayed_bytes": "bytes passed on between members that only dial out",
    "transfers": "shares acknowledged by their receivers",
    "retries": "attempts to deliver a share that failed",
    "duplicates": "shares announced again after they were taken",
    "alarms": "events an operator should look at",
}

GAUGES = {
    "round": "the round this peer is in",
    "rounds_planned": "rounds of the run in all",
    "mass": "push-sum weight of this peer",
    "outbox": "shares not acknowledged yet",
    "outbox_age_seconds": "for how long the oldest of them has been tried",
    "staged": "shares waiting for the next commit",
    "commit_seconds": "duration of the last commit",
    "absent": "neighbours that missed a deadline and are not in step yet",
    "overdrawn": "neighbours that must give mass back before they get more",
    "certificate_seconds": "time until the certificate expires",
    "store_bytes": "size of the store on disk",
}

LABELLED = {
    "peer_info": ("who this is", ("name", "run")),
    "state": ("what the peer is doing", ("state",)),
    "score": ("result of the last evaluation", ("metric",)),
    "link_given": ("mass pushed to a neighbour in all", ("neighbour",)),
    "link_taken": ("mass taken from a neighbour in all", ("neighbour",)),
    "link_waiting_seconds": ("for how long a share to it has been tried", ("neighbour",)),
}


@dataclass(frozen=True)
class Sample:
    """The value of a gauge; `labels` in the order of LABELLED."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


def check_metrics_address(address: str) -> None:
    """Refuse an address that other machines could reach; an empty one serves no metrics."""
    host, _, port = address.rpartition(":")
    if address and (host not in ("127.0.0.1", "localhost", "[::1]") or not port.isdecimal()):
        raise QuiverError(
            f"metrics = {address!r}: metrics have no authentication and are served on loopback "
            "only; use 127.0.0.1:PORT and a proxy of your own."
        )


def serve_metrics(
    address: str, metrics: PeerMetrics, samples: Callable[[], Iterable[Sample]]
) -> Any:
    """Serve a Prometheus endpoint, on loopback only, since it has no authentication."""
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    check_metrics_address(address)
    host, _, port = address.rpartition(":")

    class Collector:
        def collect(self) -> Iterator[Any]:
            for name, text in COUNTERS.items():
                yield CounterMetricFamily(f"quiver_{name}", text, value=metrics.counts[name])
            refusals = CounterMetricFamily("quiver_refusals", "by reason", labels=["reason"])
            for reason, count in sorted(metrics.refusals.copy().items()):
                refusals.add_metric([reason], count)
            yield refusals
            current = list(samples())
            for name, text in GAUGES.items():
                values = [sample.value for sample in current if sample.name == name]
                yield GaugeMetricFamily(f"quiver_{name}", text, value=sum(values))
            for name, (text, labels) in LABELLED.items():
                family = GaugeMetricFamily(f"quiver_{name}", text, labels=labels)
                for sample in current:
                    if sample.name == name:
                        family.add_metric(sample.labels, sample.value)
                yield family

    registry = CollectorRegistry()
    registry.register(Collector())
    try:
        server, _thread = start_http_server(int(port), addr=host.strip("[]"), registry=registry)
    except OSError as problem:
        raise QuiverError(f"metrics = {address!r}: {problem.strerror}.") from problem
    return server


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, what happened, and its coordinates."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        return json.dumps({**line, "event": record.getMessage(), **fields}, default=str)


def log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("quiverfl.peer")
    logger.addHandler(handler)
    logger.setLevel(os.environ.get("QUIVER_LOG", "INFO"))


@dataclass
class _Allowance:
    """Number of lines that one kind of event may still write, and number of dropped lines."""

    lines: float
    at: float
    dropped: int = 0


class Log:
    """Writes events with fields, for one peer.

    A kind of event may write a hundred lines at once and one a second after that, however often
    others cause it. The next line says how many were left out. All rounds are logged.
    """

    BURST, A_SECOND = 100.0, 1.0

    def __init__(self, name: str, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("quiverfl.peer")
        self._name = name
        self._allowances: dict[str, _Allowance] = {}

    def __call__(self, event: str, level: int = logging.INFO, **fields: object) -> None:
        dropped = 0 if event == "round" else self._count_dropped(event)
        if dropped is None:
            return
        more = {"left_out": dropped} if dropped else {}
        fields = {"peer": self._name, **fields, **more}
        self._logger.log(level, event, extra={"fields": fields})

    def _count_dropped(self, event: str) -> int | None:
        """Count the lines left out before this one; None if this one is left out too."""
        now = time.monotonic()
        allowance = self._allowances.setdefault(event, _Allowance(self.BURST, now))
        earned = (now - allowance.at) * self.A_SECOND
        allowance.lines, allowance.at = min(self.BURST, allowance.lines + earned), now
        if allowance.lines < 1.0:
            allowance.dropped += 1
            return None
        allowance.lines -= 1.0
        dropped, allowance.dropped = allowance.dropped, 0
        return dropped

    def alarm(self, event: str, **fields: object) -> None:
        self(event, logging.ERROR, **fields)


# Reading the metrics of several peers; nothing is changed at them.


LARGEST = 1 << 22
"""The most bytes read from an endpoint; a peer's answer is far smaller."""
LATE = 1.0
"""Seconds after which a share counts as waiting; every share takes a moment."""
HISTORY = 600
"""The number of past readings that the curves show."""


@dataclass
class LinkReading:
    """A peer's metrics about one neighbour."""

    neighbour: str
    given: float = 0.0
    taken: float = 0.0
    waiting_seconds: float = 0.0


@dataclass
class PeerReading:
    """Metrics of one peer at one moment."""

    source: str
    name: str
    run: str = ""
    state: str = ""
    values: dict[str, float] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    refusals: dict[str, float] = field(default_factory=dict)
    links: list[LinkReading] = field(default_factory=list)
    problem: str = ""  # why it cannot be read now


def read_metrics(source: str, timeout: float = 3.0) -> PeerReading:
    """Read an endpoint. A peer that does not answer gives a reading with a problem."""
    try:
        with urllib.request.urlopen(source, timeout=timeout) as answer:
            text = answer.read(LARGEST).decode()
        return parse_metrics(source, text)
    except (urllib.error.URLError, OSError, ValueError) as problem:
        reason = getattr(problem, "reason", None) or problem
        return PeerReading(source, source, problem=f"cannot be seen: {reason}")


def parse_metrics(source: str, text: str) -> PeerReading:
    """Parse the text of a peer's metrics; raise ValueError if it is not a peer's."""
    from prometheus_client.parser import text_string_to_metric_families

    reading = PeerReading(source, "")
    links: dict[str, LinkReading] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith("quiver_"):
                continue
            name, labels = sample.name.removeprefix("quiver_"), sample.labels
            if name == "peer_info":
                reading.name, reading.run = labels["name"], labels["run"]
            elif name == "state":
                reading.state = labels["state"]
            elif name == "score":
                reading.scores[labels["metric"]] = sample.value
            elif name == "refusals_total":
                reading.refusals[labels["reason"]] = sample.value
            elif name.startswith("link_"):
                link = links.setdefault(labels["neighbour"], LinkReading(labels["neighbour"]))
                setattr(link, name.removeprefix("link_"), sample.value)
            elif not labels:
                reading.values[name.removesuffix("_total")] = sample.value
    if not reading.name:
        raise ValueError("these are not the metrics of a peer")
    reading.links = [links[name] for name in sorted(links)]
    return reading


def read_status(status: Mapping[str, Any]) -> PeerReading:
    """Make a reading from a peer's status, for peers without an endpoint."""
    values = {name: float(value) for name, value in status["counts"].items()}
    values = {"sent_bytes": 0.0, "retries": 0.0, **values}
    values |= {name: float(status[name]) for name in ("round", "mass")}
    values["rounds_planned"] = float(status["rounds"])
    return PeerReading(
        source="",
        name=status["name"],
        state=status["state"],
        values=values,
        scores=dict(status["metrics"]),
        refusals=dict(status["refusals"]),
    )


class MetricsClient:
    """Reads all sources at the same time, and keeps the last readings for curves."""

    def __init__(self, sources: Sequence[str]) -> None:
        self._sources = list(sources)
        self._names: dict[str, str] = {}
        self._past: dict[str, deque[tuple[float, float, float, float | None]]] = {}
        self.peers: list[PeerReading] = []
        self.at = 0.0

    def read(self) -> list[PeerReading]:
        with ThreadPoolExecutor(min(16, len(self._sources))) as pool:
            readings = list(pool.map(read_metrics, self._sources))
        self.at = time.time()
        for peer in readings:
            if peer.problem:  # it keeps its last name
                peer.name = self._names.get(peer.source, peer.source)
                continue
            self._names[peer.source] = peer.name
            moment = (self.at, peer.values["round"], peer.values["mass"], find_main_score(peer))
            self._past.setdefault(peer.name, deque(maxlen=HISTORY)).append(moment)
        self.peers = readings
        return readings

    def picture(self) -> dict[str, Any]:
        """All readings, for the page."""
        past = {name: list(moments) for name, moments in self._past.items()}
        return {"at": self.at, "peers": [asdict(peer) for peer in self.peers], "past": past}


def find_main_score(peer: PeerReading) -> float | None:
    """Find the accuracy, or else the first score."""
    return peer.scores.get("accuracy", next(iter(peer.scores.values()), None))


def list_waiting(peers: Iterable[PeerReading]) -> list[tuple[str, LinkReading]]:
    """List links whose share has been waiting for a while, longest first."""
    waiting = [(p.name, link) for p in peers for link in p.links if link.waiting_seconds >= LATE]
    return sorted(waiting, key=lambda pair: -pair[1].waiting_seconds)
