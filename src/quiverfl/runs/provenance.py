"""Provenance of a run: the command, the time, and the software and machine behind its numbers."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import quiverfl

COMMAND = "QUIVER_COMMAND"
"""Environment variable with the command that a worker process carries out."""
GIT_SECONDS = 5


def describe_environment() -> dict[str, Any]:
    """Return the versions and the machine that computed the numbers."""
    return {
        "quiverfl": quiverfl.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def describe_start() -> dict[str, str]:
    """Return the time of the start and, if known, the command and the commit."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    facts = {"started": now, "command": read_command(), "commit": read_commit()}
    return {name: text for name, text in facts.items() if text is not None}


def read_command() -> str | None:
    """Return the command line as it could be typed again; None in a notebook."""
    if COMMAND in os.environ:
        return os.environ[COMMAND]
    name = Path(sys.argv[0]).name if sys.argv else ""
    if not name or name in ("-c", "ipykernel_launcher.py"):
        return None
    return shlex.join(["quiver" if name == "__main__.py" else name, *sys.argv[1:]])


def command_environment() -> dict[str, str]:
    """Return the environment variables that tell a worker process whose command it carries out."""
    command = read_command()
    return {} if command is None else {COMMAND: command}


@functools.cache
def read_commit() -> str | None:
    """Return the commit of Quiver's source, from its clone or from pip; None for a release."""
    clone = Path(__file__).parents[3]
    if (clone / ".git").exists():
        return _describe_clone(clone)
    try:
        recorded = importlib.metadata.distribution("quiverfl").read_text("direct_url.json")
        return str(json.loads(recorded or "{}")["vcs_info"]["commit_id"])[:12]
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return None


def _describe_clone(clone: Path) -> str | None:
    """Return the commit, with "-dirty" behind it if files have changed since."""
    command = ["git", "-C", str(clone), "describe", "--always", "--dirty", "--abbrev=12"]
    command.append("--exclude=*")  # the commit itself, not the tag before it
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None
