"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
import re
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
    }


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
