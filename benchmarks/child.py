"""Measurements that need a process of their own, because a process only remembers its peak."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class ChildFailed(Exception):
    """A measuring process ended badly; its last words say why."""


def measure(module: str, *arguments: object, threads: int) -> dict[str, Any]:
    """Run `python -m module arguments` and read the JSON object it prints last."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(threads))
    if done.returncode:
        words = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise ChildFailed(f"{module} {' '.join(map(str, arguments))}: {words}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


class Worker:
    """A contestant in a process of its own: a line to it is a call, its answer the seconds."""

    def __init__(self, module: str, *arguments: object, threads: int) -> None:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(threads),
        )

    def __call__(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise ChildFailed(f"{self._process.args}: exit code {self._process.wait()}")
        return float(answer)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        """Without lines it ends by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(work: Callable[[], object], clock: Callable[[], float]) -> None:
    """The worker's side."""
    for _ in sys.stdin:
        begin = clock()
        work()
        print(clock() - begin, flush=True)


def environment(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def peak() -> int:
    """Bytes: the most memory this process has held so far.

    The kernel's own account where there is one: what getrusage says begins with the parent's peak.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.findall(r"VmHWM:\s*(\d+)", status.read_text())[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
