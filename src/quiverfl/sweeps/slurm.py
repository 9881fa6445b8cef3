"""Run cells as the tasks of a Slurm array: write a script that you can read, change and submit.

Slurm places the tasks and restarts those whose node has died from their last checkpoint. Quiver
does not wait for them: the same command later reports how far they are, and makes the tables.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from quiverfl.errors import QuiverError
from quiverfl.support.durable import replace_file
from quiverfl.sweeps.executor import (
    CellNeeds,
    Outcome,
    Watcher,
    check_jobs,
    make_folders,
    make_order,
)
from quiverfl.sweeps.plan import Cell, SweepFolder

SECONDS_TO_SUBMIT = 60


class SlurmArray:
    """Writes the script, and submits it with `submit`."""

    def __init__(
        self,
        needs: CellNeeds,
        jobs: int | None = None,
        submit: bool = False,
        options: Sequence[str] = (),
    ) -> None:
        check_jobs(jobs)
        if submit and shutil.which("sbatch") is None:
            raise QuiverError(
                "--submit: there is no sbatch on this machine; run this on a machine of the Slurm "
                "cluster, or leave --submit out and submit the script that is written there."
            )
        for option in options:
            if not option.startswith("-") or "\n" in option:
                raise QuiverError(f"--sbatch {option!r}: write an option of sbatch: --time=12:00.")
        self._needs, self._jobs, self._submit, self._options = needs, jobs, submit, options
        self.at_a_time = jobs or 1
        self.threads = needs.threads
        self.submission = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(
        self,
        cells: Sequence[Cell],
        folder: SweepFolder,
        watcher: Watcher,
        until: Mapping[str, int] | None = None,
    ) -> list[Outcome]:
        if until is not None:
            raise QuiverError(
                "quiver tune with [tuning] cannot be handed to Slurm: which tries continue is "
                "decided while they run, and nothing waits for an array. Use --on local or --on "
                "ray, or leave [tuning] out."
            )
        make_folders(folder)
        folder = SweepFolder(folder.root.resolve())
        name = hashlib.sha256("\n".join(cell.name for cell in cells).encode()).hexdigest()[:8]
        orders = folder.root / "slurm" / f"cells-{name}.jsonl"
        orders.parent.mkdir(exist_ok=True)
        replace_file(orders, b"".join(_order_line(cell, folder, self.threads) for cell in cells))
        script = orders.with_suffix(".sh")
        replace_file(script, self._script(cells, orders).encode(), 0o755)
        hint = "the same command says later how far they are, and makes the tables."
        self.submission = f"{script} runs {len(cells)} cells: submit it with sbatch; {hint}"
        if self._submit:
            self.submission = f"{_submit(script)}: {len(cells)} cells; {hint}"
        return []

    def _script(self, cells: Sequence[Cell], orders: Path) -> str:
        memory = self._needs.memory(cells)
        limit = f"%{self._jobs}" if self._jobs else ""
        lines = [
            "--job-name=quiver",
            f"--array=0-{len(cells) - 1}{limit}",
            "--ntasks=1",
            f"--cpus-per-task={self.threads}",
            *([f"--gpus-per-task={math.ceil(self._needs.gpus)}"] if self._needs.gpus else []),
            *([f"--mem={-(-max(memory.values()) // 2**20)}M"] if memory else []),
            f"--chdir={Path.cwd()}",
            f"--output={orders.parent}/%A_%a.out",
            "--open-mode=append",
            "--requeue",
            "--signal=B:TERM@60",
            *self._options,
        ]
        command = [sys.executable, "-m", "quiverfl.sweeps.job", str(orders)]
        return "\n".join(
            [
                "#!/bin/sh",
                *(f"#SBATCH {line}" for line in lines),
                f"export OMP_NUM_THREADS={self.threads}",
                f'exec {shlex.join(command)} "$SLURM_ARRAY_TASK_ID"',
                "",
            ]
        )


def _order_line(cell: Cell, folder: SweepFolder, threads: int) -> bytes:
    order = make_order(cell, folder, threads)
    more = {"root": str(folder.root), "case": cell.case, "point": cell.point}
    return (json.dumps({**order, **more}) + "\n").encode()


def _submit(script: Path) -> str:
    """Submit the script and return what sbatch says, such as the number of the job."""
    try:
        done = subprocess.run(
            ["sbatch", str(script)], capture_output=True, text=True, timeout=SECONDS_TO_SUBMIT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise QuiverError(
            f"sbatch {script}: {error}. The script can be submitted later."
        ) from error
    if done.returncode:
        reason = (done.stderr or done.stdout).strip() or f"it ended with code {done.returncode}"
        raise QuiverError(f"sbatch {script}: {reason}. The script can be changed and submitted.")
    return done.stdout.strip()
