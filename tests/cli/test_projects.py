"""A first project, configurations by name, models out of a run, more rounds, the wheel."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import shell
from quiverfl.cli.main import app
from quiverfl.data.sources import load_dataset
from quiverfl.models import make_model
from quiverfl.runs.config_files import load_config
from quiverfl.runs.experiment import Experiment

ROOT = Path(__file__).parents[2]
SHORT = ["--set", "run.rounds=3", "--set", "data.clients=5", "--set", "topology.neighbors=2"]
SHORT += ["--set", "topology.sampled=2", "--set", "model.hidden=[8]"]


def quiver(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def command(*words: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "quiverfl.cli.main", *words]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, check=False, **options)


def test_a_first_project_runs_and_is_not_overwritten(tmp_path: Path) -> None:
    made = shell.quiver("init", "first", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "quiver compare run.toml --methods local,dfedpgp,my_method:MyMethod" in made.stdout
    done = shell.quiver(
        "compare", "run.toml", "--methods", "local,dfedpgp,my_method:MyMethod",
        "--set", "run.rounds=8", "-q", cwd=tmp_path / "first",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "My method" in done.stdout
    summary = json.loads((tmp_path / "first/runs/run-comparison/dfedpgp/summary.json").read_text())
    assert summary["stages"]["mixed"]["last"]["mean"] > 0.8  # there is something to learn
    assert "quiver check my_method:MyMethod" in made.stdout
    checked = shell.quiver("check", "my_method:MyMethod", cwd=tmp_path / "first")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "My method: 13 of 13 laws kept." in checked.stdout
    again = shell.quiver("init", "first", cwd=tmp_path)
    assert again.returncode == 2
    assert "run.toml is there already" in again.stderr


def test_a_configuration_that_comes_with_the_package_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("quickstart")) == load_config(ROOT / "configs" / "quickstart.toml")
    result = quiver("run", "quickstar")
    assert "did you mean 'quickstart'" in str(result.exception)
    assert "no such configuration file" in str(quiver("run", "quickstar.toml").exception)
    not_here = str(quiver("run", "configs/quickstart.toml").exception)
    assert "One of that name comes with Quiver: write quickstart for it." in not_here
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "run.toml").touch()
    assert "a configuration, such as project/run.toml" in str(quiver("run", "project").exception)


@pytest.mark.parametrize("stage", ["mixed", "local"])
def test_an_exported_model_is_the_clients_own(tmp_path: Path, stage: str) -> None:
    folder = str(tmp_path / "run")
    assert quiver("run", "quickstart", *SHORT, "--out", folder, "-q").exit_code == 0
    out = tmp_path / "model.safetensors"
    told = quiver("export", folder, "--client", "3", "--stage", stage, "--out", str(out))
    assert told.exit_code == 0, told.output
    described = json.loads(out.with_suffix(".json").read_text())
    assert described["of"] == {"client": 3, "stage": stage, "rounds": 3}
    assert described["classes"] == [str(digit) for digit in range(10)]
    run = Experiment.of(load_config(Path("quickstart"), SHORT[1::2])).simulation.run()
    kept: Any = run.personal(3, stage=stage)  # type: ignore[arg-type]
    loaded = make_model("mlp", tuple(described["input_shape"]), 10, hidden=(8,))
    loaded.load_state_dict(load_file(out))
    data = load_dataset("digits")
    x = torch.from_numpy(data.test_x[:5])
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    mean, std = (torch.tensor(described[name]).view(shape) for name in ("mean", "std"))
    expected = loaded((x / described["scale"] - mean) / std)
    torch.testing.assert_close(kept(x), expected, rtol=0, atol=1e-5)
    assert "make_model('mlp'" in told.output


def test_exports_that_cannot_be_are_one_sentence(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    quiver("run", "quickstart", *SHORT, "--set", "run.keep_local=false", "--out", folder, "-q")
    for words, reason in [
        (["--client", "9"], "there are 5 clients, 0 … 4"),
        (["--stage", "local"], "were not kept"),
        (["--out", "model.pt"], "what is written is safetensors"),
    ]:
        assert reason in str(quiver("export", folder, *words).exception)
    assert "not a run folder" in str(quiver("export", str(tmp_path)).exception)


def test_an_extended_run_is_the_longer_run(tmp_path: Path) -> None:
    short, long = tmp_path / "short", tmp_path / "long"
    assert quiver("run", "quickstart", *SHORT, "--out", str(short), "-q").exit_code == 0
    assert quiver("extend", str(short), "--rounds", "6", "-q").exit_code == 0
    longer = [*SHORT, "--set", "run.rounds=6"]
    assert quiver("run", "quickstart", *longer, "--out", str(long), "-q").exit_code == 0
    assert (short / "history.jsonl").read_bytes() == (long / "history.jsonl").read_bytes()
    final = "checkpoints/round-000006.safetensors"
    assert (short / final).read_bytes() == (long / final).read_bytes()
    written = json.loads((short / "config.json").read_text())
    assert written["extended"] == [3]
    assert written["identity"] == json.loads((long / "config.json").read_text())["identity"]
    refused = quiver("extend", str(short), "--rounds", "6", "-q")
    assert "has 6 rounds; give more" in str(refused.exception)


def test_the_version_is_the_same_wherever_it_is_shown() -> None:
    import quiverfl

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = quiverfl.__version__
    assert project["version"] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"version = {{{version}}}" in (ROOT / "README.md").read_text()
    topmost = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert topmost.startswith(version)


@pytest.mark.slow
def test_the_wheel_brings_its_commands_into_an_empty_environment(tmp_path: Path) -> None:
    """As `pip install` and `uvx` do; torch and its kin are lent, so that nothing is downloaded."""
    wheels, home = tmp_path / "wheels", tmp_path / "env"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(ROOT)]
    subprocess.run(build, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    (wheel,) = wheels.glob("quiverfl-*.whl")
    python, bin_ = home / "bin" / "python", home / "bin"
    install = ["--python", str(python), "install", "--no-deps", str(wheel)]
    subprocess.run([*pip, *install], check=True)
    (own,) = (home / "lib").glob("python*/site-packages")
    # Behind the environment's own packages; editable installs in a lent folder are not followed.
    (own / "lent.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    env = {"PATH": f"{bin_}:/usr/bin:/bin", "HOME": str(tmp_path), "COLUMNS": "100"}

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    where = run(str(python), "-c", "import quiverfl; print(quiverfl.__file__)")
    assert where.startswith(str(own))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name in ("quiver", "quiverfl"):  # `uvx quiverfl` starts the command of that name
        assert run(str(bin_ / name), "--version") == f"quiver {version}\n"
    made = ["--table", "t.tex", "--figure", "c.pdf", "--set", "run.rounds=1", "-q"]
    run(str(bin_ / "quiver"), "compare", "quickstart", "--methods", "local,dfedpgp", *made)
    assert (tmp_path / "t.tex").read_text().startswith(r"\begin{table}")
    assert "finished" in run(str(bin_ / "quiver"), "ls", "runs")
    page = (
        "from quiverfl.results.report.overview import RunFinder; from pathlib import Path; "
        "from quiverfl.results.report.watch import make_watch_page; "
        "print(make_watch_page(RunFinder(Path('runs')), 1.0))"
    )
    assert "setInterval(ask" in run(str(python), "-c", page)


def test_the_wheel_works_outside_of_the_clone(tmp_path: Path) -> None:
    """Built and installed into a folder of its own, with nothing of the source tree in sight."""
    wheels, place = tmp_path / "wheels", tmp_path / "place"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(ROOT)]
    made = subprocess.run(build, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-2000:]
    (wheel,) = wheels.glob("quiverfl-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(place), str(wheel)], check=True)
    env = {"PYTHONPATH": str(place), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    where = subprocess.run(
        [sys.executable, "-c", "import quiverfl; print(quiverfl.__file__)"],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert where.stdout.startswith(str(place))
    assert (place / "quiverfl" / "py.typed").exists()
    compared = command(
        "compare", "quickstart", "--methods", "local,dfedpgp", "--set", "run.rounds=1", "-q",
        cwd=tmp_path, env=env,
    )  # fmt: skip
    assert compared.returncode == 0, compared.stderr
    assert "DFedPGP" in compared.stdout
    planned = command("reproduce", "table1", "--scale", "tiny", "--dry-run", cwd=tmp_path, env=env)
    assert planned.returncode == 0, planned.stderr
    assert command("init", "new", cwd=tmp_path, env=env).returncode == 0
