"""What is shown while many cells run: bars on a terminal, one line that changes in a notebook,
plain lines elsewhere, or nothing."""

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

from quiverfl.callbacks.progress import WIDTH_FOR_A_BAR
from quiverfl.methods import method_title
from quiverfl.results import numbers
from quiverfl.sweeps.plan import Cell
from quiverfl.sweeps.where import Outcome, Watcher

SECONDS_BETWEEN_LINES = 30.0
SECONDS_BETWEEN_UPDATES = 1.0


@contextlib.contextmanager
def overview(
    cells: Sequence[Cell], seconds: Mapping[str, float | None], quiet: bool
) -> Iterator[Watcher]:
    """A watcher that shows what it is told; `seconds` are estimates by the name of the cell."""
    console = Console(stderr=True, highlight=False)
    account = Account(cells, seconds)
    if quiet:
        yield _Nothing()
    elif console.is_jupyter:
        yield _Notebook(console, account)
    elif console.is_terminal:
        with Progress(*columns(console.width), console=console) as display:
            yield _Bars(display, account)
    else:
        yield _Lines(console, account)


def columns(width: int) -> list[ProgressColumn]:
    """Rounds and times first and whole; names, scores and a bar share what is left."""

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
    """Whose line it is and how it is doing, as far as there is room."""

    def render(self, task: Task) -> Text:
        words = Text.from_markup(f"{task.description}  {task.fields['score']}")
        words.no_wrap, words.overflow = True, "ellipsis"
        return words


class Account:
    """How much of the work is done. A cell weighs what it was estimated at."""

    def __init__(self, cells: Sequence[Cell], seconds: Mapping[str, float | None]) -> None:
        self.count, self.ended, self.failed = len(cells), 0, 0
        known = [value for value in seconds.values() if value]
        usual = sum(known) / len(known) if known else 1.0
        self._weights = {cell.name: seconds.get(cell.name) or usual for cell in cells}
        self._shares: dict[str, float] = {}
        self._first: dict[str, int] = {}
        self._begin = time.monotonic()

    def progressed(self, cell: Cell, rounds: int) -> None:
        """A resumed cell begins at its first round here, not at zero."""
        first = self._first.setdefault(cell.name, rounds - 1)
        left = max(1, cell.config.run.rounds - first)
        self._shares[cell.name] = max(0, rounds - first) / left

    def over(self, outcome: Outcome) -> None:
        self._shares[outcome.cell.name] = 1.0
        self.ended += 1
        self.failed += outcome.ending != "finished"

    @property
    def share(self) -> float:
        done = sum(share * self._weights[name] for name, share in self._shares.items())
        return done / max(sum(self._weights.values()), 1e-9)

    @property
    def left(self) -> str:
        """In words, from the pace so far."""
        if self.share < 0.01:
            return ""
        elapsed = time.monotonic() - self._begin
        return f", about {numbers.duration(elapsed * (1 / self.share - 1))} left"

    def words(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.ended} of {self.count} cells{failed}"


class _Nothing:
    def started(self, cell: Cell) -> None:
        pass

    def restarted(self, cell: Cell, why: str) -> None:
        pass

    def progressed(self, cell: Cell, rounds: int, scores: dict[str, float]) -> None:
        pass

    def ended(self, outcome: Outcome) -> None:
        pass


class _Bars:
    """One bar for the whole and one for each cell that runs."""

    def __init__(self, display: Progress, account: Account) -> None:
        self._display, self._account = display, account
        self._lock = threading.Lock()
        self._whole = display.add_task("[bold]all cells", total=1.0, done=account.words(), score="")
        self._tasks: dict[str, TaskID] = {}

    def started(self, cell: Cell) -> None:
        with self._lock:
            self._tasks[cell.name] = self._display.add_task(
                escape(describe(cell)),
                total=cell.config.run.rounds,
                done=f"0/{cell.config.run.rounds}",
                score="",
            )

    def restarted(self, cell: Cell, why: str) -> None:
        with self._lock:
            self._display.print(restart_words(cell, why), markup=False, soft_wrap=True)

    def progressed(self, cell: Cell, rounds: int, scores: dict[str, float]) -> None:
        with self._lock:
            self._account.progressed(cell, rounds)
            done = f"{rounds}/{cell.config.run.rounds}"
            self._display.update(
                self._tasks[cell.name], completed=rounds, done=done, score=score_words(scores)
            )
            self._show_whole()

    def ended(self, outcome: Outcome) -> None:
        with self._lock:
            self._account.over(outcome)
            self._display.remove_task(self._tasks.pop(outcome.cell.name))
            if outcome.ending != "finished":
                self._display.print(ending_words(outcome), markup=False, soft_wrap=True)
            self._show_whole()

    def _show_whole(self) -> None:
        share, words = self._account.share, self._account.words()
        self._display.update(self._whole, completed=share, done=words)


class _Lines:
    """A line when a cell ends, and now and then one about those that run."""

    pause = SECONDS_BETWEEN_LINES

    def __init__(self, console: Console, account: Account) -> None:
        self._console, self._account = console, account
        self._lock = threading.Lock()
        self._running: dict[str, str] = {}
        self._last = time.monotonic()

    def started(self, cell: Cell) -> None:
        with self._lock:
            self._running[cell.name] = f"{describe(cell)} starting"

    def restarted(self, cell: Cell, why: str) -> None:
        with self._lock:
            self._say(restart_words(cell, why))

    def progressed(self, cell: Cell, rounds: int, scores: dict[str, float]) -> None:
        with self._lock:
            self._account.progressed(cell, rounds)
            self._running[cell.name] = f"{describe(cell)} round {rounds}/{cell.config.run.rounds}"
            if time.monotonic() - self._last > self.pause:
                self._say(f"running: {'; '.join(self._running.values())}")

    def ended(self, outcome: Outcome) -> None:
        with self._lock:
            self._account.over(outcome)
            self._running.pop(outcome.cell.name, None)
            self._say(ending_words(outcome))

    def _say(self, text: str) -> None:
        self._last = time.monotonic()
        line = f"[{self._account.words()}{self._account.left}] {text}"
        self._console.print(line, markup=False, soft_wrap=True)


class _Notebook(_Lines):
    """One output of the cell of a notebook, replaced as the sweep goes; it needs no widgets."""

    pause = SECONDS_BETWEEN_UPDATES

    def __init__(self, console: Console, account: Account) -> None:
        from IPython.display import display

        super().__init__(console, account)
        self._handle = display({"text/html": self._bar("")}, raw=True, display_id=True)

    def _say(self, text: str) -> None:
        self._last = time.monotonic()
        if self._handle is not None:
            self._handle.update({"text/html": self._bar(text)}, raw=True)

    def _bar(self, text: str) -> str:
        account = self._account
        words = html.escape(f"{account.words()}{account.left}")
        return f'<progress value="{account.share:.3f}"></progress> {words}. {html.escape(text)}'


def describe(cell: Cell) -> str:
    words = [method_title(cell.config.method.name), cell.label, f"seed {cell.config.run.seed}"]
    return ", ".join(word for word in words if word)


def score_words(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{stage} {value:.4f}" for stage, value in scores.items())


def restart_words(cell: Cell, why: str) -> str:
    return f"{describe(cell)}: {why}; started again from its last checkpoint"


def ending_words(outcome: Outcome) -> str:
    words = f"{describe(outcome.cell)}: {outcome.ending} in {numbers.duration(outcome.seconds)}"
    return f"{words}. {outcome.message}" if outcome.message else words
