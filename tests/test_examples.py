"""The examples run, at a size that takes seconds."""

from __future__ import annotations

import re
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from quiverfl.errors import QuiverWarning

EXAMPLES = Path(__file__).parent.parent / "examples"


Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an example as a program, in a folder of its own; what it prints."""

    def printed(name: str, *words: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *words])
        capsys.readouterr()
        with warnings.catch_warnings():
            warnings.simplefilter("error", QuiverWarning)
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return printed


def test_the_page_has_a_line_about_every_example() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert {"own_data.py", "own_method.py", "lora_text.py", "three_peers.py"} <= names
    assert set(re.findall(r"`(\w+\.py)`", (EXAMPLES / "README.md").read_text())) == names


def test_own_data(run: Run, tmp_path: Path) -> None:
    told = run("own_data.py").splitlines()
    assert [line.split(":")[0] for line in told] == [f"cellar {k}" for k in range(6)]
    assert sum(float(line.split(":")[1]) for line in told) / 6 > 0.8
    assert (tmp_path / "runs" / "wines" / "summary.json").exists()


def test_own_data_is_ten_lines() -> None:
    """Of code, one statement each, apart from the imports."""
    code = (EXAMPLES / "own_data.py").read_text().partition("import quiverfl as qv\n")[2]
    statements = compile(code, "own_data.py", "exec", flags=0x400).body  # type: ignore[attr-defined]
    assert len(statements) <= 10


def test_own_method(run: Run) -> None:
    told = run("own_method.py", "--quick")
    found = re.findall(r"^(.*): ([\d.]+) %, worst tenth ([\d.]+) %$", told, re.MULTILINE)
    assert [name for name, *_ in found] == ["alone", "γ = 0.2", "γ = 0.5", "γ = 1, plain averaging"]


def test_three_peers_compute_what_the_simulation_did(run: Run) -> None:
    told = run("three_peers.py", "--quick")
    pattern = r"^(\w+): ([\d.]+) % simulated, ([\d.]+) % as a peer$"
    found = re.findall(pattern, told, re.MULTILINE)
    assert [name for name, *_ in found] == ["north", "south", "west"]
    assert all(simulated == peer for _, simulated, peer in found)


def test_adapters_on_text_with_owners(run: Run) -> None:
    told = run("lora_text.py", "--quick")
    pattern = (
        r"^(.*): perplexity [\d.]+, worst tenth [\d.]+; a client keeps (\d+) kB and sends (\d+)"
    )
    found = re.findall(pattern, told, re.MULTILINE)
    assert [name for name, *_ in found] == [
        "adapters, alone",
        "adapters shared, heads personal",
        "everything shared, heads personal",
    ]
    (_, _, nothing), (_, kept, sent), (_, whole, all_of_it) = found
    assert int(nothing) == 0
    assert int(kept) < int(whole) / 5
    assert int(sent) < int(all_of_it) / 10
