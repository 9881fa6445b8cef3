"""The docs are what happens: every code block of README and docs runs, or says why it does not.

Python is run page by page in a folder of its own; configurations are read; commands are run where
that is cheap, and parsed by the command line itself where it is not.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import quiverfl as qv
from doc_blocks import Block, blocks, commands
from quiverfl.cli.main import app
from quiverfl.config import parse
from quiverfl.peer.peer_folder import PeersSection
from quiverfl.sweeps.plan import load_sweep

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("examples/*.md")])
KINDS = {"python", "sh", "console", "toml", ""}
CHEAP = {
    ("init",),
    ("methods",),
    ("topologies",),
    ("data",),
    ("topology", "show"),
    ("partition", "show"),
}
"""Commands that are run as they stand."""
SHORTENED = {("run",): ["--set", "run.rounds=2"], ("compare",): ["--set", "run.rounds=2"]}
"""Commands that are run with this behind them, by the slow tests."""
AFTER = {("resume",), ("report",), ("export",)}
"""Commands on what the page's earlier ones have left, by the slow tests."""


def of_kind(kind: str) -> list[Any]:
    pages = [p for p in PAGES if any(b.kind == kind and not b.reason for b in blocks(p))]
    return [pytest.param(page, id=page.name) for page in pages]


def all_commands() -> list[tuple[Block, list[str], list[str]]]:
    return [
        (block, words, said)
        for page in PAGES
        for block in blocks(page)
        if block.kind in ("sh", "console", "") and not block.reason
        for words, said in commands(block)
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty one with the configurations of the clone, where own modules are found."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    unknown = [str(b) for page in PAGES for b in blocks(page) if b.kind not in KINDS]
    assert unknown == []
    found = [b for page in PAGES for b in blocks(page)]
    assert len(found) == sum(
        len(re.findall("^```", p.read_text(), re.M)) for p in PAGES
    ) // 2 + len([p for p in PAGES for _ in re.finditer("^<!-- run first:", p.read_text(), re.M)])
    assert all(len(block.reason.split()) > 2 for block in found if block.reason is not None)


def write_files(page: Path, folder: Path) -> None:
    """The blocks that begin with the name of a file."""
    for block in blocks(page):
        named = re.match(r"# (\w+\.py)\b", block.code)
        if block.kind == "python" and named:
            (folder / named[1]).write_text(block.code)


def run_page(page: Path, folder: Path) -> dict[str, object]:
    """All its Python, in order."""
    names: dict[str, object] = {}
    write_files(page, folder)
    for block in blocks(page):
        if block.kind != "python" or block.reason:
            continue
        exec(compile("\n" * block.line + block.code, str(page), "exec"), names)
    return names


@pytest.mark.parametrize("page", of_kind("python"))
def test_the_python_of_a_page_runs(page: Path, folder: Path) -> None:
    names = run_page(page, folder)
    if page.name == "python.md":
        _holds_what_it_says(names, folder)


def _holds_what_it_says(names: dict[str, object], folder: Path) -> None:
    run, again, both = names["run"], names["again"], names["both"]
    assert isinstance(run, qv.Run)
    assert isinstance(again, qv.Run)
    assert run.history.equals(again.history)
    assert {"accuracy", "confidence", "loss"} < set(run.history)
    assert b"DFedPGP" in (folder / "two.html").read_bytes()
    assert isinstance(both, qv.Comparison)
    assert list(both.table["method"]) == ["local", "dfedpgp"]


def test_the_page_on_python_names_every_public_function_of_its_layer() -> None:
    text = (ROOT / "docs" / "python.md").read_text()
    words = "load_dataset partition MODELS make_model Task FederatedData simulate Callback load_run"
    words += " EarlyStopping TensorBoard WandB MLflow Experiment compare report CallbackFailed"
    assert [word for word in words.split() if word not in text] == []


@pytest.mark.parametrize("page", of_kind("toml"))
def test_configurations_are_read(page: Path, folder: Path) -> None:
    write_files(page, folder)
    for block in blocks(page):
        if block.kind != "toml" or block.reason:
            continue
        tree = tomllib.loads(block.code)
        PeersSection.model_validate(tree.pop("peers", {}))
        if {"grid", "case", "tuning"} & set(tree):
            based = "" if "base" in tree else 'base = "configs/quickstart.toml"\n'
            (folder / "sweep.toml").write_text(based + block.code)
            assert load_sweep(folder / "sweep.toml").cells
        else:
            parse(tree, str(block))


def parsed(words: list[str]) -> tuple[str, ...]:
    """The command's name, once the command line has accepted all its words; nothing is run."""
    command: Any = get_command(app)
    context, path, rest = None, [], list(words)
    while True:
        context = command.make_context(path[-1] if path else "quiver", rest, parent=context)
        command = context.command
        rest = [*context._protected_args, *context.args]
        if not hasattr(command, "resolve_command") or not rest:
            return tuple(path)
        name, command, rest = command.resolve_command(context, rest)
        path.append(name)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        pytest.param(b, w, id=f"{b.page.name}:{b.line} {' '.join(w)[:40]}")
        for b, w, _ in all_commands()
    ],
)
def test_commands_are_understood(block: Block, words: list[str]) -> None:
    assert parsed(words), str(block)
    for word in words:
        if word.startswith("configs/"):
            assert (ROOT / word).is_file(), f"{block}: {word}"


def test_a_command_that_is_not_understood_is_seen() -> None:
    """Without this, the test above could pass because nothing is ever looked at."""
    assert parsed(["peer", "certs", "init", "a", "--run", "r", "--peer", "n=h:1"]) == (
        "peer",
        "certs",
        "init",
    )
    for wrong in (["runn"], ["run", "a.toml", "--ot", "x"], ["peer", "demo", "--kills", "many"]):
        with pytest.raises(Exception, match=r"(?i)no such|should be"):
            parsed(wrong)


def call(words: list[str]) -> str:
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit | qv.QuiverError):
        raise done.exception
    return done.output if done.exception is None else f"error: {done.exception}"


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.page == p for b, *_ in all_commands())], ids=lambda p: p.name
)
def test_cheap_commands_print_what_the_page_says(page: Path, folder: Path) -> None:
    for block, words, said in all_commands():
        if block.page != page or parsed(words) not in CHEAP:
            continue
        told = call(words)
        if not said:
            assert not told.startswith("error:"), f"{block}: {told}"
        if parsed(words) == ("data",):  # which files lie where is each machine's own
            continue
        for line in said:
            if line.strip() not in ("", "…"):
                assert line.strip() in told, f"{block}: {line!r} is not in\n{told}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", "add-a-method.md"])
def test_the_commands_of_a_page_run_one_after_the_other(name: str, folder: Path) -> None:
    page = next(p for p in PAGES if p.name == name)
    run_page(page, folder)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ran = []
    for block, words, _ in all_commands():
        kind = parsed(words)
        if block.page != page or kind not in (*SHORTENED, *AFTER):
            continue
        if kind == ("report",):
            words = ["report", "runs", "--out", "report.html"]
        told = call([*words, *SHORTENED.get(kind, ())])
        assert not told.startswith("error:"), f"{block}: {told}"
        ran.append(kind)
    assert len(ran) >= 2
