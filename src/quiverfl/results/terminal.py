"""Tables in a terminal: as much beside each other as its width allows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.text import Text

from quiverfl.results.groups import Group
from quiverfl.results.summary import STAGES
from quiverfl.results.table_formats import Table, rich
from quiverfl.results.tables import comparison_table, cost_table, difference_table, reference_of


def print_comparison(console: Console, groups: Sequence[Group], stage: str = "local") -> None:
    """The comparison with the named stage first, and once below it what the numbers are."""
    stages = (stage, *(other for other in STAGES if other != stage))
    whole = comparison_table(groups, stages=stages)
    costs = cost_table(groups)
    choices = [
        [whole],
        [comparison_table(groups, stages=stages, cost=False), costs],
        [*(comparison_table(groups, stages=[one], cost=False) for one in stages), costs],
    ]
    for table in next((c for c in choices if _fits(console, c)), choices[-1]):
        console.print(rich(table, caption=False))
    console.print(Text(whole.caption, style="dim"))


def print_differences(console: Console, groups: Sequence[Group], stage: str = "local") -> None:
    """How sure the differences are, where there are seeds to say it."""
    found = reference_of(groups)
    if found is None:
        return
    several, reference = found
    stages = (stage, *(other for other in STAGES if other != stage))
    whole = difference_table(several, reference, stages=stages)
    one_each = [difference_table(several, reference, stages=[one]) for one in stages]
    console.print()
    for table in [whole] if _fits(console, [whole]) else one_each:
        console.print(rich(table, caption=False))
    console.print(Text(whole.caption, style="dim"))


def _fits(console: Console, tables: Sequence[Table]) -> bool:
    unbounded = console.options.update(width=10_000)
    drawn = (rich(table, caption=False) for table in tables)
    return all(Measurement.get(console, unbounded, one).maximum <= console.width for one in drawn)
