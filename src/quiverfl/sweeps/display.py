"""Progress of many cells: bars on a terminal, one changing line in a notebook, or plain lines."""

from __future__ import annotations

import contextlib
import html
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from quiverfl.methods import method_title
from quiverfl.results.formatting import format_duration
from quiverfl.runs.progress import WIDTH_FOR_A_BAR
from quiverfl.sweeps.executor import Outcome, Watcher
from quiverfl.sweeps.plan import Cell

SECONDS_BETWEEN_LINES = 30.0
SECONDS_BETWEEN_UPDATES = 1.0


@contextlib.contextmanager
def show_sweep(
    cells: Sequence[Cell], seconds: Mapping[str, float | None], quiet: bool
) -> Iterator[Watcher]:
    """Give a watcher that shows progress; `seconds` are estimates by the name of the cell."""
    console = Console(emoji=False, stderr=True, highlight=False)
    tally = Tally(cells, seconds)
    if quiet:
        yield _Silent()
    elif console.is_jupyter:
        yield _Notebook(console, tally)
    elif console.is_terminal:
        with Progress(*_make_columns(console.width), console=console) as display:
            yield _Bars(display, tally)
    else:
        yield _Lines(console, tally)


def _make_columns(width: int) -> list[ProgressColumn]:
    """Rounds and times come first and whole; names, scores and a bar share what is left."""

    def whole() -> Column:
        return Column(no_wrap=True)

    bar: list[ProgressColumn] = [BarColumn(bar_width=20)] if width >= WIDTH_FOR_A_BAR else []
    return [
        TextColumn("{task.fields[done]}", table_column=whole()),
        TimeElapsedColumn(table_column=whole()),
        TimeRemainingColumn(table_column=whole()),
        *bar,
        _Shortened(),
    ]


class _Shortened(ProgressColumn):
    """The cell and its scores, shortened to the room there is."""

    def render(self, task: Task) -> Text:
        words = Text.from_markup(f"{task.description}  {task.fields['score']}")
        words.no_wrap, words.overflow = True, "ellipsis"
        return words


class Tally:
    """Counts the work that is done; a cell weighs its estimated seconds."""

    def __init__(self, cells: Sequence[Cell], seconds: Mapping[str, float | None]) -> None:
        self.count, self.ended, self.failed = len(cells), 0, 0
        known = [value for value in seconds.values() if value]
        usual = sum(known) / len(known) if known else 1.0
        self._weights = {cell.name: seconds.get(cell.name) or usual for cell in cells}
        self._done: dict[str, float] = {}
        self._first: dict[str, int] = {}
        self._begin = time.monotonic()

    def record_progress(self, cell: Cell, rounds: int) -> None:
        """A resumed cell begins at its first round here, not at zero."""
        first = self._first.setdefault(cell.name, rounds - 1)
        left = max(1, cell.config.run.rounds - first)
        self._done[cell.name] = max(0, rounds - first) / left

    def conclude(self, outcome: Outcome) -> None:
        self._done[outcome.cell.name] = 1.0
        self.ended += 1
        self.failed += outcome.ending != "finished"

    @property
    def fraction(self) -> float:
        done = sum(fraction * self._weights[name] for name, fraction in self._done.items())
        return done / max(sum(self._weights.values()), 1e-9)

    @property
    def time_left(self) -> str:
        """The time left, from the pace so far."""
        if self.fraction < 0.01:
            return ""
        elapsed = time.monotonic() - self._begin
        return f", about {format_duration(elapsed * (1 / self.fraction - 1))} left"

    def describe(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.ended} of {self.count} cells{failed}"


class _Silent:
    def on_cell_start(self, cell: Cell) -> None:
        pass

    def on_cell_restart(self, cell: Cell, why: str) -> None:
        pass

    def on_cell_progress(self, cell: Cell, rounds: int, scores: dict[str, float]) -> None:
        pass

    def on_cell_end(self, outcome: Outcome) -> None:
        pass


class _Bars:
    """One bar for all cells and one for each cell that runs."""

    def __init__(self, display: Progress, tally: Tally) -> None:
        self._display, self._tally = display, tally
        self._lock = threading.Lock()
        self._whole = display.add_task(
            "[bold]all cells", total=1.0, done=tally.describe(), score=""
        )
        self._tasks: dict[str, TaskID] = {}

    def on_cell_start(self, cell: Cell) -> None:
        with self._lock:
            self._tasks[cell.name] = self._display.add_task(
                escape(describe_cell(cell)),
                total=cell.config.run.rounds,
                done=f"0/{cell.config.run.rounds}",
                score="",
            )

    def on_cell_restart(self, cell: Cell, why: str) -> None:
        with self._lock:
            self._display.print(_format_restart(cell, why), markup=False, soft_wrap=True)

    def on_cell_progress(self, cell: Cell, rounds: int, scores: dict[str, float]) -> None:
        with self._lock:
            self._tally.record_progress(cell, rounds)
            done = f"{rounds}/{cell.config.run.rounds}"
            self._display.update(
                self._tasks[cell.name], completed=rounds, done=done, score=_format_scores(scores)
            )
            self._show_whole()

    def on_cell_end(self, outcome: Outcome) -> None:
        with self._lock:
            self._tally.conclude(outcome)
            self._display.remove_task(self._tasks.pop(outcome.cell.name))
            if outcome.ending != "finished":
                self._display.print(_format_outcome(outcome), markup=False, soft_wrap=True)
            self._show_whole()

    def _show_whole(self) -> None:
        fraction, words = self._tally.fraction, self._tally.describe()
        self._display.update(self._whole, completed=fraction, done=words)


class _Lines:
    """Prints a line when a cell ends, and now and then one about those that run."""

    pause = SECONDS_BETWEEN_LINES

    def __init__(self, console: Console, tally: Tally) -> None:
        self._console, self._tally = console, tally
        self._lock = threading.Lock()
        self._running: dict[str, str] = {}
        self._last = time.monotonic()

    def on_cell_start(self, cell: Cell) -> None:
        with self._lock:
            self._running[cell.name] = f"{describe_cell(cell)} starting"

    def on_cell_restart(self, cell: Cell, why: str) -> None:
        with self._lock:
            self._print(_format_restart(cell, why))

    def on_cell_progress(self, cell: Cell, rounds: int, scores: dict[str, float]) -> None:
        with self._lock:
            self._tally.record_progress(cell, rounds)
            self._running[cell.name] = (
                f"{describe_cell(cell)} round {rounds}/{cell.config.run.rounds}"
            )
            if time.monotonic() - self._last > self.pause:
                self._print(f"running: {'; '.join(self._running.values())}")

    def on_cell_end(self, outcome: Outcome) -> None:
        with self._lock:
            self._tally.conclude(outcome)
            self._running.pop(outcome.cell.name, None)
            self._print(_format_outcome(outcome))

    def _print(self, text: str) -> None:
        self._last = time.monotonic()
        line = f"[{self._tally.describe()}{self._tally.time_left}] {text}"
        self._console.print(line, markup=False, soft_wrap=True)


class _Notebook(_Lines):
    """One output of a notebook, replaced as the sweep goes; it needs no widgets."""

    pause = SECONDS_BETWEEN_UPDATES

    def __init__(self, console: Console, tally: Tally) -> None:
        from IPython.display import display

        super().__init__(console, tally)
        self._handle = display({"text/html": self._bar("")}, raw=True, display_id=True)

    def _print(self, text: str) -> None:
        self._last = time.monotonic()
        if self._handle is not None:
            self._handle.update({"text/html": self._bar(text)}, raw=True)

    def _bar(self, text: str) -> str:
        tally = self._tally
        words = html.escape(f"{tally.describe()}{tally.time_left}")
        return f'<progress value="{tally.fraction:.3f}"></progress> {words}. {html.escape(text)}'


def describe_cell(cell: Cell) -> str:
    words = [method_title(cell.config.method.name), cell.label, f"seed {cell.config.run.seed}"]
    return ", ".join(word for word in words if word)


def _format_scores(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{stage} {value:.4f}" for stage, value in scores.items())


def _format_restart(cell: Cell, why: str) -> str:
    return f"{describe_cell(cell)}: {why}; started again from its last checkpoint"


def _format_outcome(outcome: Outcome) -> str:
    words = f"{describe_cell(outcome.cell)}: {outcome.ending} in {format_duration(outcome.seconds)}"
    return f"{words}. {outcome.message}" if outcome.message else words
