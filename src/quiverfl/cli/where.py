"""Options that say where the cells of a sweep run."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated

import typer

from quiverfl.errors import QuiverError
from quiverfl.sweeps.plan import Cell
from quiverfl.sweeps.pool import LocalPool
from quiverfl.sweeps.where import Needs, Where

LOCAL_JOBS = 2


class On(enum.StrEnum):
    local = "local"
    ray = "ray"
    slurm = "slurm"


Jobs = Annotated[
    int | None,
    typer.Option(
        help=f"Cells at a time. On this machine {LOCAL_JOBS} unless given, and the cores are split "
        "among them; on a cluster as many as there is room for.",
        show_default=False,
    ),
]
Place = Annotated[
    On,
    typer.Option("--on", help="Processes of this machine, a Ray cluster, or a Slurm array script."),
]
Address = Annotated[
    str,
    typer.Option(help="Ray: auto for the cluster this machine is part of, HOST:PORT, or local."),
]
Cpus = Annotated[float, typer.Option(help="Ray and Slurm: cores of every cell.")]
Gpus = Annotated[float, typer.Option(help="Ray and Slurm: GPUs of every cell.")]
Memory = Annotated[
    bool,
    typer.Option("--memory/--no-memory", help="Ray and Slurm: ask for the memory cells need."),
]
BringBack = Annotated[
    bool,
    typer.Option("--bring-back", help="Ray: nodes share no folder; bring what cells write here."),
]
Submit = Annotated[bool, typer.Option("--submit", help="Slurm: also submit the script.")]
Sbatch = Annotated[
    list[str] | None, typer.Option(help="Slurm: a further option, such as --time=12:00:00.")
]


def chosen(
    on: On,
    cells: Sequence[Cell],
    jobs: int | None,
    address: str,
    cpus: float,
    gpus: float,
    memory: bool,
    bring_back: bool,
    submit: bool,
    sbatch: Sequence[str] | None,
) -> Where:
    """The place that the options name; options that it would not look at are refused."""
    given = {
        "--address": (on is On.ray, address != "local"),
        "--bring-back": (on is On.ray, bring_back),
        "--submit": (on is On.slurm, submit),
        "--sbatch": (on is On.slurm, bool(sbatch)),
        "--cpus": (on is not On.local, cpus != 1),
        "--gpus": (on is not On.local, gpus != 0),
    }
    for option, (has_a_use, is_given) in given.items():
        if is_given and not has_a_use:
            raise QuiverError(f"{option} has no meaning with --on {on}.")
    if on is On.local:
        return LocalPool(LOCAL_JOBS if jobs is None else jobs)
    if gpus and any(cell.config.run.device == "cpu" for cell in cells):
        raise QuiverError(
            f"--gpus {gpus:g}: cells would still compute on the CPU; add --set run.device=cuda."
        )
    from quiverfl.sweeps.memory_needed import memory_needed

    needs = Needs(cpus, gpus, memory_needed if memory else lambda cells: {})
    if on is On.slurm:
        from quiverfl.sweeps.slurm_array import SlurmArray

        return SlurmArray(needs, jobs, submit, sbatch or ())
    from quiverfl.sweeps.ray_cluster import RayCluster

    return RayCluster(address, needs, jobs, bring_back)
