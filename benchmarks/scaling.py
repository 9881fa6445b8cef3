"""`python -m benchmarks.scaling`: how rounds grow, as two pictures for the documentation.

Against clients: the whole of a run of work T, per client. Against parameters: training and mixing
of twenty clients (four of ten million parameters), and the bare forward and backward of the same
samples.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import torch

from benchmarks import limit, machine
from benchmarks.child import measure
from benchmarks.clock import Kind, interleaved
from benchmarks.crowd import BYTES, CROWDS
from benchmarks.figures import ratio
from benchmarks.product import Product
from benchmarks.works import CLASSES, Work
from quiverfl import keep_freed_memory
from quiverfl.models import make_model

RESULT, IMAGES = Path("runs/bench/scaling.json"), Path("docs/images")
CLIENTS = (10, 100, 1_000, *CROWDS)
CLIENT_ROUNDS = 20_000
"""Client rounds that few clients are timed for, so that they are timed as long as many."""
INPUTS, SAMPLES = 64, 64
WIDTHS = (12, 70, 280, 960, 3_100)
"""Of both hidden layers: a thousand to ten million parameters."""


def measure_clients(kind: Kind, most: int) -> list[dict[str, Any]]:
    points = []
    for clients in CLIENTS:
        room = machine.available()
        if clients > most or (room is not None and room < clients * BYTES):
            break
        rounds = max(3, CLIENT_ROUNDS // clients)
        child = measure("benchmarks.crowd", clients, kind, "--rounds", rounds, threads=1)
        points.append({"clients": clients, **child})
    return points


def measure_parameters(kind: Kind, repeats: int) -> list[dict[str, Any]]:
    points = []
    for width in WIDTHS:
        model = partial(make_model, "mlp", (INPUTS,), CLASSES, hidden=(width, width))
        clients = 20 if width < 1_000 else 4  # what few large models take hardly depends on it
        work = Work("P", "", model, (INPUTS,), clients, SAMPLES, 16, 1, 1, neighbors=3)
        contestants: dict[str, Callable[[], object]] = {
            "ours": Product(work).round,
            "limit": limit.phases(work, "contiguous", SAMPLES),
        }
        seconds = interleaved(contestants, repeats, kind)
        size = sum(leaf.numel() for leaf in work.model().parameters())
        each = {name: min(times) / work.clients for name, times in seconds.items()}
        points.append({"parameters": size, **each, "ratio": ratio(*seconds.values())})
    return points


def draw(result: dict[str, Any], folder: Path) -> None:
    """Two pictures; each says what it was measured on."""
    matplotlib.rcParams["svg.hashsalt"] = "quiver"  # the same file from the same numbers
    about = result["about"]
    foot = f"{about['processor']}, one thread, {about['clock']} time; {about['commit']}"
    points = result["clients"]
    across = [point["clients"] for point in points]
    microseconds = [point["seconds"] * 1e6 for point in points]
    lines = {"whole round: train, mix, evaluate, record": microseconds}
    where = folder / "scaling-clients.svg"
    _picture(where, across, lines, "clients", "µs per client and round", foot)
    points = result["parameters"]
    across = [point["parameters"] for point in points]
    lines = {
        "a round: train and mix": [point["ours"] * 1e6 for point in points],
        "bare forward and backward": [point["limit"] * 1e6 for point in points],
    }
    where = folder / "scaling-parameters.svg"
    _picture(where, across, lines, "parameters", "µs per client and round", foot)


def _picture(
    path: Path,
    across: Sequence[float],
    lines: dict[str, list[float]],
    horizontal: str,
    vertical: str,
    foot: str,
) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for (label, values), marker in zip(lines.items(), ("o", "s"), strict=False):
        axes.plot(across, values, marker=marker, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = min(map(min, lines.values())), max(map(max, lines.values()))
    axes.set_ylim(min(10.0, low / 2), high * 2)
    axes.set_xlabel(f"{horizontal}\n{foot}", fontsize="small")
    axes.set_ylabel(vertical)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--most", type=int, default=CLIENTS[-1], help="clients, at most")
    parser.add_argument("--draw", action="store_true", help="only draw what was measured before")
    parser.add_argument("--images", type=Path, default=IMAGES)
    wanted = parser.parse_args()
    if not wanted.draw:
        torch.set_num_threads(1)
        keep_freed_memory()
        date, load = datetime.date.today().isoformat(), machine.load()
        result = {
            "about": {**machine.describe(), "clock": wanted.clock, "date": date, "load": load},
            "parameters": measure_parameters(wanted.clock, wanted.repeats),
            "clients": measure_clients(wanted.clock, wanted.most),
        }
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    draw(json.loads(RESULT.read_text()), wanted.images)
    print(f"{RESULT}, and two pictures in {wanted.images}")


if __name__ == "__main__":
    main()
