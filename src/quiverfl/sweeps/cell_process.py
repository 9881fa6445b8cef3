"""A process that runs cells (`python -m quiverfl.sweeps.job`), seen from outside.

A cell never runs in the process that looks after it: whatever it prints, breaks or uses up is its
own, and it ends by itself as soon as nobody looks after it any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quiverfl.provenance import passed_on
from quiverfl.sweeps.where import Order


class CellProcess:
    def __init__(self, threads: int, folder: Path | None = None) -> None:
        """Started in `folder`, where a person's own code is looked for first."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "quiverfl.sweeps.job"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, **passed_on(), "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,  # Ctrl-C is for the sweep alone
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def follow(self, order: Order) -> Iterator[dict[str, Any]]:
        """What it tells while it carries out an order; at last `ended` and `message`.

        If it dies, that is told in its name.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it died between two cells
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            told = json.loads(line)
            yield told
            if "ended" in told:
                return
        self.end()
        code = self._process.returncode
        yield {"ended": code or 1, "message": _death(code)}

    def end(self) -> None:
        """Without orders it ends by itself."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.wait()

    def kill(self) -> None:
        self._process.kill()


def _death(code: int) -> str:
    if code < 0:
        return f"its process was ended by signal {-code}; perhaps memory ran out"
    return f"its process ended with code {code}"
