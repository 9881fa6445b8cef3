"""How numbers look wherever results are shown."""

from __future__ import annotations

import math

NOTHING = "–"
MINUS = "−"


SHARES = ("accuracy", "f1", "auroc")


def is_share(metric: str) -> bool:
    """Accuracies and their kin are shown in percent, losses and other metrics as they are."""
    return metric in SHARES


def unit(metric: str) -> str:
    return f"{metric} in %" if is_share(metric) else metric


def score(value: float, metric: str) -> str:
    if not math.isfinite(value):
        return NOTHING if math.isnan(value) else str(value).replace("inf", "∞")
    return f"{100 * value:.2f}" if is_share(metric) else f"{value:.4f}"


def with_spread(value: float, spread: float, metric: str) -> str:
    """`87.31 ± 0.42`, or the value alone where there is no spread."""
    if math.isnan(spread):
        return score(value, metric)
    return f"{score(value, metric)} ± {score(spread, metric)}"


def signed(value: float, metric: str) -> str:
    if math.isnan(value):
        return NOTHING
    text = score(abs(value), metric)
    if not text.strip("0."):
        return text
    return f"{'+' if value > 0 else MINUS}{text}"


def size(count: float) -> str:
    """Bytes in the unit that leaves one to three digits before the point."""
    if math.isnan(count):
        return NOTHING
    for name in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or name == "TB":
            break
        count /= 1000
    return f"{count:.0f} {name}" if name == "B" or count >= 99.95 else f"{count:.1f} {name}"


def whole(count: float) -> str:
    return NOTHING if math.isnan(count) else f"{count:,.0f}"


def duration(seconds: float) -> str:
    if math.isnan(seconds):
        return NOTHING
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if minutes < 99.95 else f"{hours:.1f} h"
