"""A process that runs cells, one after the other: `python -m quiverfl.sweeps.job`.

Orders come as lines of JSON on standard input. When it ends, because the sweep is over or was
killed, this process ends at once: a run folder survives that at any moment. On standard output it
says, in lines of JSON, when a round is over and how a cell ended.

With a file of orders and a number, as in a Slurm array, it runs that one cell and notes itself how
it ended.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from quiverfl.engine.history import Record
from quiverfl.errors import Diverged, QuiverError, Stopped
from quiverfl.runs.config import parse_config
from quiverfl.runs.experiment import DatasetCache, run_in_folder
from quiverfl.support.environment import keep_freed_memory
from quiverfl.sweeps.executor import BROKEN, DIVERGED, REFUSED, STOPPED, Order, conclude
from quiverfl.sweeps.plan import Cell, SweepFolder
from quiverfl.types import Metrics


def main() -> None:
    keep_freed_memory()
    if len(sys.argv) == 3:
        sys.exit(run_one(Path(sys.argv[1]), sys.argv[2]))
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is for the log
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(orders,), daemon=True).start()
    data = DatasetCache()
    while True:
        order = orders.get()
        with Path(order["log"]).open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        code, message = run(order, data, said)
        _send_line(said, {"ended": code, "message": message})


def _read(orders: queue.SimpleQueue[Order]) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    os._exit(0)


def run_one(orders: Path, number: str) -> int:
    """The cell in this line of a file of orders; SIGTERM ends it with a checkpoint."""
    try:
        order = json.loads(orders.read_text().splitlines()[int(number)])
    except (OSError, ValueError, IndexError) as error:
        print(f"{orders} has no order {number}: {error}.", file=sys.stderr)
        return REFUSED
    folder, point = SweepFolder(Path(order["root"])), tuple((k, v) for k, v in order["point"])
    cell = Cell(parse_config(order["config"]), order["case"], point)
    begin, asked = time.monotonic(), threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    code, message = run(order, DatasetCache(), sys.stdout, asked.is_set)
    if code == STOPPED:
        print(message, file=sys.stderr)
    else:
        conclude(cell, folder, code, message, begin)
    return code


def run(
    order: Order, data: DatasetCache, said: TextIO, stop: Callable[[], bool] = lambda: False
) -> tuple[int, str]:
    """Carry out one order: 0, or what went wrong and why. The data stays for the next one."""
    telling, until = _Telling(said), order.get("until")

    def enough() -> bool:
        return until is not None and telling.rounds >= until

    def stopping() -> bool:
        return enough() or stop()

    try:
        config = parse_config(order["config"])
        # Wait while another sweep runs the same cell; what it finished is not repeated.
        dataset = data.take(config)
        run_in_folder(config, Path(order["folder"]), telling, dataset, stopping, wait=True)
    except Stopped as stopped:
        return (0, "") if enough() else (STOPPED, str(stopped))
    except QuiverError as error:
        if error.__cause__ is not None:  # what a library or your own code raised: for the log
            traceback.print_exc()
            sys.stderr.flush()
        return (DIVERGED if isinstance(error, Diverged) else REFUSED), str(error)
    except Exception as error:
        # A mistake in the user's model or ours: the next cell may still go well.
        traceback.print_exc()
        sys.stderr.flush()
        return BROKEN, f"{type(error).__name__}: {error} (see {order['log']})"
    return 0, ""


class _Telling:
    """Says after every round how far it is and how good: the mean over clients at each stage."""

    def __init__(self, said: TextIO) -> None:
        self._said = said
        self._scores: dict[str, float] = {}
        self.rounds = 0

    def on_evaluation(self, round: int, stage: str, metrics: Metrics) -> None:
        values = next(iter(metrics.values()))  # of the metric that results are judged by
        if not np.isnan(values).all():
            self._scores[stage] = float(np.nanmean(values))

    def on_round_end(self, record: Record) -> None:
        self.rounds = int(record["round"]) + 1
        _send_line(self._said, {"round": self.rounds, "scores": self._scores})


def _send_line(said: TextIO, line: dict[str, Any]) -> None:
    print(json.dumps(line), file=said, flush=True)


if __name__ == "__main__":
    main()
