"""`quiver topologies`, `quiver topology show`, and the picture."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from quiverfl.cli import topology as command
from quiverfl.errors import QuiverError
from quiverfl.results.pictures import draw_graph
from quiverfl.results.report.page import write_report
from quiverfl.results.run_files import finish_history
from quiverfl.topologies import (
    TOPOLOGIES,
    directed_ring,
    participating,
    random_push,
    random_regular,
    ring,
    star,
)
from run_folders import Recipe, write_run

app = typer.Typer()
app.add_typer(command.app, name="topology")
app.command("topologies")(command.topologies)


def call(*words: str) -> str:
    result = CliRunner().invoke(app, [*words])
    if result.exception is not None:
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_list_names_every_topology_and_who_may_use_it():
    text = call("topologies")
    for name in TOPOLOGIES:
        assert any(line.split()[0] == name for line in text.splitlines() if line[0] != " ")
    rows = {row["name"]: row for row in json.loads(call("topologies", "--json"))}
    assert rows["random_push"]["matrix"] == "column-stochastic"
    assert {"osgp", "dfedpgp"} <= set(rows["random_push"]["methods"])
    assert "fedavg" not in rows["random_push"]["methods"]
    assert rows["random_pull"]["matrix"] == "row-stochastic"
    assert rows["random_pull"]["methods"] == ["every method"]
    assert rows["ring"]["matrix"] == "doubly stochastic"
    assert rows["star"]["options"] == ["sampled", "seed", "static"]
    assert all(row["description"].endswith((".", "…")) for row in rows.values())


def test_show_in_words():
    text = call("topology", "show", "directed_ring", "--clients", "6", "--rounds", "8")
    assert "directed_ring, 6 clients" in text
    assert "doubly stochastic, directed, the same in every round" in text
    assert "in every round (B = 1)" in text
    assert "q = 0.8660, C = 1" in text
    pull = call("topology", "show", "random_pull", "--clients", "9", "--neighbors", "2")
    assert "theorem does not cover" in pull


def test_show_as_json_says_what_the_library_says():
    words = ["random_push", "--clients", "30", "--neighbors", "4", "--seed", "2", "--rounds", "6"]
    values = json.loads(call("topology", "show", *words, "--message-bytes", "10", "--json"))
    assert values["bytes"] == 30 * 4 * 10
    assert values["options"] == {"neighbors": 4, "seed": 2, "static": False}
    assert values["column_stochastic"]
    assert not values["row_stochastic"]


def test_show_with_participation():
    words = ["ring", "--clients", "10", "--participation", "0.5", "--rounds", "5"]
    values = json.loads(call("topology", "show", *words, "--json"))
    assert values["active"] == 5
    assert values["symmetric"]


def test_topologies_that_look_are_shown_for_clients_that_tell_the_same():
    words = ["similar_push", "--clients", "12", "--neighbors", "2", "--rounds", "40"]
    text = " ".join(call("topology", "show", *words).split())
    assert "column-stochastic, directed, changes from round to round" in text
    assert "sketch of 32 numbers (128 bytes with every message)" in text
    assert "every round strongly connected (B = 1) in 40 rounds" in text
    rigid = call("topology", "show", *words, "--set", "explore=0", "--window", "5", "--json")
    watched = json.loads(rigid)["watch"]
    assert watched["window_rounds"] == 5
    assert watched["disconnected"]
    rows = {row["name"]: row for row in json.loads(call("topologies", "--json"))}
    assert "local" in rows["random_push"]["methods"]
    assert "local" not in rows["loss_push"]["methods"]  # nobody would be told anything


def test_the_graphs_of_a_run_are_shown(tmp_path):
    folder = write_run(tmp_path / "run", Recipe(clients=4, rounds=12))
    with pytest.raises(QuiverError, match="recorded no graphs: those of random_push do not"):
        call("topology", "show", str(folder))
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        line["links"] = "1;0;3;2" if line["round"] < 11 else "2;1 0;0;1"
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    finish_history(folder)
    text = " ".join(call("topology", "show", str(folder)).split())
    assert "links used 7 of 12 possible" in text
    assert "falls apart: of 3 windows of 10 rounds 2 are not strongly connected" in text
    values = json.loads(call("topology", "show", str(folder), "--window", "12", "--json"))
    assert values["watch"]["window"] == 12
    assert values["watch"]["disconnected"] == []
    picture = tmp_path / "graph.svg"
    call("topology", "show", str(folder), "--picture", str(picture), "--picture-round", "12")
    assert picture.exists()
    with pytest.raises(QuiverError, match="--picture-round 13: 12 were recorded"):
        call("topology", "show", str(folder), "--picture", str(picture), "--picture-round", "13")
    write_report([folder], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "falls apart: of 3 windows of 10 rounds 2 are not strongly connected" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rign"], "did you mean 'ring'"),
        (["random_push"], "needs the option 'neighbors'"),
        (["random_push", "--neighbors", "100"], "neighbors = 100"),
        (["ring", "--neighbors", "2"], "no option 'neighbors'"),
        (["ring", "--picture", "graph.bmp"], "graph.bmp"),
        (
            ["ring", "--clients", "5", "--picture", "no/such/folder/graph.png"],
            "could not be written",
        ),
        (["ring", "--clients", "401", "--rounds", "1", "--picture", "a.png"], "401 clients"),
    ],
)
def test_show_refusals(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(QuiverError, match=message):
        call("topology", "show", *words)
    assert not list(tmp_path.iterdir())


def test_show_draws_a_picture_and_keeps_json_clean(tmp_path):
    picture = tmp_path / "graph.png"
    words = ["random_push", "--clients", "12", "--neighbors", "3", "--picture", str(picture)]
    assert str(picture) in call("topology", "show", *words)
    with Image.open(picture) as image:
        assert image.width > image.height > 500
        colors = np.asarray(image.convert("RGB")).reshape(-1, 3)
    for ink in ((213, 94, 0), (0, 114, 178)):  # what client 0 sends and receives
        assert (np.abs(colors.astype(int) - ink).sum(axis=1) < 12).sum() > 100
    result = CliRunner().invoke(app, ["topology", "show", *words, "--json"])
    assert json.loads(result.stdout)["clients"] == 12


@pytest.mark.parametrize(
    "topology",
    [ring(2), directed_ring(5), random_regular(20, 4), star(30, 4), random_push(100, 10)],
    ids=lambda topology: topology.name,
)
def test_svg_is_self_contained_and_the_same_each_time(topology, tmp_path):
    first, second = io.BytesIO(), io.BytesIO()
    draw_graph(topology(0), first, title="a graph", format="svg")
    draw_graph(topology(0), second, title="a graph", format="svg")
    assert first.getvalue() == second.getvalue()
    text = first.getvalue().decode()
    assert text.count("<svg") == 1
    assert 'href="http' not in text
    assert len(text) < 1_000_000


def test_the_highlighted_client_is_the_first_that_trains():
    graph = next(
        graph
        for graph in map(participating(random_push(10, 6), 0.5), range(20))
        if not graph.active[0]
    )
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    draw_graph(graph, axes)
    first = int(np.argmax(graph.active))
    labels = [entry.get_text() for entry in axes.get_legend().get_texts()]
    assert labels
    assert all(label.startswith(f"client {first} ") for label in labels)


def test_arrows_end_at_the_receiver():
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    draw_graph(directed_ring(4)(0), axes)
    heads = [c for c in axes.collections if isinstance(c, PolyCollection)]
    tips = np.concatenate([[path.vertices[0] for path in c.get_paths()] for c in heads])
    places = np.array([[0, 1], [1, 0], [0, -1], [-1, 0]])
    distance = np.linalg.norm(tips[:, None] - places, axis=2)
    assert np.array_equal(np.sort(distance.argmin(axis=1)), [0, 1, 2, 3])
    assert distance.min(axis=1).max() < 0.1


def test_matplotlib_and_networkx_are_loaded_only_when_needed():
    code = (
        "import sys, quiverfl.cli.topology, quiverfl.topologies\n"
        "assert not {'matplotlib', 'networkx'} & set(sys.modules), 'loaded at import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
