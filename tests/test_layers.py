"""Imports go downward only, and `import quiverfl` loads nothing optional."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import quiverfl

ROOT = Path(quiverfl.__file__).parent

LAYERS = [
    {"errors", "memory", "card", "field_texts"},
    {"durable", "bundled", "locks", "extras", "references", "experiment_keys", "provenance"},
    {"native"},
    {"seeds", "trees", "training"},
    {"objectives"},
    {"task", "models"},
    {"methods", "topologies", "data"},
    {"transforms"},
    {"engine", "results"},
    {"callbacks"},
    {"config", "run_lines"},
    {"run_folder"},
    {"experiment", "device_check"},
    {"saved_runs"},
    {"export", "comparison"},
    {"distributed"},
    {"peer"},
    {"sweeps"},
    {"paper"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
BESIDE = {
    ("engine", "results"): {
        "results.summary",  # pure functions of data frames
        "results.learning_curves",  # run.plot(), late
    },
    ("engine", "callbacks"): {"callbacks.progress"},  # simulate(progress=True), late
    ("engine", "saved_runs"): {"saved_runs"},  # run.save(), late
    ("results", "engine"): set(),
    ("results", "methods"): set(),
    ("results", "data"): set(),
    ("results", "task"): set(),
    ("topologies", "data"): set(),
    ("topologies", "methods"): set(),
    ("methods", "topologies"): set(),
    ("methods", "data"): set(),
    ("data", "topologies"): set(),
    ("data", "methods"): set(),
    ("data", "models"): set(),
    ("models", "task"): set(),
    ("task", "models"): set(),
}
"""What may be imported between rooms of one level, or against a rule of the design."""


def imports(path: Path) -> set[str]:
    """Modules of this package that a file names, without the package's own name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quiverfl."):
            found.add((node.module or "").removeprefix("quiverfl."))
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            found |= {n.removeprefix("quiverfl.") for n in names if n.startswith("quiverfl.")}
    return found


def test_imports_go_downward_only() -> None:
    wrong = []
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room in ("__init__", "templates"):  # templates are a person's own code, once written
            continue
        for module in imports(path):
            target = module.split(".")[0]
            if target == room:
                continue
            allowed = BESIDE.get((room, target))
            if (allowed is not None and module not in allowed) or (
                allowed is None and LEVEL[target] >= LEVEL[room]
            ):
                wrong.append(f"{path.name}: {room} → {module}")
    assert not wrong


def test_no_module_name_occurs_twice() -> None:
    """Commands have the names of what they drive."""
    library = [path for path in ROOT.rglob("*.py") if path.parent.name != "cli"]
    names = Counter(path.stem for path in library if path.stem != "__init__")
    assert not [name for name, count in names.items() if count > 1]


def test_every_layer_exists() -> None:
    rooms = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert rooms - {"__init__", "__pycache__", "templates"} == set(LEVEL)


def test_topologies_need_no_torch() -> None:
    for path in (ROOT / "topologies").rglob("*.py"):
        names = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
        }
        assert "torch" not in names, path


def test_the_engine_names_no_concrete_method() -> None:
    concrete = {kind.__module__.rpartition(".")[2] for kind in quiverfl.METHODS.values()}
    concrete |= {"pushsum", "server", "parts", "sharpness", "masks"}
    for path in (ROOT / "engine").rglob("*.py"):
        for module in imports(path):
            assert module.split(".")[-1] not in concrete, (path, module)


def test_methods_have_no_device_no_logging_no_loop_over_clients() -> None:
    for path in (ROOT / "methods").glob("*.py"):
        text = path.read_text()
        for word in ("logging", "print(", ".cuda(", "for client", "torch.manual_seed"):
            assert word not in text, (path, word)


def test_importing_the_package_loads_nothing_optional() -> None:
    code = "import quiverfl, sys; print(' '.join(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    optional = {"matplotlib", "grpc", "ray", "sklearn", "cryptography", "tensorboard", "typer"}
    assert not optional & {name.split(".")[0] for name in loaded}


def test_the_command_line_starts_without_matplotlib_and_grpc() -> None:
    code = "import quiverfl.cli.main, sys; print(' '.join(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"matplotlib", "grpc", "sklearn"} & {name.split(".")[0] for name in loaded}
