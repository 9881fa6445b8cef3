"""`quiver doctor`: what it finds on the CPU and on a pretended device, and how it tells faults."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from typer.testing import CliRunner

from compilers import no_compiler
from pretend import pretended
from quiverfl.cli import setup as doctor
from quiverfl.cli.main import app
from quiverfl.engine.settings import ExecutorName
from quiverfl.errors import QuiverError
from quiverfl.methods import METHODS, Method
from quiverfl.support.compiler import why_not_compiled

FEW = {name: METHODS[name] for name in ("dfedpgp", "dfedavgm")}


@pytest.fixture(autouse=True)
def few_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "METHODS", FEW)
    monkeypatch.setattr(doctor, "IMAGE_MODELS", ("lenet5",))


def test_a_table_of_the_cpu() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    rows = json.loads(result.stdout)
    assert result.exit_code == 0, rows
    laws = {row["what"]: row for row in rows if row["part"] == "laws"}
    tried = (*FEW, "lenet5")
    assert set(laws) == {f"{name}, {how}" for name in tried for how in ("vectorized", "sequential")}
    assert {row["verdict"] for row in laws.values()} == {"ok"}
    assert len([row for row in rows if row["part"] == "speed"]) == 4
    memory = [row for row in rows if row["part"] == "memory"]
    assert [row["verdict"] for row in memory] == ["ok"] * 3


@pytest.mark.parametrize("with_compiler", [True, False])
def test_what_is_compiled_is_told(with_compiler: bool) -> None:
    with contextlib.nullcontext() if with_compiler else no_compiler():
        found = {finding.what: finding.measured for finding in doctor._describe_device("cpu")}
        here = [why_not_compiled(*source) is None for source in doctor.COMPILED.values()]
    told = [found[what] for what in doctor.COMPILED]
    assert [text == "yes" for text in told] == here
    assert with_compiler or all("no-such-compiler" in text for text in told)


def test_the_laws_hold_on_a_pretended_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one method and the model of images; tests/engine/test_pretend.py has all methods."""
    monkeypatch.setattr(doctor, "METHODS", {"dfedpgp": METHODS["dfedpgp"]})
    with pretended():
        found = list(doctor.laws("pretend"))
    assert {finding.verdict for finding in found} == {"ok"}
    assert {finding.measured for finding in found if "vectorized" in finding.what} == {"0.0e+00"}


@pytest.mark.slow
def test_another_number_and_a_failure_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    true = doctor._final

    def faulty(
        model: str, method: Method, device: str, executor: ExecutorName
    ) -> list[torch.Tensor]:
        states = true(model, method, device, executor)
        if executor == "sequential":
            raise RuntimeError("no kernel\nand more")
        off = 0.0 if method.name == "dfedpgp" or device == "cpu" else 1e-8
        return [leaf * (1 + off) for leaf in states]

    monkeypatch.setattr(doctor, "_run_two_rounds", faulty)
    with pretended():
        found = {finding.what: finding for finding in doctor.laws("pretend")}
    assert found["dfedpgp, vectorized"].verdict == "ok"
    assert found["dfedavgm, vectorized"].verdict == "differs"
    assert found["dfedpgp, sequential"].verdict == "failed"
    assert found["dfedpgp, sequential"].measured == "RuntimeError: no kernel"


def test_a_device_that_is_not_there_is_one_sentence() -> None:
    result = CliRunner().invoke(app, ["doctor", "--device", "cuda"])
    assert isinstance(result.exception, QuiverError)
    assert "device 'cuda' cannot be used" in str(result.exception)
