"""Options that several commands share, each defined once."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from quiverfl.errors import QuiverError
from quiverfl.sweeps.executor import CellNeeds, LocalPool, SweepExecutor
from quiverfl.sweeps.plan import Cell, Choice

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
        str | None, typer.Option(help="Comma-separated seeds, in place of those of the file.")
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


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of SweepOptions as options, in place of its `options`."""
    signature = inspect.signature(command, eval_str=True)
    hints = get_type_hints(SweepOptions, include_extras=True)
    shared = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(SweepOptions)
    ]
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
        if parameter.name != "options"
    ]

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        options = SweepOptions(**{one.name: values.pop(one.name) for one in shared})
        command(options=options, **values)

    expanded.__dict__["__signature__"] = signature.replace(
        parameters=[own[0], *shared, *own[1:]], return_annotation=None
    )
    expanded.__annotations__ = {one.name: one.annotation for one in (*own, *shared)}
    return expanded


def split_words(text: str, separator: str) -> list[str]:
    words = [word.strip() for word in text.split(separator) if word.strip()]
    if not words:
        raise QuiverError(f"{text!r}: name at least one, separated by {separator!r}.")
    return list(dict.fromkeys(words))


def parse_seeds(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise QuiverError(f"--seeds {text!r}: write whole numbers, such as 0,1,2.") from None
