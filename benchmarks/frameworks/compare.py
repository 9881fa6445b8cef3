"""Others, each in a throw-away environment of its own, in turns with Quiver on the same work.

FedAvg of the works A and B is timed by the round. One FedRep run is compared as a whole: what a
user would pick instead, with the lines of code that this user writes.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.child import environment
from benchmarks.clock import Kind
from benchmarks.figures import Figure, ratio

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent / ".frameworks"
REPEATS, ROUNDS, WORKS = 2, 2, ("A", "B")
PATIENCE = 1_800.0
"""Seconds after which a framework's process is given up."""


@dataclass(frozen=True)
class Framework:
    name: str
    requirements: tuple[str, ...]
    script: str | None = None
    fedrep: str | None = None
    torch: bool = True

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


JAX = ("jax==0.4.23", "jaxlib==0.4.23", "dm-haiku==0.0.11", "optax<0.2", "numpy<2", "scipy<1.13")
"""The last versions that FedJAX works with: it uses names that later ones no longer have."""
FRAMEWORKS = (
    Framework("FedJAX", ("fedjax", *JAX), "fedjax_work.py", torch=False),
    Framework("FedLab", ("fedlab",), "fedlab_work.py", "fedrep_fedlab.py"),
    Framework("Flower", ("flwr[simulation]",), "flower.py", "fedrep_flower.py"),
    Framework("fluke", ("fluke-fl",), fedrep="fedrep_fluke.py"),
    Framework("pfl-research", ("pfl",), "pfl_research.py", "fedrep_pfl.py"),
)
OWN, LOOP = "Quiver", "a loop of PyTorch"
FEDREP = {OWN: "fedrep_quiver.py", LOOP: "fedrep_pytorch.py"}
"""Scripts that run in the environment of the benchmarks themselves."""
BEGIN, END = "# A user's code begins.", "# A user's code ends."


def install() -> None:
    """Make the environments that are missing. The same torch as here, so that only they differ."""
    ENVIRONMENTS.mkdir(exist_ok=True)
    pins = ENVIRONMENTS / "constraints.txt"
    pins.write_text(f"torch=={torch.__version__.split('+')[0]}\n")
    for framework in FRAMEWORKS:
        if framework.ready.exists():
            continue
        print(f"installing {framework.requirements[0]} …", flush=True)
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
        steps = [[sys.executable, "-m", "venv", str(framework.folder)]]
        steps += [[*pip, "torch", "numpy"]] if framework.torch else []
        for step in [*steps, [*pip, *framework.requirements]]:
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode:
                framework.refusal.write_text(_last_words(done.stderr))
                shutil.rmtree(framework.folder, ignore_errors=True)
                break
        else:
            framework.ready.touch()


def figures(kind: Kind, threads: int, quick: bool) -> list[Figure]:
    """framework / ours: rounds of FedAvg on both works, and one FedRep run."""
    found = []
    for work in WORKS:
        ready = [framework for framework in FRAMEWORKS if framework.script]
        found += [_skipped(f"{work}: {f.name} / ours", f) for f in ready if not f.ready.exists()]
        ready = [framework for framework in ready if framework.ready.exists()]
        found += _in_turns(ready, work, kind, threads, quick)
    return [*sorted(found, key=lambda figure: figure.name), *_fedrep(threads, quick)]


def _skipped(name: str, framework: Framework) -> Figure:
    return Figure("frameworks", name, None, note=_reason(framework))


def _fedrep(threads: int, quick: bool) -> list[Figure]:
    """Processor time, memory and lines of one FedRep run, over Quiver's time."""
    runs: dict[str, list[dict[str, Any]]] = {}
    scripts = {name: (Path(sys.executable), script) for name, script in FEDREP.items()}
    missing: dict[str, Figure] = {}
    for framework in FRAMEWORKS:
        name = f"FedRep: {framework.name} / Quiver"
        if framework.fedrep and framework.ready.exists():
            scripts[framework.name] = (framework.folder / "bin" / "python", framework.fedrep)
        elif framework.fedrep:
            missing[framework.name] = _skipped(name, framework)
    for _ in range(1 if quick else REPEATS):
        for name, (python, script) in scripts.items():
            if name in missing:
                continue
            try:
                runs.setdefault(name, []).append(_call([str(python), str(HERE / script)], threads))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                if name == OWN:
                    raise
                note = str(error)
                missing[name] = Figure("fedrep", f"FedRep: {name} / Quiver", None, note=note)
    found = []
    for name, (_, script) in scripts.items():
        if name in missing:
            continue
        seconds = [run["seconds"] for run in runs[name]]
        details = {
            "version": runs[name][0]["version"],
            "megabytes": statistics.median(run["megabytes"] for run in runs[name]),
            "lines": count_lines(HERE / script),
            "accuracy": [run["accuracy"] for run in runs[name]],
            "seconds": seconds,
        }
        value = ratio(seconds, [run["seconds"] for run in runs[OWN]])
        found.append(Figure("fedrep", f"FedRep: {name} / Quiver", value, details=details))
    return [*found, *missing.values()]


def count_lines(script: Path) -> int:
    """Lines that a user writes: imports and comments among them, empty lines not."""
    text = script.read_text().split(BEGIN, 1)[1].split(END, 1)[0]
    return sum(bool(line.strip()) for line in text.splitlines())


def _in_turns(
    frameworks: list[Framework], work: str, kind: Kind, threads: int, quick: bool
) -> list[Figure]:
    seconds: dict[str, list[float]] = {"ours": []}
    trouble: dict[str, str] = {}
    versions: dict[str, str] = {}
    for _ in range(1 if quick else REPEATS):
        seconds["ours"] += _play(Path(sys.executable), "ours.py", work, kind, threads)["seconds"]
        for framework in frameworks:
            if framework.name in trouble:
                continue
            try:
                python = framework.folder / "bin" / "python"
                found = _play(python, str(framework.script), work, kind, threads)
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


def _play(python: Path, script: str, work: str, kind: Kind, threads: int) -> dict[str, Any]:
    command = [str(python), str(HERE / script), work, "--rounds", str(ROUNDS)]
    return _call([*command, "--threads", str(threads), "--clock", kind], threads)


def _call(command: list[str], threads: int) -> dict[str, Any]:
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(threads), timeout=PATIENCE
    )
    if done.returncode:
        raise RuntimeError(f"{Path(command[1]).name} failed: {_last_words(done.stderr)}")
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
