"""What a peer counts, and showing it to Prometheus on loopback."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from quiverfl.errors import QuiverError


@dataclass
class PeerMetrics:
    """Counters since the start of the process; gauges are read from the node when asked for."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    tap: Callable[[bytes], None] | None = None  # sees every byte that leaves
    _moved: dict[str, int] = field(default_factory=dict)  # in all, when last asked

    def add(self, name: str, amount: int = 1) -> None:
        self.counts[name] += amount

    def refused(self, reason: str) -> None:
        self.refusals[reason] += 1

    def sent(self, frame: bytes) -> bytes:
        """Count a frame on its way out."""
        self.counts["sent_bytes"] += len(frame)
        if self.tap is not None:
            self.tap(frame)
        return frame

    def moved(self) -> dict[str, int]:
        """The bytes put on the network and taken from it since this was last asked."""
        counts = {name: self.counts[name] for name in ("sent_bytes", "received_bytes")}
        since = {name: count - self._moved.get(name, 0) for name, count in counts.items()}
        self._moved = counts
        return since


COUNTERS = {
    "rounds": "rounds finished",
    "sent_bytes": "bytes put on the network",
    "received_bytes": "bytes taken from the network",
    "transfers": "shares acknowledged by their receivers",
    "retries": "attempts to deliver a share that failed",
    "duplicates": "shares announced again after they were taken",
    "alarms": "events an operator should look at",
}

GAUGES = {
    "round": "the round this peer is in",
    "rounds_planned": "rounds there are in all",
    "mass": "push-sum weight of this peer",
    "outbox": "shares not acknowledged yet",
    "outbox_age_seconds": "for how long the oldest of them has been tried",
    "staged": "shares waiting for the next commit",
    "commit_seconds": "duration of the last commit",
    "absent": "neighbours that let a deadline pass and are not in step yet",
    "overdrawn": "neighbours that must give mass back before they get more",
    "certificate_seconds": "time until the certificate expires",
    "store_bytes": "size of the store on disk",
}

LABELLED = {
    "peer_info": ("who this is", ("name", "run")),
    "state": ("what the peer is doing", ("state",)),
    "score": ("of the last evaluation", ("metric",)),
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


def serve_metrics(
    address: str, metrics: PeerMetrics, samples: Callable[[], Iterable[Sample]]
) -> Any:
    """A Prometheus endpoint; loopback only, since it has no authentication."""
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost", "[::1]"):
        raise QuiverError(
            f"metrics = {address!r}: metrics have no authentication and are served on loopback "
            "only; use 127.0.0.1:PORT and a proxy of your own."
        )

    class Collector:
        def collect(self) -> Iterator[Any]:
            for name, text in COUNTERS.items():
                yield CounterMetricFamily(f"quiver_{name}", text, value=metrics.counts[name])
            refusals = CounterMetricFamily("quiver_refusals", "by reason", labels=["reason"])
            for reason, count in sorted(metrics.refusals.copy().items()):
                refusals.add_metric([reason], count)
            yield refusals
            found = list(samples())
            for name, text in GAUGES.items():
                values = [sample.value for sample in found if sample.name == name]
                yield GaugeMetricFamily(f"quiver_{name}", text, value=sum(values))
            for name, (text, labels) in LABELLED.items():
                family = GaugeMetricFamily(f"quiver_{name}", text, labels=labels)
                for sample in found:
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
    """Of one kind of event: how many lines it may still write, and how many it was denied."""

    lines: float
    at: float
    dropped: int = 0


class Log:
    """Events with fields, for one peer.

    A kind of event gets a hundred lines at once and one a second after that, however often others
    bring it about; the next line says how many were left out. The peer's own rounds are all told.
    """

    BURST, A_SECOND = 100.0, 1.0

    def __init__(self, name: str, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("quiverfl.peer")
        self._name = name
        self._allowances: dict[str, _Allowance] = {}

    def __call__(self, event: str, level: int = logging.INFO, **fields: object) -> None:
        dropped = 0 if event == "round" else self._dropped(event)
        if dropped is None:
            return
        more = {"left_out": dropped} if dropped else {}
        fields = {"peer": self._name, **fields, **more}
        self._logger.log(level, event, extra={"fields": fields})

    def _dropped(self, event: str) -> int | None:
        """How many lines were left out before this one; None if this one is too."""
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
