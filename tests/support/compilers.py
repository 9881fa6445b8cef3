"""Machines without a C compiler, and a cache of libraries that is empty."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest import mock

import pytest

from quiverfl.support import compiler
from quiverfl.support.compiler import load_library, why_not_compiled


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """With other variables, nothing compiled before is remembered, and nothing of it after."""
    _forget()
    try:
        with mock.patch.dict("os.environ", variables):
            yield
    finally:
        _forget()


def no_compiler() -> AbstractContextManager[None]:
    return environment(CC="no-such-compiler")


@contextmanager
def mutated(
    patch: pytest.MonkeyPatch, folder: Path, name: str, before: str, after: str
) -> Iterator[None]:
    """With a mistake in one of the C files."""
    source = Path(compiler.__file__).with_name("native") / name
    text = source.read_text()
    assert before in text
    (folder / "native").mkdir()
    (folder / "native" / name).write_text(text.replace(before, after))
    patch.setattr(compiler, "__file__", str(folder / "compiler.py"))
    with environment(XDG_CACHE_HOME=str(folder)):
        yield


def run_sanitized(folder: Path, name: str, flag: str, driver: str) -> None:
    """Run a C program that includes one of the C files, with AddressSanitizer and UBSan."""
    native = Path(compiler.__file__).with_name("native")
    (folder / "driver.c").write_text(f'#include "{native / name}"\n{driver}')
    checks = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", flag)
    options = ("-std=gnu11", "-O1", "-g", "-march=native", "-Wall", "-Wno-psabi", *checks)
    program, source = str(folder / "driver"), str(folder / "driver.c")
    made = subprocess.run(
        [*compiler._find_compiler(), *options, source, "-o", program, "-lm"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "sanitize" in made.stderr or "libasan" in made.stderr or "lasan" in made.stderr:
        pytest.skip("this compiler has no sanitizers")
    assert made.returncode == 0, made.stderr
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("finished")


def _forget() -> None:
    load_library.cache_clear()
    why_not_compiled.cache_clear()
