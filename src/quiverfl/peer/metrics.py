"""What a peer counts, and showing it to Prometheus on loopback."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from quiverfl.errors import QuiverError


@dataclass
class PeerMetrics:
    """Counters since the start of the process; gauges are read from the node when asked for."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    tap: Callable[[bytes], None] | None = None  # sees every byte that leaves

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
    "mass": "push-sum weight of this peer",
    "outbox": "shares not acknowledged yet",
    "outbox_age_seconds": "age of the oldest of them",
    "staged": "shares waiting for the next commit",
    "commit_seconds": "duration of the last commit",
}


def serve_metrics(
    address: str, metrics: PeerMetrics, gauges: Callable[[], dict[str, float]]
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
            for reason, count in sorted(metrics.refusals.items()):
                refusals.add_metric([reason], count)
            yield refusals
            values = gauges()
            for name, text in GAUGES.items():
                yield GaugeMetricFamily(f"quiver_{name}", text, value=values.get(name, 0.0))

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


class Log:
    """Events with fields, for one peer."""

    def __init__(self, name: str, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("quiverfl.peer")
        self._name = name

    def __call__(self, event: str, level: int = logging.INFO, **fields: object) -> None:
        self._logger.log(level, event, extra={"fields": {"peer": self._name, **fields}})

    def alarm(self, event: str, **fields: object) -> None:
        self(event, logging.ERROR, **fields)
