"""What a configuration names: one of ours in a registry, or your own code, `module:function`."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from quiverfl.errors import QuiverError, say_leave_out, suggest


def is_reference(text: str) -> bool:
    """`my_models:make` is a reference to your own code; `mlp` is a name Quiver knows."""
    return isinstance(text, str) and ":" in text


Entry = TypeVar("Entry")


class Registry(dict[str, Entry]):
    """Entries by name. An unknown name is refused with the nearest known one."""

    def __init__(
        self,
        kind: str,
        entries: Mapping[str, Entry],
        own: str = "",
        key: str = "",
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """`own` says how to name code of your own, `key` which key of a configuration names it.

        `aliases` are other names for entries.
        """
        super().__init__(entries)
        self.kind, self.own, self.key, self.aliases = kind, own, key, dict(aliases or {})

    def resolve_alias(self, name: str) -> str:
        """The entry's own name, of another name for it."""
        return self.aliases.get(name, name)

    def find(self, name: str) -> Entry:
        """The entry of this name, or your own code by `module:function` where that is allowed."""
        if self.own and is_reference(name):
            own: Any = load_callable(name)
            return own  # type: ignore[no-any-return]
        return self.lookup(name)

    def lookup(self, name: str) -> Entry:
        """The entry of this name."""
        name = self.resolve_alias(name)
        if name not in self:
            what = f"{self.key} = {name!r}: unknown {self.kind}"
            what = what if self.key else f"unknown {self.kind} {name!r}"
            own = f" Your own: {self.own}." if self.own else ""
            raise QuiverError(f"{what}; {suggest(name, self)}{own}")
        return self[name]


def load_callable(reference: str, folder: Path | None = None) -> Callable[..., Any]:
    """The function that `module:function` names.

    The module is looked for in `folder` (the current one unless given), then wherever Python
    finds modules.
    """
    module_name, _, function_name = reference.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), function_name]):
        raise QuiverError(
            f"{reference!r} does not name a function: write module:function, such as "
            "my_models:make_model for make_model in my_models.py."
        )
    place = Path.cwd() if folder is None else folder
    module = _import(reference, module_name, place)
    _refuse_namesake(reference, module, place)
    if not hasattr(module, function_name):
        functions = [n for n, value in vars(module).items() if n[0] != "_" and callable(value)]
        raise QuiverError(
            f"{reference!r}: {module.__file__ or module_name} has no {function_name!r}; "
            f"{suggest(function_name, functions)}"
        )
    function: Callable[..., Any] = getattr(module, function_name)
    if not callable(function):
        raise QuiverError(
            f"{reference!r} is a {type(function).__name__}, not a function: "
            "name something callable."
        )
    return function


@cache
def hash_source(reference: str) -> str:
    """A hash of the file that `module:function` is in, and of what it imports from beside it.

    Taken once per process, as a module is imported once: an edit meanwhile is not what runs.
    """
    try:
        source = inspect.getsourcefile(inspect.unwrap(load_callable(reference)))
    except TypeError:  # made by a library, such as functools.partial
        source = None
    if source is None:
        return ""
    files = _list_own_files(sys.modules[reference.partition(":")[0]], Path(source).resolve().parent)
    digest = hashlib.blake2b(Path(source).read_bytes(), digest_size=16)
    for path in sorted(files - {Path(source).resolve()}):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _list_own_files(module: ModuleType, folder: Path) -> set[Path]:
    """The files below a folder that a module's names come from, and theirs."""
    files: set[Path] = set()
    waiting = [module]
    while waiting:
        here = waiting.pop()
        path = Path(getattr(here, "__file__", None) or "/").resolve()
        if path in files or not path.is_relative_to(folder) or "site-packages" in path.parts:
            continue
        files.add(path)
        for value in vars(here).values():
            origin = value if isinstance(value, ModuleType) else _find_module(value)
            if origin is not None:
                waiting.append(origin)
    return files


def _find_module(value: object) -> ModuleType | None:
    return sys.modules.get(str(getattr(value, "__module__", "")))


def describe_origin(error: BaseException) -> str:
    """The file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else "unknown"


def check_options(
    what: str,
    function: Callable[..., Any],
    options: Iterable[str],
    section: str,
    given: Iterable[str] = (),
    more: Iterable[str] = (),
) -> None:
    """Refuses options the function does not take; `given` are arguments that are no options.

    `more` are further names that the caller accepts.

    `section` of a configuration is where they stand.
    """
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    known = [*dict.fromkeys([*(name for name in parameters if name not in set(given)), *more])]
    for option in options:
        if option not in known:
            hint = suggest(option, known) if known else "it has no options."
            raise QuiverError(
                f"{what} has no option {option!r}; {hint} {say_leave_out(f'{section}.{option}')}"
            )


def _import(reference: str, name: str, folder: Path) -> ModuleType:
    try:
        with _first_on_path(folder):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise QuiverError(
                f"{reference!r}: there is no module {error.name!r} in {folder} or among the "
                f"installed packages; put {error.name.split('.')[0]}.py there or set PYTHONPATH."
            ) from error
        raise QuiverError(f"{reference!r}: importing {name} failed: {error}.") from error
    except Exception as error:
        # Whatever the person's module raises while it is imported is theirs to see, in one line.
        raise QuiverError(
            f"{reference!r}: importing {name} failed: {type(error).__name__}: {error}"
        ) from error


def _refuse_namesake(reference: str, module: ModuleType, folder: Path) -> None:
    """Python imports a name once per process: the file of another folder must not run for this."""
    source = folder.joinpath(*module.__name__.split(".")).with_suffix(".py")
    loaded = getattr(module, "__file__", None)
    if loaded and source.is_file() and Path(loaded).resolve() != source.resolve():
        raise QuiverError(
            f"{reference!r}: this Python process has already imported {module.__name__!r} from "
            f"{loaded}, not from {source}; rename one of the two files or start a new process."
        )


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    entry = str(folder)
    sys.path.insert(0, entry)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(entry)
