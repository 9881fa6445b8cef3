"""Machines without a C compiler, and a cache of libraries that is empty."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

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


def _forget() -> None:
    load_library.cache_clear()
    why_not_compiled.cache_clear()
