"""Runs in which nobody waits: laws, to the bit, on ragged data with dropout of clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quiverfl as qv
from quiverfl.clock.devices import MICROSECONDS, Devices
from quiverfl.clock.player import Player
from quiverfl.clock.push import Push
from quiverfl.clock.run import make_player
from quiverfl.clock.schedule import Job, Pairs
from quiverfl.clock.settings import Timing
from quiverfl.engine.exchange.fixed_point import UNIT
from quiverfl.engine.shard import Shard
from quiverfl.errors import QuiverError
from quiverfl.runs.config import parse_config
from quiverfl.topologies import random_push

S = MICROSECONDS
BASE: dict[str, dict[str, Any]] = {
    "data": {"name": "digits", "clients": 8, "partition": "dirichlet", "alpha": 0.3},
    "model": {"name": "mlp", "hidden": [8]},
    "method": {"name": "dfedpgp", "shared_epochs": 1},
    "topology": {"neighbors": 3},
    "training": {
        "lr": 0.05, "lr_decay": 0.9, "personal_lr": 0.01, "momentum": 0.9, "batch_size": 32,
    },
    "run": {"seed": 3, "threads": 1},
}  # fmt: skip
SIZED = {**BASE, "data": {**BASE["data"], "samples_per_client": 24, "test_per_client": 8}}
UNEQUAL = {
    "devices": {"step": 0.1, "spread": 10.0, "away": 0.2, "mean_on": 3.0},
    "network": {"up": 2e4, "spread": 4.0, "latency": 0.05},
}


@pytest.mark.parametrize(
    "method",
    [
        {"name": "dfedpgp", "shared_epochs": 1, "step": "paper"},
        {"name": "osgp", "delay": 0, "step": "debiased"},
        {"name": "dfedavgmp"},
        {"name": "local"},
    ],
    ids=lambda method: str(method["name"]),
)
def test_equal_speeds_and_no_latency_are_the_synchronous_run(method: dict[str, Any]) -> None:
    rounds, base = 3, {**SIZED, "method": method}
    peers = {"rounds": rounds, "arithmetic": "peers"}
    wanted = qv.Experiment.of({**base, "run": {**base["run"], **peers}}).run()
    free = {**base, "run": {**base["run"], "executor": "sequential"}}
    made = qv.Experiment.of(free | {"clock": {"waits": "nobody", "until": 1.0}}).simulation
    length = 0.1 * int(made._steps[0])
    timing = Timing(
        Devices(0.1, np.inf, np.inf), waits="nobody",  # type: ignore[arg-type]
        until=rounds * length, evaluate_every=length,
    )  # fmt: skip
    settings = dataclasses.replace(made.settings, rounds=rounds)
    run = dataclasses.replace(made, timing=timing, settings=settings).run()
    assert run.history.equals(wanted.history)
    for own, other in zip(run._shard.state, wanted._shard.state, strict=True):
        assert torch.equal(own, other)
    assert run.rounds["in_flight"].max() == 0
    assert run.rounds["steps"].tolist() == wanted.rounds["steps"].tolist()
    sent = ["sent_bytes", "received_bytes", "network_bytes"]
    assert (run.rounds[sent] == wanted.rounds[sent]).all(axis=None)


def made(
    waits: str, executor: str = "sequential", until: float = 8.0, hidden: int = 8, **clock: Any
) -> Any:
    method = BASE["method"] if waits == "nobody" else {"name": "dfedavgmp"}
    topology = BASE["topology"] if waits == "nobody" else {}
    tree = {**BASE, **UNEQUAL, "method": method, "topology": topology}
    tree["model"] = {"name": "mlp", "hidden": [hidden]}
    tree["run"] = {**BASE["run"], "executor": executor}
    return qv.Experiment.of({**tree, "clock": {"waits": waits, "until": until, **clock}}).simulation


def play(simulation: Any, cuts: list[float], together: bool) -> tuple[Shard, Player]:
    with simulation.compute_settings():
        shard = simulation.shard()
        player = make_player(
            simulation.timing, shard, simulation.topology, simulation._steps, together
        )
        for cut in cuts:
            player.train_until(int(cut * S))
            player.merge_running(int(cut * S))
    return shard, player


@pytest.mark.parametrize(
    ("executor", "hidden"),
    [("sequential", 8), ("sequential", 5), ("vectorized", 8)],  # 5 fill no vector
)
@pytest.mark.parametrize("waits", ["nobody", "pairs"])
def test_batches_and_evaluations_change_no_bit(waits: str, executor: str, hidden: int) -> None:
    simulation = made(waits, executor, hidden=hidden)
    (first, one), *others = [
        play(simulation, cuts, together)
        for cuts, together in (([4.0], False), ([4.0], True), ([1.7, 3.1, 4.0], True))
    ]
    assert set(one.widths) == {1}
    for shard, player in others:
        assert np.mean(player.widths) > 1.3
        assert sum(player.widths) == sum(one.widths)
        for own, other in zip(shard.state, first.state, strict=True):
            assert torch.equal(own, other)


@pytest.mark.parametrize("waits", ["nobody", "pairs"])
def test_other_evaluation_times_change_no_record_of_the_last_one(waits: str) -> None:
    last = []
    for every in (0.5, 8.0):  # jobs are under way at several evaluations, or at one
        run = made(waits, evaluate_every=every).run()
        history = run.history[run.history["round"] == run.history["round"].max()]
        last.append(history.drop(columns="round").reset_index(drop=True))
    assert last[0].equals(last[1])
    local, mixed = (last[0][last[0]["stage"] == stage]["loss"] for stage in ("local", "mixed"))
    assert (local.to_numpy() != mixed.to_numpy()).any()


@pytest.mark.parametrize("waits", ["nobody", "pairs"])
def test_resumed_equals_uninterrupted(waits: str, tmp_path: Path) -> None:
    simulation = made(waits, evaluate_every=2.0)
    taken: list[Any] = []
    settings = dataclasses.replace(simulation.settings, checkpoint_every=1)
    simulation = dataclasses.replace(simulation, settings=settings)
    whole = simulation.run(checkpoint=lambda one: taken.append(one.copy()))
    assert len(taken) == 4
    for checkpoint in (taken[0], taken[2]):
        path = checkpoint.save(tmp_path)
        loaded = type(checkpoint).load(path, checkpoint.history)
        rest = simulation.run(resume=loaded)
        assert rest.history.equals(whole.history)
        for own, other in zip(rest._shard.state, whole._shard.state, strict=True):
            assert torch.equal(own, other)
        costs = ["clock", "jobs", "steps", "network_bytes", "joules", "in_flight", "mu_min"]
        assert rest.rounds[costs].equals(whole.rounds[costs])


def test_a_folder_is_resumed_and_knows_its_clock(tmp_path: Path) -> None:
    tree = {**SIZED, **UNEQUAL, "clock": {"waits": "nobody", "until": 4.0, "evaluate_every": 1.0}}
    tree["run"] = {**BASE["run"], "checkpoint_every": 1}
    experiment = qv.Experiment.of(tree)
    wanted = experiment.run()

    class Enough(qv.Callback):
        def should_stop(self) -> bool:
            return True

    cut = experiment.run(tmp_path / "run", callbacks=[Enough()])
    assert (cut.done_rounds, cut.planned_rounds) == (1, 4)
    rest = experiment.run(tmp_path / "run")
    assert rest.history.equals(wanted.history)
    read = qv.load_run(tmp_path / "run")
    assert read.rounds["clock"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert read.summary["clock"] == 4.0
    assert experiment.method.step == "debiased"  # the default without waiting
    with pytest.raises(QuiverError, match="its seconds are its own"):
        qv.retime(read, Devices.draw(8))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(0.01, 3.0), min_size=6, max_size=6),
    st.floats(10, 1e4),
    st.floats(0, 2),
    st.sampled_from([0.0, 0.3]),
    st.integers(0, 99),
)
def test_mass_is_exact_at_every_instant(
    step: list[float], up: float, latency: float, away: float, seed: int
) -> None:
    from quiverfl.clock.devices import draw_traces

    traces = draw_traces(6, away, 5.0, seed)
    devices = Devices(np.array(step), up, up, latency=latency, traces=traces)  # type: ignore[arg-type]
    schedule = Push(devices, np.full(6, 4), np.full(6, 500), random_push(6, 2, seed=seed))
    seen: list[Job] = []
    for t in range(1, 20):
        seen += schedule.jobs_until(t * S)
        assert sum(schedule.mass()) == 6 * UNIT
        assert all(job.units > 0 for job in schedule.running)
    assert [job.finish for job in seen] == sorted(job.finish for job in seen)


def test_a_schedule_by_hand() -> None:
    """Client 0 trains 1 s, client 1 3 s; a message takes a second; each pushes to the other."""
    devices = Devices(np.array([1.0, 3.0]), 100.0, 1e9)  # type: ignore[arg-type]
    schedule = Push(devices, np.ones(2, np.int64), np.full(2, 100), random_push(2, 1))
    jobs = [(j.client, j.start // S, j.finish // S, j.own, j.gives, j.takes)
            for j in schedule.jobs_until(5 * S)]  # fmt: skip
    assert jobs == [
        (0, 0, 1, 0.5, 1, []),
        (0, 1, 2, 0.5, 1, []),  # its link is free again at 2 s
        (0, 2, 3, 0.5, 1, []),
        (1, 0, 3, 0.5, 1, []),
        (0, 3, 4, 0.5, 1, []),
        (0, 4, 5, 0.5, 1, [(1, 0.5)]),  # from client 1, which sent from 3 to 4 s
    ]
    following = list(schedule.running)[1]
    assert [number for number, _ in following.takes] == [0, 2]  # arrived at 2 and 3 s
    held, flying = schedule.mass()
    assert held + flying == 2 * UNIT


def test_pairs_meet_in_a_drawn_order_and_average() -> None:
    devices = Devices(np.ones(6), 1e9, 1e9)  # type: ignore[arg-type]
    meetings: set[tuple[int, int]] = set()
    schedule = Pairs(devices, np.ones(6, np.int64), np.full(6, 100), seed=1)
    number = {job.number: job.client for job in schedule.running}
    for t in range(1, 40):
        for job in schedule.jobs_until(t * S):
            assert (job.own, job.gives) == (0.5, 1)
        number |= {job.number: job.client for job in schedule.running}
        for job in schedule.running:
            meetings |= {(job.client, number[n]) for n, _ in job.takes}
    assert len(meetings) == 30  # everybody met everybody


def refused() -> Iterator[tuple[dict[str, Any], str]]:
    nobody = {"clock": {"waits": "nobody", "until": 5.0}}
    pairs = {"clock": {"waits": "pairs", "until": 5.0}}
    yield nobody | {"method": {"name": "fedavg"}}, "needs a server, which waits"
    yield nobody | {"method": {"name": "osgp", "delay": 1}}, "set delay = 0"
    yield nobody | {"method": {"name": "dispfl"}}, "Dis-PFL"
    yield nobody | {"topology": {"name": "random_pull", "neighbors": 2}}, "come to nobody twice"
    yield nobody | {"topology": {"neighbors": 2, "participation": 0.5}}, "some clients rest"
    yield nobody | {"topology": {"name": "loss_push", "neighbors": 2}}, "adaptive topology"
    yield nobody | {"compression": {"name": "quantize"}}, "[compression]"
    yield nobody | {"adversary": {"name": "sign_flip"}}, "[adversary]"
    yield nobody | {"privacy": {"name": "update"}}, "[privacy]"
    yield pairs | {"topology": {"name": "random_regular", "neighbors": 2}}, "no graph would be used"
    unseen = {"data": {**SIZED["data"], "unseen": 2}}
    yield nobody | unseen, "are tested in rounds"
    yield nobody | {"run": {"rounds": 7}}, "leave run.rounds out"
    yield {"clock": {"waits": "nobody"}}, "without clock.until"
    yield {"devices": {"spread": 10.0}}, "[devices] without clock.waits"
    yield {"clock": {"waits": "soon"}}, "clock.waits"
    yield {"clock": {"until": "late"}}, "clock.until"
    yield {"clock": {"waits": "graph", "speed": 3}}, "unknown key clock.speed"


@pytest.mark.parametrize(("changed", "sentence"), list(refused()), ids=lambda x: str(x)[:40])
def test_what_cannot_be_timed_is_refused_in_a_sentence(
    changed: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(QuiverError) as error:
        qv.Experiment.of({**SIZED, **changed}).simulation.check()
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_traces_must_last_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / "traces.json"
    own = ", ".join(f'"{i}": [[0, 3]]' for i in range(8))
    path.write_text(f'{{"period": null, "clients": {{{own}}}}}')
    timed = {"devices": {"traces": str(path)}, "clock": {"waits": "nobody", "until": 5.0}}
    with pytest.raises(QuiverError, match=r"ends at 3 s, before clock.until = 5"):
        qv.Experiment.of({**SIZED, **timed}).simulation.check()


def test_runs_without_a_clock_keep_their_identities() -> None:
    """As they were before there was one."""
    assert parse_config({}).identity()[:16] == "44136fa355b3678a"
    assert parse_config(SIZED).identity()[:16] == "10725bab6122c5cc"
    timed = parse_config({**SIZED, "clock": {"waits": "graph"}})
    assert timed.identity() != parse_config(SIZED).identity()


def test_rounds_with_a_clock_are_the_same_rounds_with_times() -> None:
    plain = qv.Experiment.of(SIZED | {"run": {**BASE["run"], "rounds": 3}}).run()
    timed = qv.Experiment.of(
        SIZED | UNEQUAL | {"run": {**BASE["run"], "rounds": 3}, "clock": {"waits": "graph"}}
    )
    run = timed.run()
    assert run.history.equals(plain.history)
    devices = timed.simulation.timing
    assert devices is not None
    assert (
        qv.retime(plain, devices.devices).rounds["clock"].tolist() == run.rounds["clock"].tolist()
    )


@pytest.mark.parametrize("clock", [{"away": "skip"}, {"deadline": 0.4}], ids=["skip", "deadline"])
@pytest.mark.parametrize("name", ["dfedpgp", "dfedavgmp", "fedper"])
def test_rounds_leave_out_who_is_away_or_late_and_resume(name: str, clock: dict[str, Any]) -> None:
    tree = SIZED | UNEQUAL | {"method": {"name": name}, "clock": {"waits": "graph", **clock}}
    tree["devices"] = {**UNEQUAL["devices"], "away": 0.5, "mean_on": 1.0}
    tree["topology"] = {"neighbors": 3, "sampled": 4}
    tree["run"] = {**BASE["run"], "rounds": 4, "checkpoint_every": 1}
    simulation = qv.Experiment.of(tree).simulation
    taken: list[Any] = []
    run = simulation.run(checkpoint=lambda one: taken.append(one.copy()))
    waiting = qv.Experiment.of({**tree, "clock": {"waits": "graph"}}).run()
    assert run.rounds["clock"].iloc[-1] < waiting.rounds["clock"].iloc[-1]
    assert not run.history.equals(waiting.history)
    rest = simulation.run(resume=taken[1])
    assert rest.history.equals(run.history)
    assert rest.rounds["clock"].tolist() == run.rounds["clock"].tolist()


def test_a_run_without_an_end_is_refused() -> None:
    with pytest.raises(QuiverError, match=r"clock\.until = inf: such"):
        parse_config({"clock": {"waits": "nobody", "until": float("inf")}})


def test_a_run_beyond_all_memory_is_refused_before_it_begins() -> None:
    with pytest.raises(QuiverError, match=r"evaluate_every = 1e-07 evaluates .* 100,000 times"):
        parse_config({"clock": {"waits": "nobody", "until": 10.0, "evaluate_every": 1e-7}})
    for clock, step in (({"until": 1e18}, 0.1), ({"until": 1000.0}, 1e-30)):
        tree = {**BASE, "clock": {"waits": "nobody", **clock}, "devices": {"step": step}}
        with pytest.raises(QuiverError, match="local rounds between two of 10 evaluations"):
            qv.Experiment.of(tree).run()
