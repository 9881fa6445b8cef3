"""The command's first second: what it loads, what it says, and on which terminal."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

import quiverfl
from quiverfl.cli.main import COMMANDS, Late, app
from run_folders import write_comparison
from shell import QUIVER, quiver

HEAVY = {"torch", "scipy", "pandas", "numpy", "pyarrow", "matplotlib", "networkx"}


def loaded_by(code: str) -> set[str]:
    """Packages that are imported when this code ends, in whatever way."""
    code = f"import atexit, sys\natexit.register(lambda: print('\\n', *sys.modules))\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], [], ["rnu"], ["--typo"]])
def test_nothing_heavy_is_loaded_to_say_little(arguments: list[str]) -> None:
    code = f"sys.argv = ['quiver', *{arguments}]\nfrom quiverfl.cli.main import main\nmain()"
    loaded = loaded_by(code)
    assert "typer" in loaded
    assert sorted(HEAVY & loaded) == []


def test_a_run_begins_without_what_only_its_results_need() -> None:
    """pandas takes a tenth of a start; the collector has not looked through all that was loaded."""
    code = """
import gc
from quiverfl.cli.main import COMMANDS, Late
looked = []
gc.callbacks.append(lambda phase, about: looked.append(about["generation"]))
Late("run", *COMMANDS["run"]).load()
assert gc.isenabled() and gc.get_freeze_count() > 100_000 and 2 not in looked, looked
print("loaded")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"pandas", "pyarrow", "matplotlib", "networkx", "sklearn"} & loaded_by(code) == set()


def test_the_list_of_commands_says_what_the_commands_say() -> None:
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    for name in COMMANDS:
        listed = group.commands[name]
        assert isinstance(listed, Late)
        assert listed.help is not None
        assert (listed.load().help or "").split("\n\n")[0].replace("\n", " ") == listed.help


def test_every_public_name_is_there_for_programs_and_type_checkers() -> None:
    stub = ast.parse(Path(quiverfl.__file__).with_suffix(".pyi").read_text())
    imported = {
        alias.asname: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(quiverfl.__all__) == set(imported)
    for name in quiverfl.__all__:
        assert getattr(quiverfl, name) is not None
    assert set(quiverfl.__all__) <= set(dir(quiverfl))
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        quiverfl.simulat  # noqa: B018
    with pytest.raises(AttributeError, match=r"quiverfl.Once is now called quiverfl.SingleStep"):
        quiverfl.Once  # noqa: B018
    assert loaded_by("import quiverfl") & HEAVY == set()
    assert "torch" in loaded_by("import quiverfl\nquiverfl.topologies.ring\nquiverfl.simulate")


def with_modules_of(folder: Path) -> dict[str, str]:
    """An environment in which the modules of a folder come before all others."""
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize("module", ["typer", "torch", "pandas"])
def test_ctrl_c_while_modules_are_loaded(tmp_path: Path, module: str) -> None:
    slow = "import sys, time\nprint('loading', flush=True)\ntime.sleep(60)\n"
    (tmp_path / f"{module}.py").write_text(slow)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    environment = with_modules_of(tmp_path)
    command = ["report", str(tmp_path)] if module == "pandas" else ["methods"]
    with subprocess.Popen(
        [*QUIVER, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == b""


def without(modules: list[str], tmp_path: Path) -> dict[str, str]:
    """An environment in which these modules are not installed."""
    (tmp_path / "site").mkdir(exist_ok=True)
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {modules}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    return with_modules_of(tmp_path / "site")


PEER = [
    ["demo"],
    ["init", "p", "--config", "c", "--keys", "k", "--roster", "r"],
    ["run", "p"],
    ["status", "p"],
    ["leave", "p"],
    ["evict", "p", "q"],
    ["audit", "p"],
    ["export", "p"],
    ["certs", "init", "a", "--run", "r", "--peer", "p=h:1"],
    ["certs", "issue", "a", "p", "--address", "h:1"],
    ["certs", "rotate", "a", "p"],
]


def test_every_peer_command_names_the_extra_that_is_missing(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom quiverfl.cli.main import main\n"
        f"for command in {PEER}:\n"
        "    sys.argv = ['quiver', 'peer', *command]\n"
        "    try: main()\n"
        "    except SystemExit as end: print(end.code)\n"
    )
    environment = without(["grpc", "cryptography"], tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    sentence = (
        "error: quiver peer needs grpc, cryptography, which is not installed: "
        "`pip install 'quiverfl[peer]'` adds it."
    )
    assert done.stderr.splitlines() == [sentence] * len(PEER)
    assert done.stdout.split() == ["2"] * len(PEER)


def test_tensorboard_is_missed_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]\nrounds = 1\n")
    command = [*QUIVER, "run", "run.toml", "--tensorboard", "--out", "out"]
    environment = without(["tensorboard"], tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install 'quiverfl[tensorboard]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_a_terminal_that_lacks_letters_gets_plain_ones(
    tmp_path: Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    write_comparison(tmp_path / "runs", seeds=(0, 1))
    (tmp_path / "small.toml").write_text(
        "[data]\nclients = 4\nsamples_per_client = 12\n[model]\nhidden = [4]\n"
        "[topology]\nneighbors = 2\n[run]\nrounds = 1\nthreads = 1\n"
    )
    commands = [
        "run small.toml --out run",
        "compare small.toml --methods local,dfedpgp --out both",
        "report runs",
        "methods",
        "topology show random_push --clients 8 --neighbors 2 --rounds 5",
        "--help",
    ]
    said = ""
    for command in commands if encoding == "ascii" else commands[2:]:  # they say enough
        done = quiver(*command.split(), cwd=tmp_path, encoding=encoding)
        assert done.returncode == 0, done.stderr
        said += done.stdout + done.stderr
    assert "\\u" not in said
    assert ("+-" if encoding == "ascii" else "±") in said
    assert ("μ" if encoding == "utf-8" else "mu") in said


def test_a_process_on_such_a_terminal(tmp_path: Path) -> None:
    """The stream that Python opens itself."""
    done = subprocess.run(
        [*QUIVER, "topologies"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert b"\\u" not in done.stdout
    assert b"i + 2, i + 4, ... in every round" in done.stdout
