"""The example of docs/how-to/own-method.md keeps the law and runs by its name."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from quiverfl.cli.main import app
from quiverfl.errors import QuiverError
from quiverfl.support.references import hash_source
from small import CLIENTS, REGULAR, SOME, simulate, states

from . import test_laws as laws

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "own-method.md"
CONFIG = """
[data]
clients = 4
samples_per_client = 12
[model]
hidden = [4]
[topology]
neighbors = 2
[run]
rounds = 1
"""


def block() -> str:
    """The page's first block of Python."""
    found = re.search(r"```python\n(# dfedprox.py.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found.group(1)


def example() -> Any:
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(block(), "dfedprox.py", "exec", dont_inherit=True), names)
    return names["DFedProx"]


def test_the_example_runs_and_its_pull_can_be_seen() -> None:
    kind = example()

    def without_pull(self: Any, task: Any) -> Any:
        (train,) = kind.phases(self, task)
        return (replace(train, gradient=None),)

    plain_kind: Any = type("Plain", (kind,), {"phases": without_pull})
    weak, strong, plain = (
        simulate(method, REGULAR(CLIENTS), rounds=2)
        for method in (kind(2, proximal=0.0), kind(2, proximal=5.0), plain_kind(2))
    )
    torch.testing.assert_close(states(weak)[0], states(plain)[0], rtol=0, atol=1e-14)
    assert (states(strong)[0] - states(plain)[0]).abs().max() > 1e-3


@pytest.mark.parametrize("graphs", [REGULAR, SOME])
def test_the_example_keeps_every_law(graphs: Any) -> None:
    method = example()(epochs=2)
    laws.test_1_identity_mixing_is_idle(method)
    laws.test_2_agreement_is_kept_by_every_legal_graph(method, graphs)
    laws.test_5_a_part_that_a_phase_does_not_train_is_bit_identical(method)
    laws.test_6_evaluating_changes_nothing(method, graphs)
    laws.test_8_inactive_clients_are_not_trained(method, graphs)
    laws.test_9_a_message_survives_the_wire_format(method)
    laws.test_10_interrupted_and_resumed_equals_uninterrupted(method, graphs)
    laws.test_11_vectorised_equals_one_by_one(method, graphs)
    laws.test_what_is_sent_is_given_away(method)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dfedprox.py").write_text(block())
    (tmp_path / "run.toml").write_text(CONFIG)
    yield tmp_path
    forget()


def forget() -> None:
    """As in a new process."""
    sys.modules.pop("dfedprox", None)
    hash_source.cache_clear()


def quiver(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_it_is_named_in_a_configuration_and_compared_with_others(here: Path) -> None:
    own = ["--set", "method.name=dfedprox:DFedProx", "--set", "method.proximal=0.5"]
    result = quiver("run", "run.toml", *own, "--out", "one", "-q")
    assert result.exit_code == 0, result.output
    assert json.loads((here / "one" / "config.json").read_text())["config"]["method"] == {
        "name": "dfedprox:DFedProx",
        "proximal": 0.5,
    }
    result = quiver("compare", "run.toml", "--methods", "local,dfedprox:DFedProx", "-q")
    assert result.exit_code == 0, result.output
    assert " DFedProx " in result.output
    (here / "dfedprox.py").write_text(block() + "\n# another word\n")
    assert quiver("run", "run.toml", *own, "--out", "one", "-q").exit_code == 0  # what was imported
    forget()
    again = quiver("run", "run.toml", *own, "--out", "one", "-q")
    assert "another code of dfedprox:DFedProx: it was changed" in str(again.exception)


def test_its_own_title_is_shown_wherever_people_read(here: Path) -> None:
    titled = block().replace('"DFedProx"', '"Prox [ours]"')
    assert titled != block()
    (here / "dfedprox.py").write_text(titled)
    result = quiver("compare", "run.toml", "--methods", "dfedprox:DFedProx,local", "--out", "c")
    assert result.exit_code == 0, result.output
    assert result.output.index("Local") < result.output.index("Prox [ours] ")
    assert "Prox [ours]: round 1/1" in result.stderr
    assert "Prox [ours]" in (here / "c" / "report.html").read_text()
    written = json.loads((here / "c" / "dfedprox-DFedProx" / "config.json").read_text())
    assert written["method"] == {
        "name": "dfedprox:DFedProx",
        "title": "Prox [ours]",
        "order": None,
    }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("method.name=nowhere:Method", "no module 'nowhere'"),
        ("method.name=dfedprox:DFedPrix", "did you mean 'DFedProx'"),
        ("method.name=dfedprix", "unknown method"),
    ],
)
def test_a_method_that_is_not_there_is_named(here: Path, setting: str, message: str) -> None:
    result = quiver("run", "run.toml", "--set", setting)
    assert isinstance(result.exception, QuiverError)
    assert message in str(result.exception)
