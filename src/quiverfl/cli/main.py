"""The command `quiver`: one module per group of commands, loaded when it is used.

torch, pandas and scipy take seconds to import, and `--help`, `--version` or a typo need none.
"""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata

try:
    import errno
    import gc
    import importlib
    import logging
    import warnings
    from typing import Annotated, Any, TextIO

    import typer
    from rich.console import Console
    from rich.markup import escape
    from typer.core import TyperCommand, TyperGroup
    from typer.main import get_command, get_group

    import quiverfl
    from quiverfl.distributed.processes import is_first_on_machine, world_size
    from quiverfl.errors import Diverged, QuiverError, QuiverWarning
    from quiverfl.support.environment import keep_freed_memory
except KeyboardInterrupt:  # in the first moments, before there is a `main` to catch it
    sys.exit(130)

COMMANDS = {
    "run": ("run", "run", "Run one experiment into a folder of its own."),
    "resume": (
        "run",
        "resume",
        "Resume an interrupted run; the numbers are those of an uninterrupted one.",
    ),
    "compare": (
        "run",
        "compare",
        "Run several methods on the same data, model and seeds; a table and an HTML report.",
    ),
    "init": (
        "setup",
        "init",
        "Write a first project: a configuration, and data, model and method of your own that run.",
    ),
    "check": (
        "setup",
        "check",
        "Try the laws that every method keeps on a method of your own.",
    ),
    "extend": (
        "report",
        "extend",
        "Give a run more rounds than it was planned for, and resume it.",
    ),
    "export": (
        "report",
        "export",
        "Write a client's personal model with its normalisation, its labels and how to load it.",
    ),
    "ls": (
        "runs",
        "ls",
        "What runs there are below a folder: state, rounds, last scores, time.",
    ),
    "show": (
        "runs",
        "show",
        "One run: what it is, how far it came, its scores and costs, and what can be done next.",
    ),
    "watch": (
        "runs",
        "watch",
        "Serve a page with live curves, rounds, time left and failures of every run below a "
        "folder.",
    ),
    "report": (
        "report",
        "report",
        "Compare runs: one HTML file that needs no network, and a table.",
    ),
    "sweep": (
        "sweep",
        "sweep",
        "Run a grid of experiments; started again, it resumes.",
    ),
    "tune": (
        "tune",
        "tune",
        "Run every try, and print the best of each method as overrides for a configuration.",
    ),
    "reproduce": (
        "reproduce",
        "reproduce",
        "Run what a table or figure of the paper needs, and write it beside the paper's numbers.",
    ),
    "theory": (
        "reproduce",
        "theory",
        "Measure DFedPGP's rate, what connectivity is worth, and what push-sum conserves.",
    ),
    "doctor": (
        "setup",
        "doctor",
        "Verify a device: its numbers against the CPU, its speed against a bare loop, its memory.",
    ),
    "methods": (
        "run",
        "methods",
        "The methods, their options and the topology they are usually run on.",
    ),
    "topologies": (
        "topology",
        "topologies",
        "List the topologies: their matrix, their options, and which methods can run on them.",
    ),
    "topology": ("topology", "app", "Measure and draw a topology."),
    "data": ("data", "app", "List and fetch data sets."),
    "peer": ("peer", "app", "Run as a peer between real machines."),
    "partition": ("data", "partition_app", "Look at a partition."),
}
"""Module of quiverfl.cli, function or group in it, and the first sentence of its help."""
ONE_PROCESS = (
    "compare",
    "extend",
    "sweep",
    "tune",
    "reproduce",
    "theory",
    "doctor",
    "check",
    "peer",
    "watch",
)
"""Commands that many ranks would each carry out, in the same folders."""


def _import_module(name: str) -> Any:
    """A command's module, and with it torch. What they make stays until the command ends.

    Python's collector would look through it again and again: a fifth of the time they take.
    """
    if name in sys.modules or not gc.isenabled():
        return importlib.import_module(name)
    gc.disable()
    try:
        module = importlib.import_module(name)
        gc.freeze()
    finally:
        gc.enable()
    return module


class Late(TyperCommand):
    """Stands for a command in lists; the command itself is loaded to parse its arguments."""

    def __init__(self, name: str, module: str, attribute: str, help: str) -> None:
        super().__init__(name, help=help)
        self._module, self._attribute = module, attribute

    def load(self) -> Any:
        command = getattr(_import_module(f"quiverfl.cli.{self._module}"), self._attribute)
        if isinstance(command, typer.Typer):
            return get_group(command)
        alone = typer.Typer(add_completion=False)
        alone.command(self.name)(command)
        return get_command(alone)

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        if self.name in ONE_PROCESS and world_size() > 1:
            raise QuiverError(
                f"quiver {self.name} is one process, and this is one of {world_size()} ranks "
                "(WORLD_SIZE): start it without torchrun. Ranks share a `run` or a `resume`."
            )
        return self.load().make_context(info_name, args, parent, **extra)


class Commands(TyperGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (module, attribute, help) in COMMANDS.items():
            self.add_command(Late(name, module, attribute, help))


app = typer.Typer(
    cls=Commands,
    help="Decentralized personalized federated learning over directed graphs.",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def show_version_or_help(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"quiver {quiverfl.__version__}")
        raise typer.Exit


def main() -> None:
    """Exit codes: 0 done, 2 something to fix, 3 training diverged, 130 interrupted (typer's),
    143 stopped by SIGTERM."""
    allow_any_encoding()
    warnings.showwarning = _show_warning
    _print_notes()
    keep_freed_memory()
    try:
        app()
    except Diverged as error:
        _print_error("diverged", error)
        sys.exit(3)
    except QuiverError as error:
        _print_error("error", error)
        sys.exit(2)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full and not error.filename:
            raise  # nothing that a person could look at
        _print_error("error", _about_file(error, full))
        sys.exit(2)


def _about_file(error: OSError, full: bool) -> str:
    """What the operating system refused, of which file, and what to do."""
    name = str(error.filename or "")
    if error.errno == errno.ENAMETOOLONG:
        return f"{name[:40]}…: {error.strerror}. Choose a shorter name."
    if full:
        place = f"{name} cannot be written: " if name else ""
        return f"{place}{error.strerror}. Make room, then run the command again."
    return f"{name}: {error.strerror}. Choose another path, or make this one accessible."


def _print_error(what: str, error: object) -> None:
    if not is_first_on_machine():  # every rank of a machine would say the same
        return
    console = Console(emoji=False, stderr=True, highlight=False)
    console.print(f"[red]{what}:[/red] {escape(str(error))}", soft_wrap=True)


_said: set[str] = set()


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Ours in one line, without the place in our source."""
    if issubclass(category, QuiverWarning) and not is_first_on_machine():
        return
    if issubclass(category, QuiverWarning):
        if str(message) in _said:
            return  # the same run is checked before it is started
        _said.add(str(message))
        print(f"warning: {message}", file=file or sys.stderr)
    else:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        print(text, end="", file=file or sys.stderr)


class _Notes(logging.Handler):
    """What was decided for a person who did not say otherwise: a line each, once."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if is_first_on_machine() and text not in _said:
            _said.add(text)
            print(f"note: {text}", file=sys.stderr)


def _print_notes() -> None:
    log = logging.getLogger("quiverfl.data")
    if not log.handlers:
        log.addHandler(_Notes())
        log.setLevel(logging.INFO)


# Terminals and pipes that cannot show every letter get the nearest ASCII instead of an error.


PLAIN = {
    "…": "...",
    "±": "+-",
    "–": "-",
    "—": "-",
    "−": "-",
    "→": "->",
    "←": "<-",
    "≤": "<=",
    "≥": ">=",
    "×": "x",
    "·": "*",
    "‖": "||",
    "√": "sqrt",
    "∞": "inf",
    "✓": "yes",
    "’": "'",
    "“": '"',
    "”": '"',
    "μ": "mu",
    "δ": "delta",
    "Δ": "Delta",
    "σ": "sigma",
    "Σ": "Sum",
    "η": "eta",
    "τ": "tau",
    "λ": "lambda",
    "χ": "chi",
    "κ": "kappa",
    "θ": "theta",
    "∇": "grad",
    "░": ".",
    "▒": ":",
    "▓": "+",
    "█": "#",
}
NAME = "quiver-plain"


def allow_any_encoding() -> None:
    """For standard output and error, unless somebody chose another way for what they lack."""
    codecs.register_error(NAME, _replace_unprintable)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "backslashreplace"):
            stream.reconfigure(errors=NAME)


def _replace_unprintable(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(PLAIN.get(letter) or _replace_letter(letter) for letter in letters), error.end


def _replace_letter(letter: str) -> str:
    """Without its accent, or a question mark."""
    parts = unicodedata.normalize("NFKD", letter)
    return "".join(part for part in parts if part.isascii()) or "?"


if __name__ == "__main__":
    main()
