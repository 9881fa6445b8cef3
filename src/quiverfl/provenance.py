"""Where a result comes from: the command that was typed, when, and the code that ran."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

COMMAND = "QUIVER_COMMAND"
_SECONDS = 5


def origin() -> dict[str, str]:
    """What is known of it, for environment.json: `started` and, where there are any, the others."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = {"started": now, "command": command(), "commit": commit()}
    return {name: text for name, text in found.items() if text is not None}


def command() -> str | None:
    """The command line, as it could be typed again; None where nobody typed one (a notebook)."""
    if COMMAND in os.environ:
        return os.environ[COMMAND]
    name = Path(sys.argv[0]).name if sys.argv else ""
    if not name or name in ("-c", "ipykernel_launcher.py"):
        return None
    return shlex.join(["quiver" if name == "__main__.py" else name, *sys.argv[1:]])


def passed_on() -> dict[str, str]:
    """For the environment of a process that works for this one: whose command it carries out."""
    said = command()
    return {} if said is None else {COMMAND: said}


@functools.cache
def commit() -> str | None:
    """Of Quiver's own source: from its clone, or as pip recorded it. None for a release."""
    clone = Path(__file__).parents[2]
    if (clone / ".git").exists():
        return _of_clone(clone)
    try:
        recorded = importlib.metadata.distribution("quiverfl").read_text("direct_url.json")
        return str(json.loads(recorded or "{}")["vcs_info"]["commit_id"])[:12]
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return None


def _of_clone(clone: Path) -> str | None:
    """With "-dirty" behind it where files were changed since."""
    asked = ["git", "-C", str(clone), "describe", "--always", "--dirty", "--abbrev=12"]
    asked.append("--exclude=*")  # the commit itself, not the tag before it
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
