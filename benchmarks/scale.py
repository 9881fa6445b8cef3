"""Work E: the dense work with 10 to 10,000 clients; time and memory per client as they grow."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace

from benchmarks.child import ChildFailed, measure, peak
from benchmarks.clock import Kind, interleaved
from benchmarks.figures import Figure, ratio
from benchmarks.product import Product
from benchmarks.works import TRAINING, A, Work
from quiverfl import keep_freed_memory, simulate

SAMPLES = 50
CLIENTS = (10, 100, 1_000, 10_000)
CLIENT_ROUNDS = 2_000
"""Client rounds a repeat has at least, so that few clients are timed as long as many."""
TIME_TARGET, MEMORY_TARGET = 1.2, 1.3


def work(clients: int) -> Work:
    return replace(A, name="E", clients=clients, samples=SAMPLES, test=SAMPLES // 5)


def figures(repeats: int, kind: Kind, threads: int, quick: bool) -> list[Figure]:
    sizes = CLIENTS[:-1] if quick else CLIENTS
    return [*_times(sizes, repeats, kind), *_memory(sizes, threads)]


def _times(sizes: tuple[int, ...], repeats: int, kind: Kind) -> list[Figure]:
    rounds = {clients: max(1, CLIENT_ROUNDS // clients) for clients in sizes}
    contestants: dict[str, Callable[[], object]] = {
        str(clients): _several(Product(work(clients)).round, rounds[clients]) for clients in sizes
    }
    seconds = interleaved(contestants, repeats, kind)
    each = {c: [s / (rounds[c] * c) for s in seconds[str(c)]] for c in sizes}
    found = []
    for clients in sizes:
        held = clients == CLIENTS[-1]
        found.append(
            Figure(
                "E",
                f"time per client at {clients:,} / at 100",
                ratio(each[clients], each[100]),
                "≤" if held else None,
                TIME_TARGET if held else None,
                details={"microseconds_per_client": min(each[clients]) * 1e6, "seconds": seconds},
            )
        )
    return [figure for figure in found if "100 / at 100" not in figure.name]


def _several(round: Callable[[], object], count: int) -> Callable[[], None]:
    def play() -> None:
        for _ in range(count):
            round()

    return play


def _memory(sizes: tuple[int, ...], threads: int) -> list[Figure]:
    """Few clients weigh less than what any process holds: they have a figure but no target."""
    found = []
    for clients in sizes[1:]:
        name = f"peak memory / (states + data), {clients:,} clients"
        try:
            child = measure("benchmarks.scale", clients, threads=threads)
        except ChildFailed as error:
            found.append(Figure("E", name, None, note=str(error)))
            continue
        value = child["grown"] / child["needed"]
        held = clients == CLIENTS[-1]
        target = MEMORY_TARGET if held else None
        found.append(Figure("E", name, value, "≤" if held else None, target, details=child))
    return found


def main() -> None:
    """The measuring process: what the peak grows by while a federation is made and trained."""
    parser = argparse.ArgumentParser()
    parser.add_argument("clients", type=int)
    clients = parser.parse_args().clients
    keep_freed_memory()
    _play(work(2))  # what the first round loads is there whatever the number of clients
    before = peak()
    needed = _play(work(clients))
    print(json.dumps({"grown": peak() - before, "needed": needed}))


def _play(work: Work) -> int:
    """Two rounds with evaluation; the bytes of all clients' states and examples."""
    data, task = work.data(), work.task()
    simulate(
        task,
        data,
        method=work.method(),
        topology=work.topology(),
        training=TRAINING,
        rounds=2,
        keep_local=False,
    )
    floats = work.clients * (task.shared_layout.size + task.personal_layout.size) * 4
    mass = work.clients * 8
    splits = (data.train, data.test)
    examples = sum(part.numel() * part.element_size() for s in splits for part in (s.x, s.y))
    return floats + mass + examples


if __name__ == "__main__":
    main()
