"""A C file of this folder as a library: compiled where it is first needed, and kept."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from quiverfl.errors import QuiverError

FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-shared")


class NotCompiled(QuiverError):
    """There is no compiler here, or it refused."""


@functools.cache
def load_library(name: str, *flags: str) -> ctypes.CDLL:
    """The library of `name`.c; calls into it leave other Python threads running."""
    source = Path(__file__).with_name("native") / f"{name}.c"
    compiler = _find_compiler()
    command = (*compiler, *FLAGS, *flags)
    identity = hashlib.sha256()
    for part in (source.read_text(), " ".join(command), _version(compiler), _processor()):
        identity.update(part.encode() + b"\0")
    try:
        kept = _folder() / f"{name}-{identity.hexdigest()[:16]}.so"
        if kept.exists():
            with contextlib.suppress(OSError):  # damaged, as by a power cut: once more
                return ctypes.CDLL(str(kept))
        _compile(command, source, kept)
        return ctypes.CDLL(str(kept))
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        raise NotCompiled(
            f"the compiled {name} could not be kept or loaded: {error}. Set XDG_CACHE_HOME to a "
            "folder of your own from which libraries may be loaded."
        ) from error


@functools.cache
def why_not_compiled(name: str, *flags: str) -> str | None:
    """Why there is no such library here; None if there is."""
    try:
        load_library(name, *flags)
    except NotCompiled as error:
        return str(error)
    return None


def _find_compiler() -> tuple[str, ...]:
    text = os.environ.get("CC", "")
    try:
        wanted = shlex.split(text)
    except ValueError as error:
        raise NotCompiled(f"CC = {text!r} is no command: {error}.") from error
    for words in [wanted] if wanted else [["cc"], ["gcc"], ["clang"]]:
        path = shutil.which(words[0])
        if path:
            return (path, *words[1:])
    sought = repr(wanted[0]) if wanted else "cc, gcc or clang"
    raise NotCompiled(f"no C compiler was found ({sought}): install one, or name it in CC.")


def _compile(command: tuple[str, ...], source: Path, kept: Path) -> None:
    """To another name first: two processes may compile the same at once."""
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        fresh = Path(folder) / kept.name
        done = _run_compiler(*command, str(source), "-o", str(fresh))
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            reason = next((line for line in lines if "error" in line), lines[0])
            raise NotCompiled(f"{command[0]} could not compile {source.name}: {reason}")
        fresh.replace(kept)


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "quiverfl" / "native"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    own = getattr(os, "getuid", None)  # Windows has none, and keeps a home to its owner
    if own is not None and folder.stat().st_uid != own():
        raise OSError(f"{folder} belongs to somebody else, whose libraries are not loaded")
    return folder


def _version(compiler: tuple[str, ...]) -> str:
    return _run_compiler(*compiler, "--version").stdout


def _run_compiler(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise NotCompiled(f"the C compiler {command[0]} cannot be run: {error}.") from error


def _processor() -> str:
    """The processor that -march=native depends on; machines of several kinds may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    kinds = ("flags", "Features", "model name", "CPU part")
    return platform.machine() + "".join(sorted({x for x in lines if x.startswith(kinds)}))
