"""Others, each in a throw-away environment of its own, in turns with Quiver on the same work."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.child import environment
from benchmarks.figures import Figure, ratio

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent / ".frameworks"
REPEATS, ROUNDS = 2, 2
PATIENCE = 600.0
"""Seconds after which a framework's process is given up."""


@dataclass(frozen=True)
class Framework:
    name: str
    requirement: str
    script: str

    @property
    def folder(self) -> Path:
        return ENVIRONMENTS / self.name

    @property
    def ready(self) -> Path:
        """Written when the installation is complete."""
        return self.folder / "installed"

    @property
    def refusal(self) -> Path:
        """Written with the reason when the package index does not give it."""
        return ENVIRONMENTS / f"{self.name}.reason"


FRAMEWORKS = (
    Framework("pfl-research", "pfl", "pfl_research.py"),
    Framework("Flower", "flwr[simulation]", "flower.py"),
    Framework("FedLab", "fedlab", "fedlab_work.py"),
)


def install() -> None:
    """Make the environments that are missing. The same torch as here, so that only they differ."""
    ENVIRONMENTS.mkdir(exist_ok=True)
    pins = ENVIRONMENTS / "constraints.txt"
    pins.write_text(f"torch=={torch.__version__.split('+')[0]}\n")
    for framework in FRAMEWORKS:
        if framework.ready.exists():
            continue
        print(f"installing {framework.requirement} …", flush=True)
        shutil.rmtree(framework.folder, ignore_errors=True)
        framework.refusal.unlink(missing_ok=True)
        pip = [
            str(framework.folder / "bin" / "pip"),
            "install",
            "--quiet",
            "--constraint",
            str(pins),
        ]
        # torch first and alone: its own index entry decides which build fits the machine.
        steps = [[sys.executable, "-m", "venv", str(framework.folder)], [*pip, "torch", "numpy"]]
        for step in [*steps, [*pip, framework.requirement]]:
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode:
                framework.refusal.write_text(_last_words(done.stderr))
                shutil.rmtree(framework.folder, ignore_errors=True)
                break
        else:
            framework.ready.touch()


def figures(threads: int, quick: bool) -> list[Figure]:
    """framework / ours, training and aggregation of a round, for every framework and both works."""
    ready = [framework for framework in FRAMEWORKS if framework.ready.exists()]
    found = [
        Figure("frameworks", _name(framework, work), None, ">", 1.0, note=_reason(framework))
        for framework in FRAMEWORKS
        if framework not in ready
        for work in ("A", "B")
    ]
    for work in ("A", "B"):
        found += _in_turns(ready, work, threads, quick)
    return sorted(found, key=lambda figure: figure.name)


def _in_turns(frameworks: list[Framework], work: str, threads: int, quick: bool) -> list[Figure]:
    seconds: dict[str, list[float]] = {"ours": []}
    trouble: dict[str, str] = {}
    versions: dict[str, str] = {}
    for _ in range(1 if quick else REPEATS):
        seconds["ours"] += _play(Path(sys.executable), "ours.py", work, threads)["seconds"]
        for framework in frameworks:
            if framework.name in trouble:
                continue
            try:
                found = _play(framework.folder / "bin" / "python", framework.script, work, threads)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                trouble[framework.name] = str(error)
                continue
            versions[framework.name] = found["version"]
            seconds.setdefault(framework.name, []).extend(found["seconds"])
    return [
        Figure(
            "frameworks",
            _name(framework, work),
            None if framework.name in trouble else ratio(seconds[framework.name], seconds["ours"]),
            ">",
            1.0,
            note=trouble.get(framework.name, f"version {versions.get(framework.name)}"),
            details={"over": framework.name, "under": "ours", "seconds": seconds},
        )
        for framework in frameworks
    ]


def _play(python: Path, script: str, work: str, threads: int) -> dict[str, Any]:
    command = [str(python), str(HERE / script), work, "--rounds", str(ROUNDS)]
    done = subprocess.run(
        [*command, "--threads", str(threads)],
        capture_output=True,
        text=True,
        env=environment(threads),
        timeout=PATIENCE,
    )
    if done.returncode:
        raise RuntimeError(f"{script} failed: {_last_words(done.stderr)}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _name(framework: Framework, work: str) -> str:
    return f"{work}: {framework.name} / ours"


def _reason(framework: Framework) -> str:
    if framework.refusal.exists():
        return f"does not install: {framework.refusal.read_text()}"
    return "not installed: make bench-frameworks"


def _last_words(text: str) -> str:
    return (text.strip() or "no message").splitlines()[-1]
