"""Several methods on the same data, model and seeds."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quiverfl.card import Shown, thousands
from quiverfl.config import Config, load_config, parse
from quiverfl.data.dataset import Dataset
from quiverfl.engine.history import Recorder
from quiverfl.engine.simulation_run import Run, last_scores
from quiverfl.errors import Diverged, QuiverError
from quiverfl.experiment import DataShelf, Experiment
from quiverfl.methods import METHODS, find_method, method_title
from quiverfl.results.output_files import file_name
from quiverfl.run_folder import RunFolder
from quiverfl.saved_runs import SavedRun

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from quiverfl.results.groups import Group

AnyRun = Run | SavedRun | Path | str
Cells = list[tuple[str, Config]]


def cells_of(config: Config, methods: Sequence[str], seeds: Sequence[int]) -> Cells:
    """One configuration for each method and seed, by a name that a folder can have."""
    names, numbers = list(dict.fromkeys(methods)), list(dict.fromkeys(seeds))
    return [_cell(config, name, seed, len(numbers) > 1) for name in names for seed in numbers]


def _cell(config: Config, name: str, seed: int, several: bool) -> tuple[str, Config]:
    cell = config.for_method(name).with_values([("run.seed", seed)])
    label = file_name(name)
    return (f"{label}-seed{seed}" if several else label), cell


def check_cells(cells: Cells, folder: Path | None, dataset: Dataset | None = None) -> None:
    """A mistake in the last method is found before the first one has run."""
    shelf = DataShelf()
    for label, cell in {cell.method.name: (label, cell) for label, cell in cells}.values():
        if folder is None or not RunFolder(folder / label).finished():
            found = shelf.take(cell) if dataset is None else dataset
            Experiment.of(cell, found).simulation.check()


def compare(
    experiment: Experiment | Config | Mapping[str, Any] | Path | str,
    methods: Sequence[str] | str = "all",
    seeds: Sequence[int] | int | None = None,
    folder: Path | str | None = None,
    callbacks: Sequence[Recorder] = (),
    progress: bool = False,
) -> Comparison:
    """Run several methods on the same data, model and seeds: in memory, or into a folder.

    `experiment` is one, a dictionary of sections, a TOML file, or a configuration's name. A method
    that diverges does not stop the others: `diverged` has its message, `runs` how far it came.
    """
    config, dataset = _config(experiment)
    numbers = _seeds(seeds, config.run.seed)
    cells = cells_of(config, _methods(methods), numbers)
    top = None if folder is None else Path(folder)
    check_cells(cells, top, dataset)
    shelf, runs, diverged = DataShelf(), {}, {}
    for label, cell in cells:
        found = shelf.take(cell) if dataset is None else dataset
        one = Experiment.of(cell, found)
        try:
            where = None if top is None else top / label
            runs[label] = one.run(where, callbacks, progress)
        except Diverged as error:
            runs[label], diverged[label] = error.run, str(error)
    return Comparison(runs, diverged)


def _config(experiment: Any) -> tuple[Config, Dataset | None]:
    if isinstance(experiment, Experiment):
        return experiment.config, experiment.dataset
    if isinstance(experiment, Config):
        return experiment, None
    if isinstance(experiment, Mapping):
        return parse(experiment, "experiment"), None
    if isinstance(experiment, str | Path):
        return load_config(Path(experiment)), None
    raise QuiverError(
        f"compare takes a qv.Experiment, a dictionary of sections or a TOML file, not a "
        f"{type(experiment).__name__}."
    )


def _methods(methods: Any) -> list[str]:
    names = list(METHODS) if methods == "all" else methods
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if not isinstance(name, str):
            raise QuiverError(f"methods: {name!r}: give names, such as 'dfedpgp'.")
        find_method(name)
    if not names:
        raise QuiverError("methods: name at least one, or 'all'.")
    return names


def _seeds(seeds: Any, own: int) -> list[int]:
    numbers = [own] if seeds is None else [seeds] if isinstance(seeds, int) else list(seeds)
    if not numbers or not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise QuiverError(f"seeds = {seeds!r}: give whole numbers, such as [0, 1, 2].")
    return numbers


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Shown):
    """Runs side by side, by method and seed."""

    runs: dict[str, Run]
    diverged: dict[str, str] = field(default_factory=dict)

    def facts(self) -> dict[str, str]:
        scores = {
            label: ", ".join(f"{n} {v}" for n, v in last_scores(run.summary).items())
            for label, run in self.runs.items()
            if len(run.history)
        }
        return {"runs": thousands(len(self.runs)), **scores}

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per method: both stages (mean, spreads, worst tenth), bytes, steps, seconds."""
        from quiverfl.results.scores import comparison

        with grouped(list(self.runs.values())) as groups:
            return comparison(groups)

    def plot(self, stage: str = "mixed", metric: str | None = None) -> Figure:
        """The learning curves of all runs at one stage."""
        from quiverfl.results.learning_curves import plot_runs

        return plot_runs({label: run.history for label, run in self.runs.items()}, stage, metric)

    def report(self, out: Path | str = "report.html", stage: str = "local") -> Path:
        return report(list(self.runs.values()), out, stage)


def report(
    runs: AnyRun | Sequence[AnyRun], out: Path | str = "report.html", stage: str = "local"
) -> Path:
    """The HTML page of `quiver report`, from runs or from folders of them; where it is."""
    from quiverfl.results.html_report import write_report
    from quiverfl.results.summary import STAGES

    if stage not in STAGES:
        raise QuiverError(f"stage {stage!r}: it is 'local' or 'mixed'.")
    with folders_of(runs) as folders:
        write_report(folders, Path(out), stage)
    return Path(out)


@contextmanager
def grouped(runs: AnyRun | Sequence[AnyRun]) -> Iterator[list[Group]]:
    from quiverfl.results.groups import group_runs
    from quiverfl.results.run_files import find_runs

    with folders_of(runs) as folders:
        yield group_runs(find_runs(folders))


@contextmanager
def folders_of(runs: AnyRun | Sequence[AnyRun]) -> Iterator[list[Path]]:
    """Folders of these runs; those that have none are written to a place that is soon gone."""
    several = [runs] if isinstance(runs, Run | SavedRun | Path | str) else list(runs)
    if not several:
        raise QuiverError("there are no runs: give at least one run or folder.")
    with tempfile.TemporaryDirectory(prefix="quiver-") as place:
        yield [_folder(run, Path(place) / f"run{number}") for number, run in enumerate(several)]


def _folder(run: Any, place: Path) -> Path:
    if isinstance(run, Run):
        return run.save(place)
    if isinstance(run, SavedRun):
        return run.path
    if isinstance(run, str | Path):
        return Path(run)
    raise QuiverError(f"a {type(run).__name__} is not a run: give runs, or folders of runs.")


def shown_title(cell: Config, several: bool) -> str:
    """What a cell is called while it runs."""
    title = method_title(cell.method.name)
    return f"{title}, seed {cell.run.seed}" if several else title
