"""The docs are what happens: every code block of README and docs runs, or says why it does not.

Python is run page by page in a folder of its own; configurations are read; commands are run where
that is cheap, and parsed by the command line itself where it is not.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import quiverfl as qv
from doc_blocks import Block, blocks, commands, commands_in_tables, missing_line
from quiverfl.cli.main import app
from quiverfl.peer.folder import PeersSection
from quiverfl.runs.config import parse_config
from quiverfl.sweeps.plan import load_sweep

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/*.md")])
KINDS = {"python", "sh", "console", "toml", "text", "bibtex", ""}
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


TASKS = [page for page in PAGES if "<!-- output -->" in page.read_text(encoding="utf-8")]
"""Pages that are carried out from their first block to their last, with what they print."""
STARTS_PROCESSES = {"peers.md", "ranks.md", "sweep.md", "tune.md", "tutorial.md"}


def of_kind(kind: str) -> list[Any]:
    pages = [p for p in PAGES if any(b.kind == kind and not b.reason for b in blocks(p))]
    return [pytest.param(page, id=page.name) for page in pages]


def all_commands(run: bool = True) -> list[tuple[Block, list[str], list[str]]]:
    """Those of all pages, and those in the tables of the front page.

    Without `run` also those that cannot be run here.
    """
    of_blocks = [
        (block, words, said)
        for page in PAGES
        for block in blocks(page)
        if block.kind in ("sh", "console", "") and not (run and block.reason)
        for words, said in commands(block)
    ]
    return of_blocks + [(row, words, []) for row, words in commands_in_tables(ROOT / "README.md")]


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
        named = re.match(r"# (\w+\.(?:py|toml))\b", block.code)
        if block.kind in ("python", "toml") and named:
            (folder / named[1]).write_text(block.code)


def run_page(page: Path, folder: Path) -> dict[str, object]:
    """All its Python, in order."""
    names: dict[str, object] = {}
    write_files(page, folder)
    for block in blocks(page):
        if block.kind != "python" or block.reason:
            continue
        code = compile("\n" * block.line + block.code, str(page), "exec", dont_inherit=True)
        exec(code, names)
    return names


@pytest.mark.parametrize("page", [p for p in of_kind("python") if p.values[0] not in TASKS])
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
    assert list(both.frame["method"]) == ["local", "dfedpgp"]


def test_the_page_on_python_names_every_public_function_of_its_layer() -> None:
    text = (ROOT / "docs" / "reference" / "python.md").read_text()
    words = "load_dataset partition MODELS make_model Task FederatedData simulate Callback load_run"
    words += " EarlyStopping TensorBoard WandB MLflow Experiment compare report CallbackFailed"
    assert [word for word in words.split() if word not in text] == []


def test_no_example_tests_on_what_it_trained_on() -> None:
    same = re.compile(r"train=(.+?),\s+test=\1[,)]", re.S)
    found = [str(b) for p in PAGES for b in blocks(p) if b.kind == "python" and same.search(b.code)]
    assert found == []


def test_the_readme_counts_and_names_every_method() -> None:
    text = (ROOT / "README.md").read_text()
    assert f" {len(qv.METHODS)} methods " in text
    table = text[text.index("## Methods") : text.index("## What was found")]
    assert set(re.findall(r"`(\w+)`", table)) == set(qv.METHODS)
    assert len(text.splitlines()) <= 130


def test_an_output_on_a_page_is_not_empty() -> None:
    """It would be what any command prints."""
    shown = [block for page in PAGES for block in blocks(page) if block.is_output]
    assert [str(block) for block in shown if not block.code.strip("…\n ")] == []


def test_the_first_example_of_the_readme_can_be_pasted() -> None:
    """It is the page's only Python, and needs nothing that the page does not show."""
    (block,) = (b for b in blocks(ROOT / "README.md") if b.kind == "python")
    names: dict[str, Any] = {}
    exec(block.code, names)
    train, test = names["data"].train.x, names["data"].test.x
    pictures = {tuple(one.flatten().tolist()) for one in train}
    assert len(test) > 100
    again = sum(tuple(one.flatten().tolist()) in pictures for one in test)
    assert again / len(test) < 0.01  # two people may have drawn the same digit


@pytest.mark.parametrize("page", of_kind("toml"))
def test_configurations_are_read(page: Path, folder: Path) -> None:
    write_files(page, folder)
    for block in blocks(page):
        if block.kind != "toml" or block.reason:
            continue
        tree = tomllib.loads(block.code)
        PeersSection.model_validate(tree.pop("peers", {}))
        if {"grid", "case", "tuning", "methods"} & set(tree):
            based = "" if "base" in tree else 'base = "configs/quickstart.toml"\n'
            (folder / "sweep.toml").write_text(based + block.code)
            assert load_sweep(folder / "sweep.toml").cells
        else:
            parse_config(tree, str(block))


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
        for b, w, _ in all_commands(run=False)
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


def call(words: list[str], width: int = 200) -> str:
    done = CliRunner().invoke(app, words, env={"COLUMNS": str(width)})
    if done.exception is not None and not isinstance(done.exception, SystemExit | qv.QuiverError):
        raise done.exception
    return done.output if done.exception is None else f"error: {done.exception}"


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if p not in TASKS and any(b.page == p for b, *_ in all_commands())],
    ids=lambda p: p.name,
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
@pytest.mark.parametrize("name", ["README.md", "own-method.md"])
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


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, id=p.stem, marks=[pytest.mark.slow] * (p.name in STARTS_PROCESSES))
        for p in TASKS
    ],
)
def test_a_page_does_what_it_shows(page: Path, folder: Path) -> None:
    names: dict[str, object] = {}
    printed = ""
    for block in blocks(page):
        if block.is_output:
            line = missing_line(block.code, printed.replace(f"{folder}/", ""))
            assert line is None, f"{block}: {line!r} is not in\n{printed}"
        elif block.reason:
            continue
        else:
            file = re.match(r"# ([\w/-]+\.(?:py|toml))\b", block.code)
            if file:
                (folder / file[1]).write_text(block.code)
            if block.kind == "python":
                code = compile("\n" * block.line + block.code, str(page), "exec", dont_inherit=True)
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(code, names)
                printed = out.getvalue()
            elif block.kind == "sh":
                printed = "".join(run_line(words, block) for words, _ in commands(block, "any"))


def run_line(words: list[str], block: Block) -> str:
    """What a command of the page prints; `quiver` in this process, others in one of their own."""
    if words[0] != "quiver":
        words = [sys.executable, *words[1:]] if words[0] == "python" else words
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        return done.stdout
    told = call(words[1:], width=76)
    assert not told.startswith("error:"), f"{block}: {told}"
    return told


def test_commands_are_found_in_blocks_and_tables(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\n# it's a comment\nquiver methods  # another\nls; quiver data\n```\n"
        "| to see | `quiver topologies`, `ls`, `quiver run a.toml` |\nnot `quiver init`\n"
    )
    (block,) = blocks(page)
    assert [words for words, _ in commands(block)] == [["methods"], ["data"]]
    in_tables = [words for _, words in commands_in_tables(page)]
    assert in_tables == [["topologies"], ["run", "a.toml"]]


def test_an_output_that_is_not_printed_is_seen() -> None:
    printed = "run folder: runs/a\n3 rounds in 4.5 s\naccuracy 0.91\n"
    assert missing_line("run folder: runs/a\n3 rounds in 9.1 s\naccuracy 0.91\n", printed) is None
    assert missing_line("run folder: …\n…\naccuracy …\n", printed) is None
    assert missing_line("accuracy 0.92\n", printed) == "accuracy 0.92"
    assert missing_line("accuracy 0.91\n3 rounds in 1 s\n", printed) == "3 rounds in TIME"
    assert missing_line("accuracy 0.9136, worst …", "accuracy 0.9114, worst 0.75") is None
    assert missing_line("accuracy 0.9136", "accuracy 0.8736") == "accuracy 0.9136"
    assert missing_line("bytes 1.234.5", "bytes 1.234.6") == "bytes 1.234.5"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))


@pytest.mark.usefixtures("scripts")
def test_the_page_of_commands_is_current() -> None:
    from commands import PAGE, render_page

    written = PAGE.read_text(encoding="utf-8")
    assert written == render_page(), "python docs/site/commands.py writes it anew"


@pytest.mark.usefixtures("scripts")
def test_every_parameter_has_a_line() -> None:
    from parameters import undescribed, unused

    assert list(undescribed()) == [], "docs/site/parameters.toml has a line for each"
    assert list(unused()) == [], "docs/site/parameters.toml has lines for what is gone"


def test_the_reference_has_every_option_of_a_method_with_its_default() -> None:
    page = (ROOT / "docs" / "reference" / "methods.md").read_text()
    sections = {
        re.match(r"`(\w+)` ·", s.split("\n\n", 1)[1])[1]: s
        for s in re.split(r"^### ", page, flags=re.M)
        if re.search(r"\n\n`\w+` · \[", s)
    }
    assert set(sections) == set(qv.METHODS)
    for name, section in sections.items():
        assert "**Stage to look at:**" in section, name
        assert name == "local" or re.search(r"^(    |1\. )|[←∇=] ", section, re.M), name
    for name, method in qv.METHODS.items():
        rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", sections[name], re.M))
        assert set(rows) == {field.name for field in fields(method)}, name
        for field in fields(method):
            shown = rows[field.name].strip("`")
            known = {"None": "none", "True": "true", "False": "false"}
            default = known.get(str(field.default), str(field.default))
            said = (name, field.name, shown.strip('"'))
            assert said == (name, field.name, default)


def test_a_style_that_is_broken_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    long = " ".join(["word"] * 16) + "\n" + " ".join(["word"] * 15) + "."
    page.write_text(
        f"# Page\n\n{long}\n\n```sh\n{'x' * 77}\n```\n\n| a |\n|---|\n| One. Two. Three. |\n\n"
        "See [data.md](data.md).\n\n" + "A line.\n" * 6
    )
    script = ROOT / "docs" / "site" / "check_style.py"
    done = subprocess.run([sys.executable, script, page], capture_output=True, text=True)
    seen = [line.split(": ")[1] for line in done.stdout.splitlines()]
    assert (done.returncode, seen) == (1, ["sentence", "code", "cell", "link", "paragraph"])


def test_pages_keep_to_the_style() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "site" / "check_style.py"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_gives_what_it_shows(path: Path, folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "docs" / "site"))
    try:
        from notebooks import run_notebook, texts
    finally:
        sys.path.pop(0)
    shown = texts(json.loads(path.read_text(encoding="utf-8")))
    assert shown, "a notebook is committed with its outputs"
    assert texts(run_notebook(path)) == shown
