"""A sweep: a TOML file → cells, each a whole configuration with a name made from its content.

    base = "base.toml"          # a configuration file beside this one, a preset's name, or a table
                                # [base.…]
    methods = ["dfedpgp", …]    # each with what [overrides.METHOD] of the configuration says
    seeds = [0, 1, 2]           # or "0-2", or 3

    [grid]                      # every combination of these; [[grid]] several times adds them up
    training.lr = [0.03, 0.1]

    [[case]]                    # named settings that belong together, laid over the base
    name = "CIFAR-10 Dir-0.3"
    data = { name = "cifar10", partition = "dirichlet", alpha = 0.3 }

    [[case]]
    name = "CIFAR-10 Pat-2"
    without = ["data.alpha"]    # keys of the base that this case takes out
    data = { name = "cifar10", partition = "pathological", classes_per_client = 2 }

    [scale.small]               # what stands in place of these keys when the sweep is asked for at
    base = "small.toml"         # this scale; `cases` are those that run unless asked
    cases = ["CIFAR-10 Dir-0.3"]

    [tuning]                    # how `quiver tune` races the tries (sweeps/tune.py)
    rungs = [0.25, 0.5]

A cell is the same cell wherever it comes from: sweeps that share a folder share finished runs.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from quiverfl.errors import QuiverError, suggest
from quiverfl.identity import flatten_settings
from quiverfl.results.formatting import write_result_file
from quiverfl.results.run_files import read_json
from quiverfl.runs.config import UNSET, Config, leave_topology_options, parse_config
from quiverfl.runs.config_files import SWEEP_KEYS, config_file, is_bundled, parse_setting, read_toml
from quiverfl.runs.folder import RunFolder
from quiverfl.seeds import check_seeds
from quiverfl.support import durable, output_folders
from quiverfl.topologies import TOPOLOGIES

Tree = dict[str, Any]
GridPoint = tuple[tuple[str, Any], ...]

KEYS = ("base", "methods", "seeds", "grid", "case")
KNOWN = SWEEP_KEYS
KNOWN_OF_SCALE = (*KEYS, "cases")
HASH_LETTERS = 12


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    config: Config
    case: str = ""
    """The name of its case, where the sweep has cases."""
    point: GridPoint = ()
    """Its place in the grid, apart from method and seed."""
    against: tuple[str, ...] = ()
    """Settings that contradict its case: it is no longer what its name says."""

    @property
    def name(self) -> str:
        """Readable in front, unique behind: the hash of everything that decides the result."""
        data = self.config.data
        options = "".join(f"{value:g}" for value in (data.alpha, data.classes_per_client) if value)
        words = (
            self.config.method.name,
            data.name,
            f"{data.partition}{options}",
            f"seed{self.config.run.seed}",
        )
        plain = "".join(c if c.isalnum() or c in ".-" else "_" for c in "-".join(words))
        return f"{plain}-{self.config.identity()[:HASH_LETTERS]}"

    @property
    def label(self) -> str:
        """What sets it apart from cells of other cases or elsewhere in the grid."""
        point = (_words(key, value) for key, value in self.point)
        return ", ".join(filter(None, (self.case, *point, *self.against)))


@dataclass(frozen=True)
class Sweep:
    name: str
    cells: tuple[Cell, ...]
    tuning: Mapping[str, Any] | None = None
    """How `quiver tune` races the tries, where the file says it."""


@dataclass(frozen=True)
class Choice:
    """What of a sweep is wanted; None: what its file says."""

    methods: Sequence[str] | None = None
    seeds: Sequence[int] | None = None
    cases: Sequence[str] | None = None
    values: Sequence[str] = ()
    """`section.key=value` texts that win over the file."""


def load_sweep(path: Path, choice: Choice | None = None, scale: str | None = None) -> Sweep:
    """Read and check the whole plan before anything runs; without a scale, as the file has it."""
    tree = read_toml(path, f"{path}: no such sweep file.")
    return plan_of(tree, path, choice or Choice(), scale)


def plan_of(tree: Tree, path: Path, choice: Choice, scale: str | None = None) -> Sweep:
    """The cells of a sweep that is written as a file, or as a dictionary under such a name."""
    for key in tree:
        if key in Config.model_fields and not tree.keys() & SWEEP_KEYS:
            raise QuiverError(
                f"{path} is a configuration, not a sweep: `quiver run {path}` runs it. A sweep has "
                "it as its base, and a grid (docs/how-to/sweep.md)."
            )
        if key in Config.model_fields:
            raise QuiverError(
                f"{path}: unknown key {key!r}: sections of a configuration stand below the base; "
                f"write [base.{key}]."
            )
        if key not in KNOWN:
            raise QuiverError(f"{path}: unknown key {key!r}; {suggest(key, KNOWN)}")
    tree = tree if scale is None else _apply_scale(tree, scale, choice, path)
    before, after = _settings(choice.values)
    base = _base(tree, path)
    blocks = _choose_grids(_blocks(tree, path), choice)
    cells = [
        Cell(config.with_values(after), name, point, _find_contradictions(case, after))
        for name, case in _cases(tree, choice, path)
        for block in blocks
        for config, point in _points(_of_case(base, name, case, path), block, before, path)
    ]
    if not cells:
        raise QuiverError(f"{path}: nothing is left to run: it has none of these methods.")
    unique = {(cell.label, cell.name): cell for cell in cells}
    return Sweep(path.stem, tuple(unique.values()), tree.get("tuning"))


def _base(tree: Tree, path: Path) -> Tree:
    base = tree.get("base", {})
    if isinstance(base, str):
        file = path.parent / base
        if not file.exists() and is_bundled(base):
            file = config_file(Path(base))
        found = read_toml(
            file,
            f"{path}: base = {base!r}: there is no such file: {file}. It is the configuration that "
            "the sweep starts from: a path relative to the sweep's file, or the name of one that "
            "comes with Quiver, such as quickstart.",
        )
        keys = [key for key in SWEEP_KEYS if key in found]
        if keys:
            raise QuiverError(
                f"{path}: base = {base!r} is a sweep itself (it has {', '.join(keys)}): name a "
                "configuration."
            )
        return found
    if not isinstance(base, dict):
        raise QuiverError(f"{path}: base = {base!r}: name a configuration file, or write [base.…].")
    return base


def _apply_scale(tree: Tree, scale: str, choice: Choice, path: Path) -> Tree:
    """The sweep at a scale that it has a section for; `--cases` may name any of its cases."""
    sections = tree.get("scale", {})
    if not isinstance(sections, dict) or not isinstance(sections.get(scale), dict):
        known = ", ".join(sections) if isinstance(sections, dict) and sections else "none"
        raise QuiverError(f"{path}: there is no [scale.{scale}]; it has {known}.")
    own = sections[scale]
    for key in own:
        if key not in KNOWN_OF_SCALE:
            known = suggest(key, KNOWN_OF_SCALE)
            raise QuiverError(f"{path}: unknown key {key!r} in [scale.{scale}]; {known}")
    merged = tree | {key: value for key, value in own.items() if key != "cases"}
    if "cases" in own and choice.cases is None:
        kept = _cases(merged, Choice(cases=own["cases"]), path)
        merged["case"] = [{"name": name, **case} for name, case in kept]
    return merged


def _cases(tree: Tree, choice: Choice, path: Path) -> list[tuple[str, Tree]]:
    written = tree.get("case", [{"name": ""}])
    if not isinstance(written, list) or not all(isinstance(case, dict) for case in written):
        raise QuiverError(f"{path}: cases are written as [[case]], each with a name.")
    cases: dict[str, Tree] = {}
    for case in written:
        name = case.get("name")
        if not isinstance(name, str) or name in cases or (not name and "case" in tree):
            raise QuiverError(
                f"{path}: case name {name!r}: every [[case]] needs a name of its own."
            )
        cases[name] = {key: value for key, value in case.items() if key != "name"}
    if choice.cases is None:
        return list(cases.items())
    for name in choice.cases:
        if name not in cases:
            raise QuiverError(f"{path}: no case {name!r}; {suggest(name, cases)}")
    return [(name, case) for name, case in cases.items() if name in choice.cases]


def _blocks(tree: Tree, path: Path) -> list[dict[str, list[Any]]]:
    """The grids, each as `section.key` → values; methods and seeds are keys like any other."""
    written = tree.get("grid", {})
    for block in written if _is_list(written) else [written]:
        if not isinstance(block, Mapping):
            raise QuiverError(f"{path}: grid = {block!r}: write [grid], and a list for each key.")
    common: Tree = {key: tree[key] for key in ("methods", "seeds") if key in tree}
    blocks = [
        flatten_settings({**common, **block})
        for block in (written if _is_list(written) else [written])
    ]
    for block in blocks:
        if "seeds" in block:
            block["seeds"] = check_seeds(block["seeds"])
        for name, key in (("methods", "method.name"), ("seeds", "run.seed")):
            if name in block:
                if key in block:
                    raise QuiverError(f"{path}: {name} and grid {key} are the same: give one.")
                block[key] = block.pop(name)
        for key, values in block.items():
            if not isinstance(values, list) or not values:
                raise QuiverError(
                    f"{path}: {key} = {values!r}: a grid needs a list of values, like [1, 2]."
                )
    return blocks


def _choose_grids(
    blocks: Sequence[dict[str, list[Any]]], choice: Choice
) -> list[dict[str, list[Any]]]:
    """The grids with the chosen methods and seeds. Of several grids each keeps its own methods."""
    chosen = [dict(block) for block in blocks]
    for block in chosen:
        if choice.seeds is not None:
            block["run.seed"] = list(choice.seeds)
        if choice.methods is not None:
            own = block.get("method.name", []) if len(blocks) > 1 else choice.methods
            block["method.name"] = [name for name in choice.methods if name in own]
    return chosen


def _points(
    tree: Tree,
    block: Mapping[str, list[Any]],
    before: Sequence[tuple[str, Any]],
    path: Path,
) -> Iterable[tuple[Config, GridPoint]]:
    config = parse_config(tree, str(path)).with_values(before)
    own: dict[str, list[Any]] = {
        "method.name": [config.method.name],
        "run.seed": [config.run.seed],
    }
    axes = own | dict(block)
    others = [key for key in axes if key not in ("method.name", "run.seed")]
    for name in axes["method.name"]:
        for values in itertools.product(*(axes[key] for key in others)):
            point = tuple((key, _freeze(v)) for key, v in zip(others, values, strict=True))
            for seed in axes["run.seed"]:
                yield config.for_method(name).with_values([*point, ("run.seed", seed)]), point


def _settings(texts: Sequence[str]) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """`--set` texts: overrides before a method is chosen, everything else has the last word."""
    before: list[tuple[str, Any]] = []
    after: list[tuple[str, Any]] = []
    for text in texts:
        key, value = parse_setting(text)
        if key in ("method.name", "run.seed"):
            option = "--methods" if key == "method.name" else "--seeds"
            raise QuiverError(f"--set {text}: a sweep has several: use {option}.")
        (before if key.startswith("overrides.") else after).append((key, value))
    return before, after


def _find_contradictions(case: Tree, settings: Sequence[tuple[str, Any]]) -> tuple[str, ...]:
    own = flatten_settings(case) | dict.fromkeys(case.get("without", ()), UNSET)
    return tuple(
        _words(key, "default" if value is UNSET else value)
        for key, value in settings
        if key in own and own[key] != value
    )


def _of_case(base: Tree, name: str, case: Tree, path: Path) -> Tree:
    """The base without what the case takes out, and with what it sets."""
    without = case.get("without", [])
    if not isinstance(without, list):
        raise QuiverError(
            f"{path}, case {name!r}: without = {without!r}: write a list of keys, such as "
            '["data.alpha"].'
        )
    tree = copy.deepcopy(base)
    for key in without:
        *sections, last = str(key).split(".")
        holder: Any = tree
        for section in sections:
            holder = holder.get(section) if isinstance(holder, dict) else None
        if not isinstance(holder, dict) or last not in holder:
            raise QuiverError(
                f"{path}, case {name!r}: without = {key!r}: the base does not set it; "
                f"{suggest(str(key), flatten_settings(base))}"
            )
        del holder[last]
    own = {key: value for key, value in case.items() if key != "without"}
    topology = own.get("topology", {})
    if isinstance(topology, dict) and topology.get("name") in TOPOLOGIES:
        leave_topology_options(tree, topology["name"])
    return _overlay(tree, own)


def _overlay(base: Mapping[str, Any], case: Mapping[str, Any]) -> Tree:
    merged = dict(base)
    for key, value in case.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = _overlay(old, value)
        else:
            merged[key] = value
    return merged


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _words(key: str, value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return f"{key.rsplit('.', 1)[-1]} {text}"


# Where a sweep keeps things, and in which state its cells are.
#
# cells/NAME     the run folder of a cell logs/NAME.log  what its process said on standard error
# failures/NAME.json  why it failed, until it succeeds


WRITTEN = ".written.json"
"""Beside the files of a reproduced item: which they are."""
State: TypeAlias = Literal["new", "begun", "finished", "diverged"]


@dataclass(frozen=True)
class SweepFolder:
    """The folder of one or several sweeps; what they have in common is run once."""

    root: Path

    def __post_init__(self) -> None:
        durable.check_writable(self.root)

    def run(self, cell: Cell) -> Path:
        return self.root / "cells" / cell.name

    def check(self, pages: str | None = None) -> None:
        """Refuse a folder that is not one of runs, before anything is written into it.

        `pages` is the folder in it that gets the sweep's tables.
        """
        output_folders.refuse_foreign(self.root, _holds_runs)
        if pages is not None:
            output_folders.refuse_foreign(self.root / pages, _holds_pages)

    def log(self, cell: Cell) -> Path:
        return self.root / "logs" / f"{cell.name}.log"

    def failure(self, cell: Cell) -> Path:
        return self.root / "failures" / f"{cell.name}.json"

    def state(self, cell: Cell) -> State:
        folder = RunFolder(self.run(cell))
        if not folder.holds_run():
            return "new"
        summary = folder.summary()
        if summary.get("finished"):
            return "finished"
        return "diverged" if "diverged" in summary else "begun"

    def message(self, cell: Cell) -> str:
        """Why it failed, as far as it is known."""
        path = self.failure(cell)
        if path.exists():
            return str(read_json(path).get("error", ""))
        return str(RunFolder(self.run(cell)).summary().get("error", ""))

    def note_failure(self, cell: Cell, error: str, code: int) -> None:
        record = {"cell": cell.name, "label": cell.label, "error": error, "code": code}
        write_result_file(self.failure(cell), (json.dumps(record, indent=2) + "\n").encode())

    def forget_failure(self, cell: Cell) -> None:
        self.failure(cell).unlink(missing_ok=True)


def _holds_runs(folder: Path) -> bool:
    """Whether cells, runs and comparisons are what is kept here; sweeps may be beside them."""
    if output_folders.holds_run(folder) or (folder / output_folders.PEER).exists():
        return False
    cells = folder / output_folders.CELLS
    if cells.is_dir() and (not output_folders.list_contents(cells) or _has_cells(cells)):
        return True
    below = [path for path in folder.iterdir() if path.is_dir()]
    return any(output_folders.holds_run(path) or _holds_comparison(path) for path in below)


def _has_cells(cells: Path) -> bool:
    """Whether cells have been begun; what one holds before its first round is half-written."""
    return output_folders.holds_run_below(cells) or (cells.parent / "logs").is_dir()


def _holds_comparison(folder: Path) -> bool:
    """Whether it is of `quiver compare`, or of an item of `quiver reproduce` without cells."""
    made = (folder / "report.html").exists() and output_folders.holds_run_below(folder)
    return made or (folder / WRITTEN).exists()


def _holds_pages(folder: Path) -> bool:
    """Whether tables and pages of a sweep or of an item are here."""
    if output_folders.holds_run(folder):
        return False
    return (folder / WRITTEN).exists() or any(folder.glob("*.html"))
