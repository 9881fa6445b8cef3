"""Devices and traces: drawn, given, converted; and what is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiverfl.clock.devices import MICROSECONDS, NEVER, Devices, Trace, draw_traces
from quiverfl.clock.formats import read_devices, read_traces
from quiverfl.clock.settings import ClockSettings, DeviceSettings, NetworkSettings, make_devices
from quiverfl.errors import QuiverError

S = MICROSECONDS


def test_drawn_devices_have_the_spread_and_the_extremes_that_are_named() -> None:
    made = Devices.draw(1000, step=0.5, spread=10, up=1e6, link_spread=4, seed=3)
    assert made.step.max() == pytest.approx(0.5, rel=0.01)
    assert made.step.max() / made.step.min() == pytest.approx(10, rel=0.01)
    assert made.up.max() / made.up.min() == pytest.approx(4, rel=0.01)
    np.testing.assert_array_equal(made.down, 4 * made.up)
    assert np.median(np.log(made.step)) == pytest.approx(np.log(0.5 / 10**0.5), abs=0.01)
    again = Devices.draw(1000, step=0.5, spread=10, up=1e6, link_spread=4, seed=3)
    np.testing.assert_array_equal(made.step, again.step)
    normal = np.log(Devices.draw(4000, step=2.0, sigma=0.5, seed=1).step)
    assert (normal.mean(), normal.std()) == (
        pytest.approx(np.log(2), abs=0.03),
        pytest.approx(0.5, abs=0.02),
    )


def test_drawn_clients_are_away_for_the_share_that_is_named() -> None:
    traces = draw_traces(200, 0.2, 30.0, seed=1)
    there = [sum(t.ends) - sum(t.begins) for t in traces]
    assert sum(there) / sum(t.period or 0 for t in traces) == pytest.approx(0.8, abs=0.01)
    lengths = np.concatenate([np.subtract(t.ends, t.begins) for t in traces]) / S
    assert lengths.mean() == pytest.approx(30, rel=0.05)


def test_a_trace_pauses_work_and_repeats() -> None:
    trace = Trace.of([[1, 3], [5, 6]], 10, "client 0")
    assert [trace.next_there(t * S) // S for t in (0, 2, 3, 5, 6, 11, 13)] == [
        1,
        2,
        5,
        5,
        11,
        11,
        15,
    ]
    # 2 s of 1…3, 1 s of 5…6, 1 s of 11…13
    assert trace.finish(0, 4 * S) == 12 * S
    ending = Trace.of([[1, 3]], None, "client 0")
    assert ending.finish(0, 2 * S) == 3 * S
    assert ending.finish(0, 2 * S + 1) == ending.next_there(3 * S) == NEVER


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=8).filter(lambda x: len(x) % 2 == 0),
    st.integers(0, 50),
    st.integers(0, 50),
    st.integers(0, 20),
)
def test_work_ends_when_a_clock_that_ticks_says_so(
    lengths: list[int], begin: int, later: int, work: int
) -> None:
    """Against a transcription that looks at every microsecond; who starts earlier ends earlier."""
    edges = np.cumsum(lengths)
    trace = Trace(tuple(edges[:-1:2].tolist()), tuple(edges[1::2].tolist()), int(edges[-1]))

    def is_there(t: int) -> bool:
        return any(b <= t % edges[-1] < e for b, e in zip(trace.begins, trace.ends, strict=True))

    t, left = begin, work
    while not is_there(t):
        t += 1
    while left:
        left -= is_there(t)
        t += 1
    assert trace.finish(begin, work) == t
    assert trace.finish(begin, work) <= trace.finish(begin + later, work)


def test_files_of_our_own(tmp_path: Path) -> None:
    table = tmp_path / "devices.csv"
    table.write_text("client,step,up,down,watts\n1,0.2,100,400,3\n0,0.1,50,200,6\n")
    columns = read_devices(table, 2, 0, None, 1.0)
    assert {name: list(column) for name, column in columns.items()} == {
        "step": [0.1, 0.2], "up": [50, 100], "down": [200, 400], "watts": [6, 3],
    }  # fmt: skip
    traces = tmp_path / "traces.json"
    traces.write_text(json.dumps({"period": 9, "clients": {"0": [[0, 4]], "1": [[1, 2], [3, 9]]}}))
    assert read_traces(traces, 2, 0)[1] == Trace((S, 3 * S), (2 * S, 9 * S), 9 * S)
    made = make_devices(
        DeviceSettings(file=str(table), traces=str(traces)), NetworkSettings(latency=0.5), 2, 0
    )
    assert (made.step.tolist(), made.watts.tolist()) == ([0.1, 0.2], [6, 3])  # type: ignore[union-attr]
    assert (made.latency, made.traces[0].period) == (0.5, 9 * S)


def test_formats_of_other_projects(tmp_path: Path) -> None:
    """One client of each, so that what is drawn is known."""

    def written(name: str, tree: Any, plain: bool = True) -> Path:
        path = tmp_path / name
        path.write_bytes(json.dumps(tree).encode() if plain else pickle.dumps(tree))
        return path

    fedscale = written("fs", {7: {"computation": 10.0, "communication": 8000.0}}, plain=False)
    flash = written("flash", {"g": {"trace_start": 100, "trace_end": 200,
                                    "ready_time": [[90, 110], [150, 160]]}})  # fmt: skip
    behaviour = written(
        "behave", {1: {"active": [5, 50], "inactive": [20], "finish_time": 60}}, plain=False
    )
    mobiperf = written("mp", [{"tcp_speed_results": [1000, 3000]}, {"tcp_speed_results": []}])
    appfl = written("ap", [{"compute_factor": 4.0, "bandwidth": 8.0}])

    def read(path: Path) -> dict[str, float]:
        return {n: float(c[0]) for n, c in read_devices(path, 1, 0, 20, 0.5).items()}

    assert read(fedscale) == {"step": 3 * 20 * 10 / 1000, "up": 1e6, "down": 1e6}
    assert read(mobiperf) == {"step": 0.5, "up": 250_000, "down": 250_000}
    assert read(appfl) == {"step": 2.0, "up": 1024**2, "down": 1024**2}
    assert read_traces(flash, 1, 0)[0] == Trace((0, 50 * S), (10 * S, 60 * S), 100 * S)
    assert read_traces(behaviour, 1, 0)[0] == Trace((5 * S, 50 * S), (20 * S, 60 * S), 60 * S)


def test_a_pickle_can_run_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (mark,))

    path = tmp_path / "devices"
    path.write_bytes(pickle.dumps({0: Evil()}))
    with pytest.raises(QuiverError, match="anything else could run code"):
        read_devices(path, 1, 0, 20, 0.5)
    path.write_bytes(b"\x80\x04damaged")
    with pytest.raises(QuiverError, match="damaged pickle"):
        read_devices(path, 1, 0, 20, 0.5)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Devices(0.1, 0.0, 1.0), "up = 0: it must be above 0"),
        (lambda: Devices([0.1, 0.2], [1.0, -3.0], 1.0), "up of client 1 = -3"),
        (lambda: Devices(0.1, 1.0, 1.0, watts=-5.0), "watts = -5: it must be 0 or more"),
        (lambda: Devices([0.1, 0.2], [1.0] * 3, 1.0), "step has 2 numbers for 3 clients"),
        (lambda: Devices([0.1, 0.2], 1.0, 1.0).check_clients(5), "2 devices for 5 clients"),
        (lambda: Trace.of([], 10, "client 3"), "client 3 is never there"),
        (lambda: Trace.of([[3, 2]], 10, "client 3"), "in order of time"),
        (lambda: Trace.of([[1, 12]], 10, "client 3"), "inside the period"),
        (lambda: draw_traces(3, 1.0, 10.0, 0), "1 is never there"),
        (lambda: DeviceSettings(watts=(5.0, -1.0)), "devices.watts"),
        (lambda: DeviceSettings(spread=3.0, sigma=1.0), "give one of them"),
        (lambda: NetworkSettings(up=0), "network.up = 0: it must be a positive number"),
        (lambda: ClockSettings(waits="nobody"), "clock.until"),
        (lambda: ClockSettings(until=5), "without clock.waits"),
        (lambda: ClockSettings(waits="graph", until=5), "give run.rounds"),
        (lambda: ClockSettings(waits="pairs", until=5, deadline=1), "leave it out"),
        (lambda: ClockSettings(waits="some"), "clock.waits = 'some'"),
    ],
)  # fmt: skip
def test_what_is_refused_in_a_sentence(make: Any, sentence: str) -> None:
    with pytest.raises(QuiverError) as error:
        make()
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    table, traces = tmp_path / "d.csv", tmp_path / "t.json"
    table.write_text("client,step,up,down\n0,1,1,1\n")
    with pytest.raises(QuiverError, match="1 devices for 3 clients"):
        read_devices(table, 3, 0, None, 1.0)
    table.write_text("client,step,up,weight\n0,1,1,1\n")
    with pytest.raises(QuiverError, match="no column 'down'"):
        read_devices(table, 1, 0, None, 1.0)
    table.write_text("client,step,up,down\n0,fast,1,1\n")
    with pytest.raises(QuiverError, match="step = 'fast': it must be a number"):
        read_devices(table, 1, 0, None, 1.0)
    traces.write_text('{"clients": {"0": [[0, 1]]}}')
    with pytest.raises(QuiverError, match="1 traces for 2 clients"):
        read_traces(traces, 2, 0)
    traces.write_text("neither")
    with pytest.raises(QuiverError, match="neither JSON nor a pickle"):
        read_traces(traces, 2, 0)
    with pytest.raises(QuiverError, match="cannot be read"):
        read_devices(tmp_path / "none.csv", 1, 0, None, 1.0)
