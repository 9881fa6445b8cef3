"""Options that several commands share, each defined once."""

from __future__ import annotations

import enum
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from quiverfl.errors import QuiverError
from quiverfl.seeds import check_seeds
from quiverfl.sweeps.executor import CellNeeds, LocalPool, SweepExecutor
from quiverfl.sweeps.plan import Cell, Choice

if TYPE_CHECKING:
    from quiverfl.results.tables import ResultFiles

LOCAL_JOBS = 2


class Stage(enum.StrEnum):
    local = "local"
    mixed = "mixed"


class On(enum.StrEnum):
    local = "local"
    ray = "ray"
    slurm = "slurm"


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only print what would run, and how long it would take.")
]
Retry = Annotated[bool, typer.Option("--retry", help="Run cells that diverged once more.")]
Events = Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard event files too.")]


def _refuse_bring_back(given: bool) -> None:
    if given:
        raise QuiverError("--bring-back is now called --copy-results.")


@dataclass(frozen=True)
class SweepOptions:
    """Which cells run, where they run, and what is printed meanwhile."""

    jobs: Annotated[
        int | None,
        typer.Option(
            help=f"Cells at a time. This machine runs {LOCAL_JOBS} unless you say otherwise and "
            "splits its cores among them; a cluster runs as many as it has room for.",
            show_default=False,
        ),
    ] = None
    out: Annotated[
        Path, typer.Option(help="Folder to write to; sweeps in one folder share finished cells.")
    ] = Path("runs")
    methods: Annotated[
        str | None, typer.Option(help="Comma-separated methods, in place of those of the file.")
    ] = None
    seeds: Annotated[
        str | None,
        typer.Option(help="In place of the file's: 0,1,2, or 0-4, or 5 for the first five."),
    ] = None
    cases: Annotated[str | None, typer.Option(help="Semicolon-separated names of cases.")] = None
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Set section.key=value in every cell.")
    ] = None
    on: Annotated[
        On,
        typer.Option("--on", help="Processes of this machine, a Ray cluster, or a Slurm array."),
    ] = On.local
    address: Annotated[
        str,
        typer.Option(help="Ray: auto for this machine's cluster, HOST:PORT, or local."),
    ] = "local"
    cpus: Annotated[float, typer.Option(help="Ray and Slurm: cores per cell.")] = 1
    gpus: Annotated[float, typer.Option(help="Ray and Slurm: GPUs per cell.")] = 0
    memory: Annotated[
        bool,
        typer.Option("--memory/--no-memory", help="Ray and Slurm: reserve the memory cells need."),
    ] = True
    copy_results: Annotated[
        bool,
        typer.Option(
            "--copy-results", help="Ray: nodes share no folder; copy what cells write to this one."
        ),
    ] = False
    bring_back: Annotated[
        bool, typer.Option("--bring-back", hidden=True, callback=_refuse_bring_back)
    ] = False
    submit: Annotated[bool, typer.Option("--submit", help="Slurm: submit the script too.")] = False
    sbatch: Annotated[
        list[str] | None,
        typer.Option(help="Slurm: another option of sbatch, such as --time=12:00:00."),
    ] = None
    estimate: Annotated[
        bool,
        typer.Option("--estimate/--no-estimate", help="Estimate the time first, by short trials."),
    ] = True
    quiet: Quiet = False

    def choice(self, values: Sequence[str] = ()) -> Choice:
        """Return the chosen part of a sweep; `--set` wins over `values`."""
        return Choice(
            None if self.methods is None else split_words(self.methods, ","),
            None if self.seeds is None else parse_seeds(self.seeds),
            None if self.cases is None else split_words(self.cases, ";"),
            (*values, *(self.settings or ())),
        )

    def make_executor(self, cells: Sequence[Cell]) -> SweepExecutor:
        """Make the executor that `--on` names; refuse options that it would ignore."""
        uses = {
            "--address": (self.on is On.ray, self.address != "local"),
            "--copy-results": (self.on is On.ray, self.copy_results),
            "--submit": (self.on is On.slurm, self.submit),
            "--sbatch": (self.on is On.slurm, bool(self.sbatch)),
            "--cpus": (self.on is not On.local, self.cpus != 1),
            "--gpus": (self.on is not On.local, self.gpus != 0),
        }
        for option, (has_a_use, is_given) in uses.items():
            if is_given and not has_a_use:
                raise QuiverError(f"{option} has no meaning with --on {self.on}.")
        if self.on is On.local:
            return LocalPool(LOCAL_JOBS if self.jobs is None else self.jobs)
        if self.gpus and any(cell.config.run.device == "cpu" for cell in cells):
            raise QuiverError(
                f"--gpus {self.gpus:g}: cells would still compute on the CPU; add --set "
                "run.device=cuda."
            )
        from quiverfl.sweeps.estimate import memory_needed

        needs = CellNeeds(self.cpus, self.gpus, memory_needed if self.memory else lambda cells: {})
        if self.on is On.slurm:
            from quiverfl.sweeps.slurm import SlurmArray

            return SlurmArray(needs, self.jobs, self.submit, self.sbatch or ())
        from quiverfl.sweeps.ray_executor import RayCluster

        return RayCluster(self.address, needs, self.jobs, self.copy_results)


class ColumnChoice(enum.StrEnum):
    means = "means"
    all = "all"


@dataclass(frozen=True)
class ResultOptions:
    """Files of results that a command writes besides its own."""

    table: Annotated[
        list[Path] | None,
        typer.Option(help="Write methods × cases to a .md, .tex or .csv file; may be repeated."),
    ] = None
    columns: Annotated[
        ColumnChoice,
        typer.Option(help="Of --table: means and their spread, or every column and difference."),
    ] = ColumnChoice.means
    figure: Annotated[
        list[Path] | None,
        typer.Option(help="Draw learning curves into a .pdf, .svg or .png file; may be repeated."),
    ] = None
    bars: Annotated[
        list[Path] | None,
        typer.Option(help="Draw the results as bars, in the same formats; may be repeated."),
    ] = None

    def files(self) -> ResultFiles:
        """The files, checked: nothing else runs if one of them cannot be written."""
        from quiverfl.results.tables import ResultFiles  # late: it loads pandas

        files = ResultFiles(
            self.table or (), self.figure or (), self.bars or (), self.columns.value
        )
        files.check()
        if self.columns is ColumnChoice.all and not files.tables:
            raise QuiverError("--columns all: it is for --table; name a file with that, too.")
        return files


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of its parameters that are groups of options, in their places."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, tuple[type, list[inspect.Parameter]]] = {}
    listed: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        kind = parameter.annotation
        if not (isinstance(kind, type) and is_dataclass(kind)):
            listed.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(kind, include_extras=True)
        own = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )
            for field in fields(kind)
        ]
        groups[parameter.name] = (kind, own)
        listed += own

    @functools.wraps(command)
    def call_command(**values: Any) -> None:
        made = {
            name: kind(**{one.name: values.pop(one.name) for one in own})
            for name, (kind, own) in groups.items()
        }
        command(**made, **values)

    call_command.__dict__["__signature__"] = signature.replace(
        parameters=listed, return_annotation=None
    )
    call_command.__annotations__ = {one.name: one.annotation for one in listed}
    return call_command


def split_words(text: str, separator: str) -> list[str]:
    words = [word.strip() for word in text.split(separator) if word.strip()]
    if not words:
        raise QuiverError(f"{text!r}: name at least one, separated by {separator!r}.")
    return list(dict.fromkeys(words))


def parse_seeds(text: str) -> list[int]:
    """`0-4`, `0,2,7` or `5`, which is the first five; that is said, since it could be the fifth."""
    try:
        seeds = check_seeds(text)
    except QuiverError as error:
        raise QuiverError(f"--{error}") from None
    if text.strip().isdecimal():
        print(f"note: --seeds {text.strip()}: the seeds {', '.join(map(str, seeds))}.",
              file=sys.stderr)  # fmt: skip
    return seeds
