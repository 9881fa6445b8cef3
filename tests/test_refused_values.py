"""Values that are refused or warned of before anything is computed: each in one sentence."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest

import quiverfl as qv
from quiverfl.clock.formats import read_devices, read_traces
from quiverfl.clock.settings import DeviceSettings, NetworkSettings, make_devices
from quiverfl.data.sources import load_dataset
from quiverfl.errors import QuiverError, QuiverWarning
from quiverfl.runs.config import parse_config, set_value
from quiverfl.runs.config_files import load_config, parse_toml_value
from quiverfl.runs.experiment import make_method
from small import TRAINING, TinyModel, tiny_data, tiny_task

DEEP = "[" * 3000 + "]" * 3000


def go(**options: Any) -> qv.Run:
    settings: dict[str, Any] = {
        "method": qv.OSGP(),
        "topology": qv.random_push(clients=6, neighbors=2, seed=0),
        "training": TRAINING,
        "rounds": 1,
        **options,
    }
    return qv.simulate(tiny_task(), tiny_data(), **settings)


def sentence(mistake: Callable[[], Any]) -> str:
    with pytest.raises(QuiverError) as caught:
        mistake()
    text = str(caught.value)
    assert "\n" not in text
    assert text.rstrip().endswith((".", "?"))
    return text


def config(**sections: Any) -> Any:
    return parse_config(sections)


PYTHON: dict[str, tuple[Callable[[], Any], str]] = {
    "overrides that are no section": (
        lambda: config(overrides={"fedavg": 1}),
        "overrides.fedavg = 1: write a section",
    ),
    "a section without a name": (lambda: set_value({}, ".rounds", 3), "section.key"),
    "a section that is a number": (lambda: qv.Experiment.of({5: {}}), "unknown section [5]"),
    "a key that is a number": (lambda: qv.Experiment.of({"run": {5: 1}}), "unknown key run.5"),
    "Adam's betas under SGD": (lambda: qv.Training(betas=(0.8, 0.9)), "betas is Adam's"),
    "Adam's epsilon under SGD": (lambda: qv.Training(epsilon=1e-3), "epsilon is Adam's"),
    "true for a rate": (lambda: qv.Training(lr=True), "lr = True"),
    "a function for a method": (
        lambda: make_method(config(method={"name": "os:getcwd"})),
        "'os:getcwd' gives a str, which is no method",
    ),
    "everybody attacks": (
        lambda: go(adversary=qv.SignFlip(share=1.0)),
        "all 6 clients attack",
    ),
    "seeds without end": (
        lambda: qv.compare({}, ["local"], seeds="0-99999999999"),
        "100,000,000,000 are more than the 100,000",
    ),
    "a million million seeds": (lambda: qv.compare({}, ["local"], seeds=10**12), "100,000"),
    "a probability that is text": (lambda: qv.erdos_renyi(6, "half"), "probability = 'half'"),  # type: ignore[arg-type]
    "a share that is text": (
        lambda: qv.participating(qv.ring(5), "half"),  # type: ignore[arg-type]
        "fraction = 'half'",
    ),
    "a name for the graphs of participating": (
        lambda: qv.participating("ring", 0.5),  # type: ignore[arg-type]
        "participating: a str is no topology",
    ),
    "nothing for the graphs of unreliable": (
        lambda: qv.unreliable(None, 0.1),  # type: ignore[arg-type]
        "unreliable: a NoneType is no topology",
    ),
    "a name for a graph of networkx": (
        lambda: qv.from_networkx("graph"),  # type: ignore[arg-type]
        "a str is no graph of networkx",
    ),
    "matrices of two sizes": (
        lambda: qv.from_matrix([np.eye(3), np.eye(4)]),
        "rows of unequal lengths",
    ),
    "a matrix for a function of the round": (
        lambda: qv.custom(np.eye(3), clients=3),  # type: ignore[arg-type]
        "function is a ndarray",
    ),
    "a function of the round that fails": (
        lambda: qv.custom(lambda t: 1 / t, clients=3)(0),  # type: ignore[arg-type,return-value]
        "round 0: ZeroDivisionError: division by zero (test_refused_values.py, line",
    ),
    "a client that is not there": (lambda: tiny_data().select([99]), "there are 6, 0 … 5"),
    "no client at all": (lambda: tiny_data().select([]), "there are 6, 0 … 5"),
    "alpha that is text": (
        lambda: qv.partition("digits", clients=6, alpha="x"),
        "data.alpha = 'x'",
    ),
    "a number for a data set": (lambda: qv.load_dataset(5), "unknown data 5"),  # type: ignore[arg-type]
    "a number for a metric": (lambda: qv.Task(TinyModel, metrics=5), "metric = 5: give a name"),  # type: ignore[arg-type]
    "a loss that fails": (
        lambda: qv.simulate(
            qv.Task(TinyModel, loss=lambda outputs, y: 1 / 0),  # type: ignore[arg-type,return-value]
            tiny_data(),
            method=qv.Local(),
            topology=qv.isolated(6),
            training=TRAINING,
            rounds=1,
        ),
        "the loss cannot be computed",
    ),
    "a number for a run folder": (lambda: qv.load_run(5), "load_run: folder is 5"),  # type: ignore[arg-type]
    "a number for a peer's folder": (lambda: qv.Peer.open(5), "folder is 5"),  # type: ignore[arg-type]
    "a number for the folder of a comparison": (
        lambda: qv.compare({}, ["local"], folder=5),  # type: ignore[arg-type]
        "compare: folder is 5",
    ),
    "a number for a report": (lambda: qv.report(5), "a int is not a run"),  # type: ignore[arg-type]
    "a number for a grid": (
        lambda: qv.sweep({"base": "quickstart", "grid": 5}, dry_run=True),
        "grid = 5: write [grid]",
    ),
    "one law without brackets": (
        lambda: qv.check_method(qv.FedAvg(), skip=4),  # type: ignore[arg-type]
        "skip = 4: give a list",
    ),
    "a number for devices": (lambda: qv.retime("/nowhere", 5), "devices is a int"),  # type: ignore[arg-type]
    "nobody's devices": (lambda: qv.Devices.draw(0), "clients = 0: it must be a number, 1"),
    "a spread of nothing": (lambda: qv.Devices.draw(6, spread=0), "spread = 0"),
    "links of infinite speed": (lambda: qv.Devices.draw(6, link_spread=0), "link_spread = 0"),
    "steps that are text": (lambda: qv.Devices.draw(6, step="fast"), "step = 'fast'"),  # type: ignore[arg-type]
    "an option that devices lack": (
        lambda: qv.Devices.draw(6, latncy=1),
        "no option 'latncy'; did you mean 'latency'",
    ),
    "a step of all time": (
        lambda: qv.Devices(step=1e300, up=1.0, down=1.0),  # type: ignore[arg-type]
        "it must be at most 1,000,000 seconds",
    ),
    "text among devices": (
        lambda: qv.Devices(step="a", up=1.0, down=1.0),  # type: ignore[arg-type]
        "devices.step = 'a': it must be a number",
    ),
    "a number for a trace": (
        lambda: qv.Devices(step=1.0, up=1.0, down=1.0, traces=(5,)),  # type: ignore[arg-type]
        "devices.traces holds 5",
    ),
    "how long clients stay who are never away": (
        lambda: DeviceSettings(mean_on=5.0),
        "mean_on = 5 without devices.away",
    ),
    "a file of devices and a step": (
        lambda: DeviceSettings(file="a.csv", step=0.5),
        "devices.step and devices.file",
    ),
    "a file of devices and a spread": (
        lambda: DeviceSettings(file="a.json", spread=2.0),
        "devices.spread and devices.file",
    ),
    "a file of devices and links": (
        lambda: make_devices(DeviceSettings(file="a.csv"), NetworkSettings(up=5.0), 6, 0),
        "network.up and devices.file",
    ),
    "a seed that is text": (lambda: qv.random_push(6, 2, seed="a"), "seed = 'a'"),  # type: ignore[arg-type]
    "no seed of who takes part": (
        lambda: qv.participating(qv.ring(5), 0.5, seed=None),  # type: ignore[arg-type]
        "participation_seed = None",
    ),
    "more clients than memory": (lambda: qv.ring(10**12), "clients = 1,000,000,000,000: no graph"),
    "adapters for a number": (lambda: qv.lora(5), "lora: a int is not an nn.Module"),  # type: ignore[arg-type]
    "a number for a shape": (
        lambda: qv.make_model("mlp", 8, 3),  # type: ignore[arg-type]
        "input_shape = 8: give the shape",
    ),
    "a model of no class": (lambda: qv.make_model("mlp", (8,), 0), "classes = 0"),
    "a list for the path of data": (
        lambda: load_dataset("table", path=[1]),  # type: ignore[arg-type]
        "data.options.path = [1]: write a path as text",
    ),
}


@pytest.mark.parametrize("name", PYTHON)
def test_a_value_is_refused_in_one_sentence(name: str) -> None:
    mistake, words = PYTHON[name]
    assert words in sentence(mistake)


def test_what_cannot_be_known_before_warns(tmp_path: Path) -> None:
    def said(**options: Any) -> str:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", QuiverWarning)
            go(**options)
        return " ".join(str(one.message) for one in caught)

    assert "the run ends before any message arrives" in said(method=qv.OSGP(delay=1))
    assert "ends before" not in said(method=qv.OSGP(delay=1), rounds=2)
    assert "nobody trains what is sent" in said(epochs_per_client=[0] * 6)
    assert "nobody trains" not in said(epochs_per_client=[0] * 5 + [1])


@pytest.mark.parametrize(
    ("until", "latency", "words"),
    [(1e-3, 0.0, "so nobody trains"), (5.0, 100.0, "no message arrives"), (5.0, 0.0, "")],
)
def test_a_clock_that_ends_too_early_warns(until: float, latency: float, words: str) -> None:
    timing = qv.Timing(qv.Devices.draw(6, latency=latency), waits="nobody", until=until)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", QuiverWarning)
        qv.simulate(
            tiny_task(),
            tiny_data(),
            method=qv.DFedPGP(step="debiased"),
            topology=qv.random_push(clients=6, neighbors=2),
            training=TRAINING,
            timing=timing,
        )
    said = " ".join(str(one.message) for one in caught)
    assert words in said if words else "clock.until" not in said


def test_files_that_are_too_deep(tmp_path: Path) -> None:
    lists, sections = tmp_path / "lists.toml", tmp_path / "sections.toml"
    lists.write_text(f"[data]\nclients = {DEEP}\n")
    sections.write_text("[a" + ".a" * 3000 + "]\nx = 1\n")
    for file in (lists, sections):
        assert "too deep in one another" in sentence(lambda file=file: load_config(file))  # type: ignore[misc]
    assert parse_toml_value(DEEP) == DEEP
    traces = tmp_path / "traces.json"
    traces.write_text("[" * 100_000)
    assert "too deep in one another" in sentence(lambda: read_traces(traces, 2, 0))


HEAD = "client,step,up,down\n"
ROWS = [f"{client},0.1,1000,2000" for client in range(3)]
DEVICES = {
    "twice": ("\n".join([*ROWS[:2], ROWS[0]]), "row 3: client 0: it is there twice"),
    "other": ("\n".join([*ROWS[:2], "9,1,1,1"]), "row 3: client 9: there is no such client"),
    "half": ("\n".join([*ROWS[:2], "2.5,1,1,1"]), "row 3: client 2.5: there is no such client"),
    "short": ("\n".join([ROWS[0], "1,1", ROWS[2]]), "row 2: up: there is no value"),
    "none": ("", "0 devices for 3 clients"),
    "text": ("\n".join(["0,fast,1,1", *ROWS[1:]]), "row 1: step = 'fast': it must be a number"),
    "returns": ('0,"\r', ""),
}


@pytest.mark.parametrize("name", DEVICES)
def test_a_file_of_devices_is_refused_by_its_row(name: str, tmp_path: Path) -> None:
    text, words = DEVICES[name]
    file = tmp_path / "devices.csv"
    file.write_bytes((HEAD + text).encode())
    assert words in sentence(lambda: read_devices(file, 3, 0, None, 1.0))


def test_bytes_for_a_file_of_devices(tmp_path: Path) -> None:
    file = tmp_path / "devices.csv"
    file.write_bytes(bytes(range(256)))
    assert str(file) in sentence(lambda: read_devices(file, 3, 0, None, 1.0))


TABLE = "a,b,y,who\n" + "\n".join(f"{k}.5,{k % 7}.25,{k % 3},o{k % 4}" for k in range(40)) + "\n"


def table(tmp_path: Path, text: str = TABLE, **options: Any) -> Any:
    file = tmp_path / "mine.csv"
    file.write_text(text)
    options = {"label": "y", "owner": "who", **options}
    return load_dataset("table", path=file, cache=tmp_path / "cache", **options)


COLUMNS: dict[str, tuple[dict[str, Any], str]] = {
    "the label as an input": ({"features": ["a", "y"]}, "'y' is the label, and"),
    "the label as the owner": ({"owner": "y"}, "'y' is the label and the owner"),
    "no classes": ({"classes": 0}, "data.options.classes = 0: it must be a whole number from 1"),
    "endless classes": ({"classes": 10**9}, "data.options.classes = 1000000000"),
    "padding without lists": ({"pad": 0}, "no column of"),
    "a mask without padding": ({"mask": "here"}, "data.options.mask says where padding is"),
    "a number for a column": ({"label": 1}, "has no column '1'"),
    "half a column": ({"label": 1.5}, "data.options.label = 1.5: name a column"),
    "no label": ({"label": "label"}, "which column holds the labels?"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_a_table_are_refused(name: str, tmp_path: Path) -> None:
    options, words = COLUMNS[name]
    assert words in sentence(lambda: table(tmp_path, **options))


def test_a_column_may_be_called_by_a_number(tmp_path: Path) -> None:
    assert table(tmp_path, TABLE.replace(",y,", ",2024,", 1), label=2024).classes == 3


def test_a_cell_that_is_no_number_is_named(tmp_path: Path) -> None:
    said = sentence(lambda: table(tmp_path, TABLE.replace("3.5,3.25", "3.5,-")))
    assert "column 'b', line 5: '-' is no number" in said


def test_a_damaged_table_is_one_line(tmp_path: Path) -> None:
    said = sentence(lambda: table(tmp_path, TABLE.replace("3.5,3.25", "3.5,3.25,9,9,9")))
    assert "Expected 4 fields in line 5" in said


def test_doubts_about_labels(tmp_path: Path) -> None:
    assert not table(tmp_path).doubts
    (odd,) = table(tmp_path, TABLE.replace("3.5,3.25,0", "3.5,3.25,cat")).doubts
    assert "holds numbers but for 1 of 40 rows, such as 'cat' in line 5" in odd
    own = "a,b,y,who\n" + "\n".join(f"{k}.5,1.5,{7 * k},o{k % 4}" for k in range(40))
    (many,) = table(tmp_path, own).doubts
    assert "40 different labels in 40 rows" in many
    twice = table(tmp_path, TABLE.replace("a,b,y", "a,a,y")).notes
    assert any("the header has 'a' more than once" in note for note in twice)


def test_one_class_alone_is_not_numbered(tmp_path: Path) -> None:
    lines = [line.split(",") for line in TABLE.splitlines()]
    alone = "\n".join(
        ",".join([*line[:2], "5" if k else "y", line[3]]) for k, line in enumerate(lines)
    )
    assert not any("numbered" in note for note in table(tmp_path, alone).notes)


def test_a_cache_that_cannot_be_written_is_warned_of_in_our_words(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(TABLE)
    with pytest.warns(QuiverWarning, match="could not be cached"):
        load_dataset("table", path=file, cache=file, label="y", owner="who")


def test_losses_of_numbers_on_class_labels_name_the_remedy() -> None:
    task = qv.Task(TinyModel, loss="mse")
    run = lambda: qv.simulate(  # noqa: E731
        task, tiny_data(), method=qv.Local(), topology=qv.isolated(6), training=TRAINING, rounds=1
    )
    assert "of class labels take cross_entropy" in sentence(run)


def test_graphs_of_networkx_are_taken() -> None:
    assert qv.from_networkx(nx.path_graph(3)).clients == 3
    assert json.dumps(qv.participating(qv.ring(5), 0.5).options)
