"""What can be known about a sweep before its first cell runs is said before, in a dry run too."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import quiverfl
from quiverfl.cli.main import app
from quiverfl.errors import QuiverError
from quiverfl.sweeps.estimate import check_cells
from quiverfl.sweeps.plan import Cell, load_sweep

REPOSITORY = Path(quiverfl.__file__).parents[2]
BASE = """
[base.data]
clients = 6
alpha = 0.1
samples_per_client = 12
[base.topology]
neighbors = 2
[base.run]
rounds = 2
threads = 1
"""


def cells(folder: Path, text: str) -> tuple[Cell, ...]:
    (folder / "plan.toml").write_text(text)
    return load_sweep(folder / "plan.toml").cells


def test_the_example_of_the_docs_runs_on_the_shipped_configuration(tmp_path: Path) -> None:
    docs = (REPOSITORY / "docs" / "reference" / "sweeps.md").read_text()
    example = re.search(r"## Sweeps\n\n```toml\n(.*?)```", docs, re.DOTALL)
    assert example is not None
    (tmp_path / "configs").mkdir()
    shutil.copy(REPOSITORY / "configs" / "quickstart.toml", tmp_path / "configs")
    found = cells(tmp_path, example.group(1))
    assert len(found) == 48
    assert {cell.config.data.alpha for cell in found} == {0.3, None}
    assert check_cells(found) == {}


def test_a_case_takes_keys_out_of_the_base(tmp_path: Path) -> None:
    text = BASE + '[[case]]\nname = "a"\n[[case]]\nname = "b"\nwithout = ["data.alpha"]\n'
    text += 'data = { partition = "pathological" }\n[[case]]\nname = "c"\n'
    text += 'without = ["topology", "data.samples_per_client"]\ndata = { samples_per_client = 9 }\n'
    first, second, third = (cell.config for cell in cells(tmp_path, text))
    assert (first.data.alpha, second.data.alpha, third.data.alpha) == (0.1, None, 0.1)
    assert second.topology.options() == {"neighbors": 2}
    assert third.topology.options() == {}
    assert third.data.samples_per_client == 9  # what a case sets itself stays


@pytest.mark.parametrize(
    ("without", "words"),
    [
        ('["data.alhpa"]', "without = 'data.alhpa': the base does not set it; did you mean"),
        ('["data.beta.gamma"]', "without = 'data.beta.gamma': the base does not set it"),
        ('"data.alpha"', "without = 'data.alpha': write a list"),
    ],
)
def test_what_the_base_does_not_set_cannot_be_taken_out(
    without: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(QuiverError) as caught:
        cells(tmp_path, BASE + f'[[case]]\nname = "a"\nwithout = {without}\n')
    assert f"plan.toml, case 'a': {words}" in str(caught.value)


CASES = [
    ('data = { partition = "pathological" }', "'pathological' has no option 'alpha'"),
    ('data = { partition = "patological" }', "did you mean 'pathological'"),
    ("data = { samples_per_client = 9999 }", "data.samples_per_client = 9999"),
    ('data = { augment = "crop_flop" }', "did you mean 'crop_flip'"),
    ("data = { options = { test_shar = 0.1 } }", "no option 'test_shar'"),
    ("model = { hiden = [3] }", "no option 'hiden'; did you mean 'hidden'"),
    ('model = { personal = ["haed"] }', "personal prefix 'haed'"),
    ('topology = { name = "ring", neighbors = 2 }', "no option 'neighbors'"),
    ("topology = { neighbors = 60 }", "neighbors"),
    ('topology = { name = "star", neighbors = 2 }', "no option 'neighbors'"),
    ("run = { epochs_per_client = [1, 2] }", "2 entries for 6"),
]


@pytest.mark.parametrize(("case", "words"), CASES, ids=[words for _, words in CASES])
def test_mistakes_are_found_before_anything_runs(case: str, words: str, tmp_path: Path) -> None:
    text = f'seeds = [0, 1]\n{BASE}[[case]]\nname = "good"\n[[case]]\nname = "bad"\n{case}\n'
    with pytest.raises(QuiverError) as caught:
        check_cells(cells(tmp_path, text))
    message = str(caught.value)
    assert message.startswith("2 of 4 cells cannot run.")
    assert "dfedpgp, bad" in message
    assert words in message
    assert message.count(words) == 1  # once for both seeds


def test_every_reason_is_said_once(tmp_path: Path) -> None:
    text = 'methods = ["local", "fedavg", "dfedpgp"]\n' + BASE
    text += '[[case]]\nname = "a"\ndata = { partition = "pathological" }\n'
    text += '[[case]]\nname = "b"\nmodel = { hiden = [3] }\n'
    with pytest.raises(QuiverError) as caught:
        check_cells(cells(tmp_path, text))
    message = str(caught.value)
    assert message.startswith("6 of 6 cells cannot run.")
    assert message.count("no option 'alpha'") == message.count("no option 'hiden'") == 1
    assert "local, a and 2 more" in message
    assert 'without = ["data.alpha"]' in message


def test_a_method_that_does_not_fit_its_graph(tmp_path: Path) -> None:
    text = 'methods = ["dfedavgm", "dfedpgp"]\n' + BASE.replace(
        "neighbors = 2", 'name = "random_push"\nneighbors = 2'
    )
    with pytest.raises(QuiverError, match=r"1 of 2 cells cannot run.*dfedavgm"):
        check_cells(cells(tmp_path, text))


def test_without_the_data_the_rest_is_checked(tmp_path: Path) -> None:
    absent = f'name = "cifar10"\nroot = "{tmp_path}"\nclients = 6'
    text = BASE.replace("clients = 6", absent) + '[[case]]\nname = "a"\n'
    found = cells(tmp_path, text)
    (reason, missing), *others = check_cells(found).items()
    assert "quiver data fetch cifar10" in reason
    assert missing == list(found)
    assert not others
    for mistake, words in (
        ('data = { partition = "pathological" }', "no option 'alpha'"),
        ("topology = { neighbors = 60 }", "neighbors"),
        ('model = { name = "mpl" }', "unknown model 'mpl'"),
    ):
        with pytest.raises(QuiverError, match=words):
            check_cells(cells(tmp_path, text + mistake))


def test_data_is_held_against_the_model(tmp_path: Path) -> None:
    np.savez(tmp_path / "flat.npz", x=np.zeros((60, 4), np.float32), y=np.arange(60) % 3)
    text = BASE.replace("clients = 6", f'name = "npz"\nroot = "{tmp_path}"\nclients = 4')
    text += f'[base.data.options]\npath = "{tmp_path / "flat.npz"}"\n[base.model]\nname = "lenet5"'
    with pytest.raises(QuiverError, match=r"'lenet5' for inputs .4.: .* needs images"):
        check_cells(cells(tmp_path, text))


def call(folder: Path, *options: str) -> Result:
    words = ["sweep", str(folder / "plan.toml"), "--out", str(folder / "runs"), *options]
    return CliRunner().invoke(app, words)


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_the_command_refuses_before_it_starts(options: tuple[str, ...], tmp_path: Path) -> None:
    text = BASE + '[[case]]\nname = "good"\n[[case]]\nname = "bad"\n'
    (tmp_path / "plan.toml").write_text(text + 'data = { partition = "pathological" }\n')
    result = call(tmp_path, *options)
    assert isinstance(result.exception, QuiverError)
    assert "1 of 2 cells cannot run" in str(result.exception)
    assert not (tmp_path / "runs").exists()
    good = call(tmp_path, "--cases", "good", "--dry-run", "--no-estimate")
    assert good.exit_code == 0, good.output


@pytest.mark.parametrize("options", [(), ("--dry-run",), ("--dry-run", "--no-estimate")])
def test_no_jobs_are_refused(options: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(BASE)
    result = call(tmp_path, "--jobs", "0", *options)
    assert "--jobs 0: it must be at least 1" in str(result.exception)


def test_a_dry_run_says_which_data_is_missing(tmp_path: Path) -> None:
    text = BASE + '[[case]]\nname = "here"\n[[case]]\nname = "not here"\n'
    text += f'data = {{ name = "cifar10", root = "{tmp_path}" }}\n'
    (tmp_path / "plan.toml").write_text(text)
    result = call(tmp_path, "--dry-run")
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "1 of them cannot run yet: cifar10 is not there: run 'quiver data fetch" in words
