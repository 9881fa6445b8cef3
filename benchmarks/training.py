"""Works A, B, C and F: training and mixing against the limit and against the naive loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median, median_low

from benchmarks import limit, naive
from benchmarks.clock import Kind, Seconds, interleaved
from benchmarks.figures import Bound, Figure, ratio
from benchmarks.product import Product
from benchmarks.works import BATCH, VARIANTS, Work, smaller

NAIVE_TARGETS = {"A": 5.0, "B": 1.9, "C, compiled": 1.4, "C, compiled, bf16": 2.2, "F": 2.5}
LIMIT_TARGETS = {"A": 1.2, "B": 1.1, "C": 1.05, "C, compiled": 1.05, "C, compiled, bf16": 1.05}
EVALUATION_TARGETS = {
    "A": 1.2,
    "B": 1.15,
    "C": 1.15,
    "C, compiled": 1.15,
    "C, compiled, bf16": 1.15,
}
TOGETHER = 25 * BATCH
"""A batch as large as what the product computes at once where models are dense."""
RUNS = {"C": 3}
"""How often everything is made anew: where memory happens to lie decides a part of C's times."""


def figures(work: Work, repeats: int, kind: Kind, threads: int, quick: bool) -> list[Figure]:
    """Everything about one work and its variants; of several runs the median."""
    variants = {"": work, **VARIANTS.get(work.name, {})}
    if quick:
        variants = {name: smaller(variant) for name, variant in variants.items()}
    count = 1 if quick else RUNS.get(work.name, 1)
    runs = [_measure(variants, repeats, kind, threads) for _ in range(count)]
    return [_middle(same) for same in zip(*runs, strict=True)]


def _middle(figures: tuple[Figure, ...]) -> Figure:
    if len(figures) == 1:
        return figures[0]
    values = [figure.value for figure in figures if figure.value is not None]
    middle = next(figure for figure in figures if figure.value == median_low(values))
    return replace(middle, details={**middle.details, "runs": values})


def _measure(variants: dict[str, Work], repeats: int, kind: Kind, threads: int) -> list[Figure]:
    work = variants[""]
    products = {name: Product(variant) for name, variant in variants.items()}
    bounded = work.name in LIMIT_TARGETS
    with naive.worker(work, kind, threads) as loop:
        contestants: dict[str, Callable[[], object]] = {"naive": loop}
        for name, variant in variants.items():
            contestants[f"ours{name}"] = products[name].round
            for form in limit.forms(variant) if bounded else ():
                contestants[f"limit{name}: {form}"] = limit.phases(variant, form)
        if work.name == "A":
            contestants["together"] = limit.phases(work, "contiguous", TOGETHER)
        seconds = interleaved(contestants, repeats, kind)
    found = []
    for name in variants:
        ours = f"ours{name}"
        found.append(_figure(work, "naive / ours", name, seconds, "naive", ours, "≥"))
        if bounded:
            best = _fastest(seconds, f"limit{name}: ")
            found.append(_figure(work, "ours / limit", name, seconds, ours, best, "≤"))
    if work.name == "A":
        title = f"ours / limit at batch {TOGETHER}"
        found.append(_figure(work, title, "", seconds, "ours", "together"))
    return [*found, *(_evaluations(variants, products, repeats, kind) if bounded else ())]


def _evaluations(
    variants: dict[str, Work], products: dict[str, Product], repeats: int, kind: Kind
) -> list[Figure]:
    work = variants[""]
    contestants: dict[str, Callable[[], object]] = {}
    for name, variant in variants.items():
        contestants[f"ours{name}"] = products[name].evaluate
        for form in limit.forms(variant):
            contestants[f"forward{name}: {form}"] = limit.forward(variant, form)
    seconds = interleaved(contestants, 3 * repeats, kind)
    found = []
    for name in variants:
        best = _fastest(seconds, f"forward{name}: ")
        title = "evaluation / bare forward"
        found.append(_figure(work, title, name, seconds, f"ours{name}", best, "≤"))
    return found


def _fastest(seconds: Seconds, prefix: str) -> str:
    return min(
        (name for name in seconds if name.startswith(prefix)), key=lambda n: median(seconds[n])
    )


TARGETS = {
    "naive / ours": NAIVE_TARGETS,
    "ours / limit": LIMIT_TARGETS,
    "evaluation / bare forward": EVALUATION_TARGETS,
}


def _figure(
    work: Work,
    title: str,
    variant: str,
    seconds: Seconds,
    over: str,
    under: str,
    bound: Bound | None = None,
) -> Figure:
    target = TARGETS.get(title, {}).get(work.name + variant)
    return Figure(
        work.name,
        title + variant,
        ratio(seconds[over], seconds[under]),
        bound if target is not None else None,
        target,
        details={"over": over, "under": under, "seconds": seconds},
    )
