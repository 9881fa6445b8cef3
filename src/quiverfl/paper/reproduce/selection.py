"""Which cells an item of the paper is made of."""

from __future__ import annotations

from quiverfl.paper.reproduce.catalogue import Item, section, sweep_file
from quiverfl.paper.reproduce.variants import with_equal_participation
from quiverfl.sweeps.plan import Cell, Choice, load_sweep


def item_cells(
    item: Item, scale: str, wanted: Choice, equal_participation: bool = False
) -> list[Cell]:
    """The item's cells: what it shows of its sweep, unless something else was asked for."""
    cells = load_sweep(sweep_file(item, scale), wanted, section(scale)).cells
    if wanted.methods is None and item.methods is not None:
        cells = tuple(cell for cell in cells if cell.config.method.name in item.methods)
    if wanted.cases is None and item.cases is not None:
        shown = tuple(cell for cell in cells if cell.case in item.cases)
        cells = shown or cells  # a scale of your own has other cases
    if equal_participation:
        return [with_equal_participation(cell) for cell in cells]
    return list(cells)
