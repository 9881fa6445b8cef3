"""The command line as a shell would call it: in a process of its own, or in this one."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

from quiverfl.cli.main import main

QUIVER = [sys.executable, "-m", "quiverfl.cli.main"]


def started(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A process of its own; it takes seconds to begin."""
    command = [*QUIVER, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def quiver(*arguments: str, cwd: Path, encoding: str = "utf-8") -> subprocess.CompletedProcess[str]:
    """The same command in this process, which has torch already."""
    before, code = Path.cwd(), 0
    out, err = io.BytesIO(), io.BytesIO()
    os.chdir(cwd)
    try:
        with (
            mock.patch.object(sys, "argv", ["quiver", *arguments]),
            contextlib.redirect_stdout(io.TextIOWrapper(out, encoding)) as stdout,
            contextlib.redirect_stderr(io.TextIOWrapper(err, encoding)) as stderr,
            warnings.catch_warnings(),
        ):
            try:
                main()
            except SystemExit as ended:
                code = int(ended.code or 0)
            finally:
                stdout.flush()
                stderr.flush()
            said, errors = (stream.getvalue().decode(encoding) for stream in (out, err))
    finally:
        os.chdir(before)
    return subprocess.CompletedProcess(arguments, code, said, errors)
