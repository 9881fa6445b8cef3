"""Several methods on the same data, model and seeds."""

from __future__ import annotations

import contextlib
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from quiverfl.data.dataset import Dataset
from quiverfl.engine.history import Recorder
from quiverfl.errors import Diverged, QuiverError, suggest
from quiverfl.methods import METHODS, method_title
from quiverfl.results.formatting import make_file_name
from quiverfl.runs.config import Config, parse_config
from quiverfl.runs.config_files import load_config
from quiverfl.runs.experiment import DatasetCache, Experiment
from quiverfl.runs.folder import RunFolder
from quiverfl.runs.run import Run, SavedRun, format_last_scores
from quiverfl.seeds import check_seeds
from quiverfl.support import durable, locks, output_folders
from quiverfl.support.cards import ReprCard, format_thousands

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from quiverfl.results.curves import Against
    from quiverfl.results.formatting import Table
    from quiverfl.results.groups import Group
    from quiverfl.results.summary import Report
    from quiverfl.results.tables import Columns
    from quiverfl.types import Stage


AnyRun = Run | SavedRun | Path | str
Cells = list[tuple[str, Config]]
Result = TypeVar("Result")


def make_cells(config: Config, methods: Sequence[str], seeds: Sequence[int]) -> Cells:
    """Make one configuration for each method and seed, by a name that a folder can have."""
    names, numbers = list(dict.fromkeys(methods)), list(dict.fromkeys(seeds))
    return [_cell(config, name, seed, len(numbers) > 1) for name in names for seed in numbers]


def _cell(config: Config, name: str, seed: int, several: bool) -> tuple[str, Config]:
    cell = config.for_method(name).with_values([("run.seed", seed)])
    label = make_file_name(name)
    return (f"{label}-seed{seed}" if several else label), cell


def plan_comparison(
    config: Config,
    methods: Sequence[str],
    seeds: Sequence[int],
    folder: Path | None,
    dataset: Dataset | None = None,
) -> Cells:
    """Make the cells of a comparison and refuse what cannot run, before the first one starts."""
    cells = make_cells(config, methods, seeds)
    if folder is not None:
        check_folder(config, cells, folder)
    check_cells(cells, folder, dataset)
    return cells


def run_comparison(
    cells: Cells, run: Callable[[str, Config], Result]
) -> tuple[dict[str, Result], dict[str, Diverged]]:
    """Run all cells. One that diverges does not stop the rest; its error is returned."""
    results: dict[str, Result] = {}
    diverged: dict[str, Diverged] = {}
    for label, cell in cells:
        try:
            results[label] = run(label, cell)
        except Diverged as error:
            diverged[label] = error.with_traceback(None)  # a traceback would keep every state alive
    return results, diverged


def check_cells(cells: Cells, folder: Path | None, dataset: Dataset | None = None) -> None:
    """Find a mistake in the last method before the first one has run."""
    datasets = DatasetCache()
    for label, cell in {cell.method.name: (label, cell) for label, cell in cells}.values():
        if folder is None or not RunFolder(folder / label).is_finished():
            data = datasets.take(cell) if dataset is None else dataset
            Experiment.of(cell, data).simulation.check()


def check_folder(config: Config, cells: Cells, folder: Path) -> None:
    """Refuse a folder with anything but runs of this comparison, before the first one starts.

    A comparison may get further methods and seeds; whatever else lies beside its runs stays.
    """
    for label, cell in cells:
        existing = RunFolder(folder / label)
        if existing.has_results():
            existing.check_config(cell)
        if not existing.holds_run():
            output_folders.refuse_foreign(folder / label, lambda _: False)
    output_folders.refuse_foreign(folder, lambda _: _holds_comparison(config, folder))


def _holds_comparison(config: Config, folder: Path) -> bool:
    return not output_folders.holds_run(folder) and any(
        _is_of_comparison(config, RunFolder(path)) for path in sorted(folder.iterdir())
    )


def _is_of_comparison(config: Config, folder: RunFolder) -> bool:
    """Whether a run differs from this configuration in nothing but its method and seed."""
    if not folder.holds_run():
        return False
    try:
        theirs = folder.config()
        _, expected = _cell(config, theirs.method.name, theirs.run.seed, several=True)
    except QuiverError:  # of another version, or a method whose code is not here
        return False
    return expected.identity() == theirs.identity()


def compare(
    experiment: Experiment | Config | Mapping[str, Any] | Path | str,
    methods: Sequence[str] | str = "all",
    seeds: Sequence[int] | None = None,
    folder: Path | str | None = None,
    callbacks: Sequence[Recorder] = (),
    progress: bool = False,
) -> Comparison:
    """Run several methods on the same data, model and seeds: in memory, or into a folder.

    `experiment` is one, a dictionary of sections, a TOML file, or a configuration's name. A method
    that diverges does not stop the rest: `diverged` has its message, `runs` how far it came.
    The folder is new, empty, or of this comparison, which is then continued.
    """
    config, dataset = _config(experiment)
    numbers = [config.run.seed] if seeds is None else check_seeds(seeds)
    top = None if folder is None else durable.to_path(folder, "compare: folder")
    cells = plan_comparison(config, check_methods(methods), numbers, top, dataset)
    datasets = DatasetCache()

    def run(label: str, cell: Config) -> Run:
        one = Experiment.of(cell, datasets.take(cell) if dataset is None else dataset)
        return one.run(None if top is None else top / label, callbacks, progress)

    with contextlib.nullcontext() if top is None else locks.lock_folder(top):
        runs, diverged = run_comparison(cells, run)
    unfinished = {label: error.run for label, error in diverged.items()}
    ordered = {label: (runs | unfinished)[label] for label, _ in cells}
    return Comparison(ordered, {label: str(error) for label, error in diverged.items()})


def _config(experiment: Any) -> tuple[Config, Dataset | None]:
    if isinstance(experiment, Experiment):
        return experiment.config, experiment.dataset
    if isinstance(experiment, Config):
        return experiment, None
    if isinstance(experiment, Mapping):
        return parse_config(experiment, "experiment"), None
    if isinstance(experiment, str | Path):
        return load_config(Path(experiment)), None
    raise QuiverError(
        f"compare takes a qv.Experiment, a dictionary of sections or a TOML file, not a "
        f"{type(experiment).__name__}."
    )


def check_methods(methods: Any) -> list[str]:
    names = list(METHODS) if methods == "all" else methods
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if not isinstance(name, str):
            raise QuiverError(f"methods: {name!r}: give names, such as 'dfedpgp'.")
        METHODS.find(name)
    names = [METHODS.resolve_alias(name) for name in names]
    if not names:
        raise QuiverError("methods: name at least one, or 'all'.")
    return names


class Results(ReprCard):
    """Runs beside each other: their numbers, methods × cases, figures and the report."""

    @abstractmethod
    def open_groups(self) -> AbstractContextManager[Sequence[Group]]:
        """The experiments; files of runs in memory are there as long as this is open."""

    @property
    def frame(self) -> pd.DataFrame:
        """One row per experiment: both stages (mean, spreads, worst tenth), bytes, seconds."""
        from quiverfl.results.scores import compare_groups

        with self.open_groups() as groups:
            return compare_groups(groups)

    def table(
        self,
        *files: Path | str,
        stage: Stage = "local",
        report: Report = "last",
        columns: Columns = "means",
    ) -> Table:
        """Methods × cases; `stage` comes first. Files end in .md, .tex or .csv.

        `report` says which rounds count: the last, the best or the mean of the last ten.
        `columns="all"` writes every column into the files, a table for each case.
        """
        from quiverfl.results.figures import check_stage
        from quiverfl.results.tables import ResultFiles, case_table, order_stages, write_results

        check_stage(stage)
        wanted = ResultFiles(tables=[Path(file) for file in files], columns=columns)
        wanted.check(("table:", "plot:", "plot:"))
        with self.open_groups() as groups:
            write_results(groups, wanted, stage, report)
            return case_table(groups, report, stages=order_stages(stage))

    def plot(
        self,
        *files: Path | str,
        kind: Literal["curves", "bars"] = "curves",
        stage: Stage | None = None,
        against: Against = "rounds",
        metric: str | None = None,
    ) -> Figure:
        """Learning curves or bars, at both stages or one. Files end in .pdf, .svg or .png."""
        from quiverfl.results import figures
        from quiverfl.results.curves import AGAINST
        from quiverfl.results.groups import name_alike, split_by_case
        from quiverfl.results.summary import STAGES
        from quiverfl.results.tables import ResultFiles

        stages = STAGES if stage is None else (figures.check_stage(stage),)
        places = [Path(file) for file in files]
        ResultFiles(figures=places).check(("table:", "plot:", "plot:"))
        if kind not in ("curves", "bars"):
            raise QuiverError(f"plot: kind = {kind!r}: it is 'curves' or 'bars'.")
        if against not in AGAINST:
            raise QuiverError(f"plot: against = {against!r}: {suggest(str(against), AGAINST)}")
        with self.open_groups() as groups:
            figures.check_metric([run.history for group in groups for run in group.runs], metric)
            if kind == "bars":
                figure = figures.plot_bars(groups, stages)
            else:
                rows = split_by_case(name_alike(groups))
                figure = figures.plot_curves(rows, stages, against, metric)
        for place in places:
            figures.save_figure(figure, place)
        return figure


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Results):
    """Runs side by side, by method and seed."""

    runs: dict[str, Run]
    diverged: dict[str, str] = field(default_factory=dict)

    def fields(self) -> dict[str, str]:
        scores = {
            label: ", ".join(f"{n} {v}" for n, v in format_last_scores(run.summary).items())
            for label, run in self.runs.items()
            if len(run.history)
        }
        return {"runs": format_thousands(len(self.runs)), **scores}

    def open_groups(self) -> AbstractContextManager[Sequence[Group]]:
        return group_by_comparison(list(self.runs.values()))

    def report(self, out: Path | str = "report.html", stage: str = "local") -> Path:
        return report(list(self.runs.values()), out, stage)


def report(
    runs: AnyRun | Sequence[AnyRun], out: Path | str = "report.html", stage: str = "local"
) -> Path:
    """The HTML page of `quiver report`, from runs or from folders of them; where it is."""
    from quiverfl.results.report.page import write_report
    from quiverfl.results.summary import STAGES

    if stage not in STAGES:
        raise QuiverError(f"stage {stage!r}: it is 'local' or 'mixed'.")
    with open_folders(runs) as folders:
        write_report(folders, Path(out), stage)
    return Path(out)


@contextmanager
def group_by_comparison(runs: AnyRun | Sequence[AnyRun]) -> Iterator[list[Group]]:
    from quiverfl.results.groups import group_runs
    from quiverfl.results.run_files import find_runs

    with open_folders(runs) as folders:
        yield group_runs(find_runs(folders))


@contextmanager
def open_folders(runs: AnyRun | Sequence[AnyRun]) -> Iterator[list[Path]]:
    """Give the folders of these runs; a run without one is written to a temporary folder."""
    if not isinstance(runs, Run | SavedRun | Path | str | Sequence):
        raise QuiverError(f"a {type(runs).__name__} is not a run: give runs, or folders of runs.")
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


def cell_title(cell: Config, several: bool) -> str:
    """Return the title of a cell, shown while it runs."""
    title = method_title(cell.method.name)
    return f"{title}, seed {cell.run.seed}" if several else title
