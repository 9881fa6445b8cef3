"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

import numpy
import torch

import quiverfl

PROCESSOR, MEMORY = Path("/proc/cpuinfo"), Path("/proc/meminfo")


def describe() -> dict[str, str]:
    return {
        "processor": _first(PROCESSOR, r"model name\s*:\s*(.+)") or platform.processor(),
        "cores": str(os.cpu_count()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "memory": _memory(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "quiverfl": quiverfl.__version__,
        "commit": commit(),
    }


def commit() -> str:
    """The commit of this tree, with "+" where files were changed since; "unknown" without git."""
    root = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = git("status", "--porcelain", "--", "src", "benchmarks")
    return git("rev-parse", "--short=9", "HEAD") + "+" * bool(changed) or "unknown"


def load() -> str:
    """How many processes wanted the processor in the last minute, where the system says."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def available() -> int | None:
    """Bytes of memory that can be had now; None where the system does not say."""
    kilobytes = _first(MEMORY, r"MemAvailable:\s*(\d+)")
    return int(kilobytes) * 1024 if kilobytes else None


def _memory() -> str:
    kilobytes = _first(MEMORY, r"MemTotal:\s*(\d+)")
    return f"{int(kilobytes) / 1024**2:.0f} GiB" if kilobytes else "unknown"


def _first(path: Path, pattern: str) -> str | None:
    found = re.search(pattern, path.read_text()) if path.exists() else None
    return found.group(1).strip() if found else None
