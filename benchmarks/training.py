"""Works A, B, C and F: training and mixing against the limit and against the naive loop."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from benchmarks import limit, naive
from benchmarks.clock import Kind, Seconds, interleaved
from benchmarks.figures import Bound, Figure, ratio
from benchmarks.product import Product
from benchmarks.works import BATCH, Work

NAIVE_TARGETS = {"A": 5.0, "B": 1.9, "F": 2.5}
LIMIT_TARGETS = {"A": 1.2, "B": 1.1, "C": 1.15}
EVALUATION_TARGET = 1.2
TOGETHER = 25 * BATCH
"""A batch as large as what the product computes at once where models are dense."""


def figures(work: Work, repeats: int, kind: Kind, threads: int) -> list[Figure]:
    """Everything about one work."""
    product = Product(work)
    bounded = work.name in LIMIT_TARGETS
    with naive.worker(work, kind, threads) as loop:
        contestants: dict[str, Callable[[], object]] = {"ours": product.round, "naive": loop}
        for form in limit.forms(work) if bounded else ():
            contestants[f"limit {form}"] = limit.phases(work, form)
        if work.name == "A":
            contestants["together"] = limit.phases(work, "contiguous", TOGETHER)
        seconds = interleaved(contestants, repeats, kind)
    found = [_figure(work, "naive / ours", seconds, "naive", "ours", "≥", NAIVE_TARGETS)]
    if bounded:
        best = _fastest(seconds, "limit")
        found.append(_figure(work, "ours / limit", seconds, "ours", best, "≤", LIMIT_TARGETS))
    if work.name == "A":
        name = f"ours / limit at batch {TOGETHER}"
        found.append(_figure(work, name, seconds, "ours", "together"))
    if bounded:
        found.append(_evaluation(work, product, repeats, kind))
    return found


def _evaluation(work: Work, product: Product, repeats: int, kind: Kind) -> Figure:
    contestants: dict[str, Callable[[], object]] = {"ours": product.evaluate}
    for form in limit.forms(work):
        contestants[f"forward {form}"] = limit.forward(work, form)
    seconds = interleaved(contestants, 3 * repeats, kind)
    best = _fastest(seconds, "forward")
    name, targets = "evaluation / bare forward", {work.name: EVALUATION_TARGET}
    return _figure(work, name, seconds, "ours", best, "≤", targets)


def _fastest(seconds: Seconds, prefix: str) -> str:
    return min(
        (name for name in seconds if name.startswith(prefix)), key=lambda n: median(seconds[n])
    )


def _figure(
    work: Work,
    name: str,
    seconds: Seconds,
    over: str,
    under: str,
    bound: Bound | None = None,
    targets: dict[str, float] | None = None,
) -> Figure:
    target = (targets or {}).get(work.name)
    return Figure(
        work.name,
        name,
        ratio(seconds[over], seconds[under]),
        bound if target is not None else None,
        target,
        details={"over": over, "under": under, "seconds": seconds},
    )
