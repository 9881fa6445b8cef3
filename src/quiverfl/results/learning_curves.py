"""Learning curves of runs that are at hand, without a folder."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from quiverfl.errors import QuiverError, nearest
from quiverfl.results import numbers
from quiverfl.results.figures import STYLE
from quiverfl.results.summary import STAGES, by_client, headline, mean_by_round

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_COLUMNS = ("round", "stage", "client")


class Curves(Figure):
    """A matplotlib figure that a notebook shows without further ado."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


def plot_run(history: pd.DataFrame, title: str, metric: str | None = None) -> Curves:
    """The mean over clients at both stages, with the quartiles of the clients."""
    metric = _metric([history], metric)
    with matplotlib.rc_context(STYLE):
        figure = Curves(figsize=(5.8, 3.5), layout="constrained")
        axes = figure.add_subplot()
        for stage in STAGES:
            values = by_client(history, stage, metric)
            if len(values):
                low, high = (values.quantile(share, axis=1) for share in (0.25, 0.75))
                rounds = values.index.to_numpy() + 1
                (line,) = axes.plot(rounds, mean_by_round(values), label=stage)
                axes.fill_between(rounds, low, high, color=line.get_color(), alpha=0.14, lw=0)
        _finish(axes, metric, title)
    return figure


def plot_runs(
    histories: Mapping[str, pd.DataFrame], stage: str = "mixed", metric: str | None = None
) -> Curves:
    """The mean over clients of several runs, at one stage."""
    if stage not in STAGES:
        raise QuiverError(f"stage {stage!r}: {nearest(stage, STAGES)}")
    metric = _metric(list(histories.values()), metric)
    with matplotlib.rc_context(STYLE):
        figure = Curves(figsize=(6.4, 3.8), layout="constrained")
        axes = figure.add_subplot()
        for label, history in histories.items():
            values = by_client(history, stage, metric)
            if len(values):
                axes.plot(values.index.to_numpy() + 1, mean_by_round(values), label=label)
        _finish(axes, metric, f"stage {stage}")
    return figure


def _metric(histories: list[pd.DataFrame], wanted: str | None) -> str:
    there = [history for history in histories if len(history)]
    if not there:
        raise QuiverError("nothing was evaluated: there are no learning curves to draw.")
    known = [name for name in there[0].columns if name not in _COLUMNS]
    if wanted is not None and wanted not in known:
        raise QuiverError(f"no metric {wanted!r}; {nearest(wanted, known)}")
    return headline(there[0]) if wanted is None else wanted


def _finish(axes: Axes, metric: str, title: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("rounds")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, steps=[1, 2, 5, 10]))
    if numbers.is_share(metric):
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axes.set_ylabel(f"test {metric}")
    if len(axes.lines):
        axes.legend()
