"""Synchronous rounds on the clock: exact numbers, laws, re-timed runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import quiverfl as qv
from quiverfl.clock.devices import MICROSECONDS, Devices, Trace
from quiverfl.clock.rounds import Kind, RoundTimer, choose_kind, list_links, time_rounds
from quiverfl.clock.run import time_records
from quiverfl.errors import QuiverError
from quiverfl.results.summary import condense_record
from quiverfl.topologies import Topology, random_push, random_regular, star
from quiverfl.topologies.topology import build_graph

S = MICROSECONDS


def chain() -> Any:
    """0 → 1 → 2, all with half of their own kept; 2 keeps all."""
    return build_graph(
        3,
        np.array([0, 1, 1, 2, 2]),
        np.array([0, 0, 1, 1, 2]),
        np.array([0.5, 0.5, 0.5, 0.5, 1.0]),
    )


def seconds(times: Any) -> list[float]:
    return [float(t) / S for t in times]


def test_a_push_waits_for_its_senders_alone() -> None:
    """Steps of 1, 2 and 4 s; 100 bytes at 100 B/s up, 200 down; half a second of latency."""
    devices = Devices(np.array([1.0, 2.0, 4.0]), 100.0, 200.0, latency=0.5, watts=2, idle_watts=1)
    timer = RoundTimer(devices, "push")
    one = np.ones(3, dtype=np.int64)
    first, second = time_rounds(timer, [chain(), chain()], one, 100 * one)
    assert seconds(first.trained) == [1, 2, 4]
    assert seconds(first.mixed) == [1, 2.5, 4]  # 0 sends in [1, 2], heard at 2.5; 1 in [2, 3]
    # 0 trains to 2, its link is free then; 1 to 4.5, from 0: 2.0 + … waits for its own 2.5 first
    assert seconds(second.trained) == [2, 4.5, 8]
    assert seconds(second.mixed) == [2, 4.5, 8]
    assert first.sent.tolist() == [100, 100, 0]
    # client 1: 2 s of 2 W, half a second of 1 W, and 100 bytes in and out at a joule a megabyte
    assert first.joules[1] == pytest.approx(2 * 2 + 0.5 + 200 / 1e6)
    assert first.record() == {
        "clock_local": 4.0, "clock": 4.0, "joules": pytest.approx(2 + 4.5 + 8 + 400 / 1e6),
    }  # fmt: skip


def test_a_barrier_waits_for_all_and_an_exchange_for_both_ends() -> None:
    devices = Devices(np.array([1.0, 2.0, 4.0]), 100.0, 200.0)
    one = np.ones(3, dtype=np.int64)
    barrier = RoundTimer(devices, "barrier").advance(chain(), one, 100 * one)
    assert seconds(barrier.mixed) == [4, 4, 4]
    line = build_graph(
        3, np.array([0, 0, 1, 1, 1, 2, 2]), np.array([0, 1, 0, 1, 2, 1, 2]), np.full(7, 1 / 3)
    )
    # 0-1 from 2 s: 1 has two messages out, so its half of 100 B/s takes 2 s; 1-2 from 4 s.
    undirected = RoundTimer(devices, "undirected").advance(line, one, 100 * one)
    assert seconds(undirected.mixed) == [4, 6, 6]


def test_a_server_waits_for_the_slowest_that_it_sampled() -> None:
    graph = build_graph(
        3, np.zeros(2, dtype=np.int64), np.array([0, 1]), np.array([0.5, 0.5]),
        active=np.array([True, True, False]), hub=True,
    )  # fmt: skip
    devices = Devices(np.array([1.0, 2.0, 99.0]), 100.0, 200.0, latency=0.25, server=300.0)
    one = np.ones(3, dtype=np.int64)
    graph = star(3, 2, seed=0)(0)
    sampled = np.flatnonzero(graph.active)
    times = RoundTimer(devices, "server").advance(graph, one, 100 * one)
    # the server's 300 B/s is 150 for each: down 100/150 s, up 100/100 s, twice the latency
    slowest = devices.step[sampled].max()
    assert times.mixed.tolist() == [round((2 / 3 + 0.25 + slowest + 1 + 0.25) * S + 1 / 3)] * 3
    assert times.sent.sum() == times.received.sum() == 200


def make_timer(kind: Kind, up: np.ndarray, down: np.ndarray, away: bool) -> RoundTimer:
    step = np.linspace(0.1, 1.0, 8)
    traces = tuple(Trace.of([[i, i + 5]], 15, f"client {i}") for i in range(8)) if away else ()
    devices = Devices(step, up, down, latency=0.1, server=float(up.max()), traces=traces)
    return RoundTimer(devices, kind)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["server", "barrier", "undirected", "push"]),
    st.lists(st.floats(10, 1000), min_size=16, max_size=16),
    st.lists(st.sampled_from([1.0, 1.0, 1.5, 20.0]), min_size=16, max_size=16),
    st.booleans(),
    st.integers(0, 5),
)
def test_more_bandwidth_never_delays_a_round(
    kind: Kind, speeds: list[float], factors: list[float], away: bool, seed: int
) -> None:
    made = {"server": star(8, 3, seed=seed), "push": random_push(8, 3, seed=seed)}
    topology: Topology = made.get(kind) or random_regular(8, 3, seed=seed)
    slow, wide = np.array(speeds), np.array(speeds) * np.array(factors)
    steps, payload = np.full(8, 3), np.full(8, 120)
    runs = [
        time_rounds(
            make_timer(kind, one[:8], one[8:], away),
            [topology(t) for t in range(4)],
            steps,
            payload,
        )
        for one in (slow, wide)
    ]
    for before, after in zip(*runs, strict=True):
        assert (after.mixed <= before.mixed).all()
        assert (after.trained <= before.trained).all()


def test_rounds_leave_out_who_is_away_and_what_is_late() -> None:
    traces = (Trace(), Trace(), Trace.of([[100, 101]], 200, "client 2"))
    devices = Devices(np.array([1.0, 2.0, 1.0]), 100.0, 200.0, traces=traces)
    one = np.ones(3, dtype=np.int64)
    skipped = RoundTimer(devices, "push", skip=True).advance(chain(), one, 100 * one)
    assert skipped.graph.active.tolist() == [True, True, False]
    np.testing.assert_array_equal(
        skipped.graph.weights, [[0.5, 0, 0], [0.5, 1.0, 0], [0, 0, 1.0]]
    )  # what 1 would have given to 2 stays with 1
    late = RoundTimer(Devices(np.array([9.0, 2.0, 1.0]), 100.0, 200.0), "push", deadline=3.0)
    times = late.advance(chain(), one, 100 * one)
    np.testing.assert_array_equal(times.graph.weights, [[1, 0, 0], [0, 0.5, 0], [0, 0.5, 1]])
    assert seconds(times.mixed) == [9, 5, 3]  # 1 waits for 0, in vain, until its deadline


def test_a_trace_that_ends_too_early_is_refused_before_anything_is_computed() -> None:
    devices = Devices(1.0, 1.0, 1.0, traces=(Trace.of([[0, 2.5]], None, "x"), Trace(), Trace()))
    timer, one = RoundTimer(devices.check_clients(3), "push"), np.ones(3, dtype=np.int64)
    with pytest.raises(QuiverError, match=r"client 0 ends at 2.5 s, and round 3 needs it later"):
        time_rounds(timer, [chain()] * 4, one, 0 * one)


def test_kinds_follow_the_graph() -> None:
    assert choose_kind(star(4, 2)(0), "all") == "server"
    assert choose_kind(random_push(6, 2)(0), "graph") == "push"
    assert choose_kind(random_regular(6, 2)(0), "graph") == "undirected"
    assert choose_kind(random_regular(6, 2)(0), "all") == "barrier"
    receivers, senders = list_links(chain())
    assert (receivers.tolist(), senders.tolist()) == ([1, 2], [0, 1])


TINY = {
    "data": {"name": "digits", "clients": 6, "samples_per_client": 24, "test_per_client": 8},
    "model": {"name": "mlp", "hidden": [8]},
    "method": {"name": "dfedpgp", "shared_epochs": 1},
    "topology": {"neighbors": 2},
    "training": {"lr": 0.05, "batch_size": 8},
    "run": {"rounds": 3, "threads": 1},
}


def test_a_run_and_its_folder_are_retimed_alike_and_learn_nothing_new(tmp_path: Path) -> None:
    experiment = qv.Experiment.of(TINY)
    live = experiment.run(tmp_path / "run")
    devices = Devices.draw(6, step=0.5, spread=10, up=1e4, link_spread=10, latency=0.1)
    timed, read = qv.retime(live, devices), qv.retime(tmp_path / "run", devices)
    steps = 2 * 3  # one epoch of three batches for each of two phases
    graphs = [experiment.topology(t) for t in range(3)]
    (payload,) = {
        record["sent_bytes"][0] // 2 for record in live._history.records if record["sent_bytes"][0]
    }
    timer = RoundTimer(devices, "push")
    wanted = time_rounds(timer, graphs, np.full(6, steps), np.full(6, payload))
    assert timed.rounds["clock"].tolist() == [t.record()["clock"] for t in wanted]
    assert read.rounds[["clock", "clock_local", "joules"]].equals(
        timed.rounds[["clock", "clock_local", "joules"]]
    )
    assert timed.history.equals(live.history)
    assert timed.summary["joules"] == pytest.approx(sum(t.joules.sum() for t in wanted))
    assert "clock" not in live.rounds
    everybody = qv.retime(live, devices, waits="all")
    assert everybody.rounds["clock"].iloc[-1] >= timed.rounds["clock"].iloc[-1]
    with pytest.raises(QuiverError, match="7 devices for 6 clients"):
        qv.retime(live, Devices.draw(7))
    with pytest.raises(QuiverError, match='for "graph" or "all"'):
        qv.retime(live, devices, waits="nobody")
    (tmp_path / "run" / "rounds.jsonl").unlink()  # as records of runs are shipped
    with pytest.raises(QuiverError, match="no lines of rounds"):
        qv.retime(tmp_path / "run", devices)


def test_a_round_without_each_clients_steps_and_bytes_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment, devices = qv.Experiment.of(TINY), Devices.draw(6, step=0.5, spread=10)
    records = [condense_record(r, 5) for r in experiment.run()._history.records]
    with pytest.raises(QuiverError, match=r'set run\.history = "clients"'):
        time_records(records, experiment.topology, devices, "graph")
    tree: dict[str, Any] = {**TINY, "clock": {"waits": "graph"}, "devices": {"spread": 10.0}}
    tree["run"] = {**TINY["run"], "history": "hundredths"}
    with pytest.raises(QuiverError, match='"hundredths" with a clock of rounds'):
        qv.Experiment.of(tree).run()
    # A crowd's are all recorded, so that a resumed run has the same seconds.
    monkeypatch.setattr("quiverfl.runs.simulate.CROWD", 5)
    tree["run"] = {**TINY["run"], "checkpoint_every": 1}
    experiment, taken = qv.Experiment.of(tree), list[Any]()
    whole = experiment.simulation.run(checkpoint=lambda one: taken.append(one.copy()))
    rest = experiment.simulation.run(resume=taken[0])
    assert rest.rounds["clock"].equals(whole.rounds["clock"])


@pytest.mark.parametrize("clock", [{"away": "skip"}, {"deadline": 5.0}], ids=["skip", "deadline"])
def test_a_run_whose_graphs_its_devices_made_is_not_retimed(
    clock: dict[str, Any], tmp_path: Path
) -> None:
    tree = {**TINY, "clock": {"waits": "graph", **clock}}
    run = qv.Experiment.of(tree).run(tmp_path / "run")
    for one in (run, tmp_path / "run"):
        with pytest.raises(QuiverError, match="on others it would be another run"):
            qv.retime(one, Devices.draw(6))


def test_the_report_takes_a_file_of_devices(tmp_path: Path) -> None:
    from quiverfl.cli.main import app

    qv.Experiment.of(TINY).run(tmp_path / "run")
    file = tmp_path / "phones.toml"
    file.write_text("[devices]\nstep = 0.5\nspread = 10\n[network]\nup = 1e4\n")
    command = ["report", str(tmp_path / "run"), "--devices", str(file), "--json"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["rows"]
    devices = Devices.draw(6, step=0.5, spread=10, up=1e4)
    timed = qv.retime(tmp_path / "run", Devices.draw(6, step=0.5, spread=10, up=1e4, server=12.5e6))
    assert row["clock"] == timed.rounds["clock"].iloc[-1]
    assert row["joules"] == pytest.approx(timed.rounds["joules"].sum())
    assert devices.clients == 6
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Against seconds" in page
    assert "Against joules" in page
    file.write_text("[devices]\nspeed = 3\n")
    with pytest.raises(QuiverError, match=r"unknown key devices\.speed"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    file.write_text("[device]\nstep = 3\n")
    with pytest.raises(QuiverError, match="unknown section device;"):
        CliRunner().invoke(app, command, catch_exceptions=False)


def test_who_waits_for_whom(tmp_path: Path) -> None:
    from quiverfl.cli.topology import app

    command = ["time", "--clients", "12", "--neighbors", "3", "--rounds", "15", "--json"]
    picture = tmp_path / "who.png"
    result = CliRunner().invoke(app, [*command, "--picture", str(picture)], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert list(found) == ["server", "barrier", "undirected", "push", "nobody"]
    assert found["nobody"]["seconds"] < 0.6 * found["push"]["seconds"]
    assert found["push"]["seconds"] <= found["barrier"]["seconds"]
    assert picture.read_bytes()[:4] == b"\x89PNG"
