"""Imports go downward only, and `import quiverfl` loads nothing optional."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import quiverfl

ROOT = Path(quiverfl.__file__).parent

LAYERS = [
    {"errors"},
    {"support"},
    {"types", "trees", "options", "identity"},
    {"seeds", "training", "objectives"},
    {"task"},
    {"models", "methods", "topologies", "data"},
    {"transforms"},
    {"results"},
    {"engine"},
    {"clock"},
    {"runs"},
    {"distributed", "peer", "sweeps"},
    {"laws"},
    {"paper"},
    {"cli"},
    {"__main__"},
]
"""Rooms, from the bottom to the top. A room imports from those below it."""

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


class Import(NamedTuple):
    source: str
    target: str
    late: bool
    """Whether it stands in a function, or is there for type checkers alone."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in ROOT.rglob("*.py") if "templates" not in path.parts}
"""The empty name is the package itself, which imports every room for its public names."""


def list_imports(source: str, text: str) -> Iterator[Import]:
    """Every import of this package in a module, in whatever form it is written."""
    tree = ast.parse(text)
    eager = set(_eager(tree.body))
    package = source if MODULES.get(source, Path()).name == "__init__.py" else _parent(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join(["quiverfl", *filter(None, above), *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "quiverfl":
                yield Import(source, _module_of(name), node not in eager)


def _eager(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        for field in ("body", "orelse", "handlers", "finalbody"):
            yield from _eager(getattr(node, field, []))


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _module_of(name: str) -> str:
    """The module that `quiverfl.a.b.name` stands for or lies in."""
    name = name.removeprefix("quiverfl").removeprefix(".")
    while name and name not in MODULES:
        name = _parent(name)
    return name


IMPORTS = [
    found for name, path in MODULES.items() for found in list_imports(name, path.read_text())
]


def room(module: str) -> str:
    return module.split(".")[0]


def test_imports_go_downward_only() -> None:
    wrong = [
        f"{source} imports {target}"
        for source, target, _ in IMPORTS
        if source and target and room(source) != room(target)
        if LEVEL[room(target)] >= LEVEL[room(source)]
    ]
    assert not wrong


@pytest.mark.parametrize(
    "line",
    [
        "from quiverfl.engine import shard",
        "from quiverfl.engine.shard import Shard",
        "import quiverfl.engine.shard",
        "import quiverfl.engine.shard as shard",
        "from ..engine import shard",
        "from ..engine.shard import Shard",
        "def work():\n    from quiverfl.engine.shard import Shard",
        "if TYPE_CHECKING:\n    from quiverfl.engine.shard import Shard",
    ],
)
def test_the_test_sees_every_form_of_import(line: str) -> None:
    assert "engine.shard" in {target for _, target, _ in list_imports("data.dataset", line)}


def test_the_package_itself_is_imported_for_its_version_alone() -> None:
    """`quiverfl.simulate` in a module would be an import of every room."""
    for name, path in MODULES.items():
        if not name:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "quiverfl" and not node.level:
                names = {alias.name for alias in node.names}
                modules = {n for n in names if n in MODULES}
                assert names - modules <= {"__version__"}, (name, names)
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "quiverfl"
            ):
                assert node.attr in {"__version__", "__all__", "__file__"}, (name, node.attr)


def cycles(edges: set[tuple[str, str]]) -> list[list[str]]:
    """Strongly connected components of more than one module."""
    import networkx as nx

    graph = nx.DiGraph(list(edges))
    return [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]


def test_modules_import_each_other_in_no_circle() -> None:
    eager = {(source, target) for source, target, late in IMPORTS if not late}
    assert not cycles({(a, b) for a, b in eager if a and b and a != b})


def test_late_imports_close_no_circle_between_rooms() -> None:
    edges = {(room(s), room(t)) for s, t, _ in IMPORTS if s and t}
    assert not cycles({(a, b) for a, b in edges if a != b})


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
    concrete = {kind.__module__.removeprefix("quiverfl.") for kind in quiverfl.METHODS.values()}
    concrete |= {"methods.blocks", "methods.push_sum"}
    wrong = [f for f in IMPORTS if room(f.source) == "engine" and f.target in concrete]
    assert not wrong


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


def test_the_version_is_told_without_torch() -> None:
    code = "import quiverfl.cli.main, quiverfl.distributed.processes, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "numpy"} & set(loaded)
