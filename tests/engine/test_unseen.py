"""Clients that nobody has seen: what they are handed and fit, and where the numbers stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import Tensor, nn

import quiverfl as qv
from quiverfl.engine.checks.probe import ModelProbe
from quiverfl.engine.unseen import find_sent_parts
from quiverfl.errors import Diverged, QuiverError
from quiverfl.methods.state import select_fields
from quiverfl.peer.setup import check_shared_config
from quiverfl.results.groups import group_runs
from quiverfl.results.report.page import make_report
from quiverfl.results.run_files import read_run
from quiverfl.results.tables import unseen_table
from quiverfl.runs.config import parse_config
from quiverfl.runs.experiment import Experiment
from quiverfl.sweeps.estimate import trial
from quiverfl.task import Params
from quiverfl.topologies.graph import Graph
from small import METHODS, TinyModel, tiny_data, tiny_task

AWAY = [1, 4]
STAY = [0, 2, 3, 5]
TRAINING = qv.Training(
    lr=0.2, personal_lr=0.1, momentum=0.9, weight_decay=1e-3, batch_size=None, clip_norm=1.0
)


def run_with_unseen(method: Any, topology: Any, rounds: int = 2, **options: Any) -> qv.Run:
    how = {key: options.pop(key) for key in ("start", "epochs", "part", "when") if key in options}
    return qv.simulate(
        tiny_task(),
        tiny_data().hold_out(AWAY, **how),
        method=method,
        topology=topology,
        **{
            "training": TRAINING,
            "rounds": rounds,
            "seed": 3,
            "dtype": torch.float64,
            "threads": 1,
            **options,
        },
    )


def figures(run: qv.Run, stage: str, metric: str = "loss") -> list[float]:
    history = run.history
    last = history[(history["stage"] == stage) & (history["round"] == history["round"].max())]
    return last.sort_values("client")[metric].tolist()


# Transcriptions in plain PyTorch: one client after the other, without anything of the engine.


def make_module(params: Params) -> TinyModel:
    module = TinyModel().double()
    module.load_state_dict(
        {name: leaf.double() for name, leaf in tiny_task().named_params(params).items()}
    )
    return module


def test_loss(module: TinyModel, client: int) -> float:
    x, y = tiny_data().test.of_client(client)
    assert isinstance(x, Tensor)
    assert isinstance(y, Tensor)
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(module(x.double()), y))


test_loss.__test__ = False  # type: ignore[attr-defined]


def fit(module: TinyModel, client: int, part: str, epochs: int, lr: float) -> None:
    """Whole-batch SGD with momentum, the gradient clipped over what is trained, then decay."""
    x, y = tiny_data().train.of_client(client)
    assert isinstance(x, Tensor)
    assert isinstance(y, Tensor)
    chosen = module.head if part == "personal" else module
    parameters = list(chosen.parameters())
    optimizer = torch.optim.SGD(
        parameters, lr=lr, momentum=TRAINING.momentum, weight_decay=TRAINING.weight_decay
    )
    for _ in range(epochs):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(x.double()), y).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


def close(values: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-12)


def start_params() -> Params:
    return Params(*(part.double() for part in tiny_task().initial_params(3)))


PUSH = qv.random_push(clients=4, neighbors=2, seed=0)
STAR = qv.star(clients=4, sampled=2, seed=0)


def test_under_dfedpgp_a_newcomer_gets_a_debiased_body_and_fits_a_fresh_head() -> None:
    run = run_with_unseen(qv.DFedPGP(shared_epochs=1), PUSH, start="average", epochs=3)
    state = run._shard.state
    body = (state.u / state.mu[:, None]).mean(dim=0)
    assert float((state.mu - 1).abs().max()) > 0.1, "de-biasing would not be seen"
    before, after = [], []
    for client in AWAY:
        module = make_module(Params(body, start_params().personal))
        before.append(test_loss(module, client))
        fit(module, client, "personal", 3, lr=0.1)
        after.append(test_loss(module, client))
    close(figures(run, "unseen"), before)
    close(figures(run, "fitted"), after)


def test_under_fedavg_a_newcomer_gets_the_global_model_and_fine_tunes_all_of_it() -> None:
    run = run_with_unseen(qv.FedAvg(epochs=1), STAR, epochs=2, start="nearest")
    state = run._shard.state
    assert torch.equal(state.u[0], state.u[3])
    before, after = [], []
    for client in AWAY:
        module = make_module(Params(state.u[0], state.v[0]))
        before.append(test_loss(module, client))
        fit(module, client, "whole", 2, lr=0.2)
        after.append(test_loss(module, client))
    close(figures(run, "unseen"), before)
    close(figures(run, "fitted"), after)


def test_fedavg_can_fit_the_head_alone() -> None:
    run = run_with_unseen(qv.FedAvg(epochs=1), STAR, epochs=2, part="personal")
    state = run._shard.state
    after = []
    for client in AWAY:
        module = make_module(Params(state.u[0], state.v[0]))
        fit(module, client, "personal", 2, lr=0.1)
        after.append(test_loss(module, client))
    close(figures(run, "fitted"), after)


def test_local_hands_nothing_over_so_that_a_newcomer_trains_alone() -> None:
    run = run_with_unseen(qv.Local(epochs=1), qv.isolated(clients=4), epochs=4)
    after = []
    for client in AWAY:
        module = make_module(start_params())
        fit(module, client, "whole", 4, lr=0.2)
        after.append(test_loss(module, client))
    close(figures(run, "fitted"), after)


def fit_to_prototypes(module: TinyModel, client: int, epochs: int, state: Any) -> None:
    """Whole batches of equation 8 of FedProto, whose λ is 1, with the run's SGD."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
    x, y = tiny_data().train.of_client(client)
    for _ in range(epochs):
        optimizer.zero_grad()
        features = module.body(x.double())
        away = (features - state.prototypes[0][y]).square().mean(dim=1)
        loss = torch.nn.functional.cross_entropy(module.head(features), y, reduction="none")
        (loss + state.known[0][y] * away).mean().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()


def test_under_fedproto_a_newcomer_gets_the_prototypes_and_trains_a_model_with_them() -> None:
    run = run_with_unseen(qv.FedProto(epochs=1), STAR, epochs=3)
    state = run._shard.state
    assert bool(state.known.any())
    before, after = [], []
    for client in AWAY:
        module = make_module(start_params())
        before.append(test_loss(module, client))
        fit_to_prototypes(module, client, 3, state)
        after.append(test_loss(module, client))
    close(figures(run, "unseen"), before)
    close(figures(run, "fitted"), after)


def test_prototypes_have_no_mean_without_a_server() -> None:
    ring = qv.ring(clients=4)
    assert len(figures(run_with_unseen(qv.FedProto(epochs=1), ring), "fitted")) == 2
    with pytest.raises(QuiverError, match=r'"average": FedProto hands over prototypes, known, of'):
        run_with_unseen(qv.FedProto(epochs=1), ring, start="average")


def test_the_global_model_is_that_of_a_client_that_was_online() -> None:
    """Clients 0 and 1 are offline in the last round, and keep an older model of the server."""

    def server(round: int) -> Graph:
        online = np.array([round == 0, round == 0, True, True])
        rows = np.where(online[:, None], online / online.sum(), np.eye(4))
        return Graph(sparse.csr_array(rows), online, hub=True)

    run = run_with_unseen(qv.FedAvg(epochs=1), qv.custom(server, clients=4), epochs=0)
    state = run._shard.state
    assert not torch.equal(state.u[0], state.u[2])
    newest = make_module(Params(state.u[2], state.v[2]))
    close(figures(run, "unseen"), [test_loss(newest, client) for client in AWAY])
    assert figures(run, "unseen") == figures(run, "fitted")


def test_random_is_one_participant_and_the_same_in_every_round() -> None:
    run = run_with_unseen(qv.DFedPGP(shared_epochs=1), PUSH, when="evaluated", epochs=1)
    state = run._shard.state
    bodies = state.u / state.mu[:, None]
    for place, client in enumerate(AWAY):
        losses = [
            test_loss(make_module(Params(body, start_params().personal)), client) for body in bodies
        ]
        assert min(abs(loss - figures(run, "unseen")[place]) for loss in losses) < 1e-12
    again = run_with_unseen(qv.DFedPGP(shared_epochs=1), PUSH, when="last", epochs=1)
    assert figures(again, "unseen") == figures(run, "unseen")
    rounds = run.history[run.history["stage"] == "unseen"]["round"]
    assert sorted(set(rounds)) == [0, 1]


def test_nearest_is_the_participant_whose_model_fits_the_training_data_best() -> None:
    run = run_with_unseen(qv.DFedPGP(shared_epochs=1), PUSH, start="nearest", epochs=0)
    state = run._shard.state
    bodies = state.u / state.mu[:, None]
    expected = []
    for client in AWAY:
        x, y = tiny_data().train.of_client(client)
        assert isinstance(x, Tensor)
        assert isinstance(y, Tensor)
        losses = []
        for body, head in zip(bodies, state.v, strict=True):
            module = make_module(Params(body, head))
            with torch.no_grad():
                losses.append(float(torch.nn.functional.cross_entropy(module(x.double()), y)))
        nearest = int(np.argmin(losses))
        module = make_module(Params(bodies[nearest], start_params().personal))
        expected.append(test_loss(module, client))
    close(figures(run, "unseen"), expected)


def test_fedbabu_fits_by_its_own_fine_tuning_under_the_common_head() -> None:
    method = qv.FedBABU(epochs=1, finetune_epochs=2, finetune_lr=0.05)
    run = run_with_unseen(method, STAR)
    state = run._shard.state
    close(
        figures(run, "unseen"),
        [test_loss(make_module(Params(state.u[0], start_params().personal)), c) for c in AWAY],
    )
    more = run_with_unseen(method, STAR, epochs=6)
    assert figures(more, "unseen") == figures(run, "unseen")
    assert figures(more, "fitted") != figures(run, "fitted")


def test_participants_are_as_if_the_others_did_not_exist() -> None:
    held = run_with_unseen(qv.DFedPGP(shared_epochs=1), PUSH, when="evaluated")
    alone = qv.simulate(
        tiny_task(),
        tiny_data().select(STAY),
        method=qv.DFedPGP(shared_epochs=1),
        topology=PUSH,
        training=TRAINING,
        rounds=2,
        seed=3,
        dtype=torch.float64,
        threads=1,
    )
    for mine, theirs in zip(held._shard.state, alone._shard.state, strict=True):
        assert torch.equal(mine, theirs)
    own = held.history[held.history["stage"].isin(["local", "mixed"])].reset_index(drop=True)
    assert own.equals(alone.history)


def test_executors_agree() -> None:
    loss = {
        name: figures(
            run_with_unseen(
                qv.DFedPGP(shared_epochs=1),
                PUSH,
                executor=name,
                training=qv.Training(lr=0.1, batch_size=3),
            ),
            "fitted",
        )
        for name in ("vectorized", "sequential")
    }
    close(loss["vectorized"], loss["sequential"])


SENT = {
    "local": (False, False),
    "fedproto": (False, False),
    **dict.fromkeys(("fedper", "fedrep", "fedbabu", "dfedavgmp", "dfedpgp"), (True, False)),
    **dict.fromkeys(("fedavg", "ditto", "osgp", "dispfl", "scaffold"), (True, True)),
}


@pytest.mark.parametrize("method", [row[0] for row in METHODS], ids=lambda m: m.title)
def test_what_a_method_sends_is_found_out(method: Any) -> None:
    """By NaN; here by whether a message changes when the part does."""
    probe = ModelProbe.from_data(tiny_task(), tiny_data(), torch.float64)
    state = probe.first_state(method)
    sent = method.message(state)
    changes = []
    for role in ("shared", "personal"):
        name = next(iter(select_fields(state, role)), None)
        other = (
            {}
            if name is None
            else method.message(state._replace(**{name: getattr(state, name) + 1.0}))
        )
        changes.append(any(not torch.equal(sent[key], other[key]) for key in other))
    assert find_sent_parts(method, probe) == tuple(changes)
    assert SENT.get(method.name, tuple(changes)) == tuple(changes)


ONE_EACH = {row[0].name: row for row in METHODS}


@pytest.mark.parametrize("name", sorted(ONE_EACH))
def test_every_method_has_both_numbers(name: str) -> None:
    method, graphs = ONE_EACH[name]
    unused = {key: getattr(qv.Training(), key) for key in method.unused}
    settings = {"lr": 0.1, "batch_size": 4, **unused}
    run = run_with_unseen(method, graphs[0](4), rounds=1, training=qv.Training(**settings))
    assert len(figures(run, "unseen", "accuracy")) == len(figures(run, "fitted", "accuracy")) == 2


# From a configuration to a folder, and what is read from it.


def configure(**data: Any) -> dict[str, Any]:
    return {
        "data": {"name": "digits", "clients": 8, "samples_per_client": 20, **data},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"batch_size": 10},
        "run": {"rounds": 2, "threads": 1, "checkpoint_every": 1},
    }


def test_numbers_stand_in_history_summary_table_and_report(tmp_path: Path) -> None:
    experiment = Experiment.of(configure(unseen=3, unseen_epochs=1))
    assert experiment.data.clients == 5
    run = experiment.run(tmp_path / "run")
    result = read_run(tmp_path / "run")
    assert result.clients == 5
    fitted = result.values("fitted", "accuracy")
    assert fitted.shape == (1, 3)
    assert fitted.index.tolist() == [1]
    summary = run.summary["unseen"]["stages"]
    assert summary["fitted"]["last"]["mean"] == pytest.approx(float(fitted.iloc[0].mean()))
    assert set(run.summary["stages"]) == {"local", "mixed"}
    groups = group_runs([result])
    table = unseen_table(groups)
    assert table is not None
    assert "Clients nobody has seen" in table.title
    assert f"{100 * float(fitted.iloc[0].mean()):.2f}" in str(table)
    assert table.title in make_report(groups)
    with np.load(tmp_path / "run" / "partition.npz") as partition:
        own = set(partition["train_indices"].tolist())
        assert len(partition["unseen_train_counts"]) == 3
        assert not own & set(partition["unseen_train_indices"].tolist())


def test_a_run_without_them_has_no_such_table(tmp_path: Path) -> None:
    Experiment.of(configure()).run(tmp_path / "run")
    assert unseen_table(group_runs([read_run(tmp_path / "run")])) is None


def test_a_resumed_run_has_the_same_numbers(tmp_path: Path) -> None:
    config = configure(unseen=3, unseen_when="evaluated")
    whole = Experiment.of(config).run(tmp_path / "whole").history
    calls: list[int] = []

    class Breaks(qv.Callback):
        def on_round_end(self, record: dict[str, Any]) -> None:
            calls.append(record["round"])
            if record["round"] == 1:
                raise RuntimeError("power cut")

    with pytest.raises(QuiverError, match="power cut"):
        Experiment.of(config).run(tmp_path / "cut", callbacks=[Breaks()])
    resumed = Experiment.of(config).run(tmp_path / "cut").history
    assert calls == [0, 1]
    assert resumed.equals(whole)


def test_the_time_of_a_run_with_them_is_estimated() -> None:
    config = parse_config(configure(unseen=[0, 5, 6], unseen_epochs=1))
    assert trial(config, qv.load_dataset("digits")) > 0


def test_attackers_numbers_are_not_those_of_unseen_clients_with_the_same_number() -> None:
    sections = configure(unseen=3)
    run = Experiment.of(
        {
            **sections,
            "topology": {"name": "random_push", "neighbors": 2},
            "adversary": {"name": "sign_flip", "share": 0.4},
        }
    ).run()
    assert run.attackers
    expected = run.history[run.history["stage"] == "fitted"]["accuracy"].mean()
    assert run.summary["unseen"]["stages"]["fitted"]["last"]["mean"] == pytest.approx(expected)


def test_a_configuration_without_them_keeps_its_identity() -> None:
    plain = parse_config(configure())
    assert parse_config(configure(unseen=None)).identity() == plain.identity()
    assert parse_config(configure(unseen=3)).identity() != plain.identity()
    held = {parse_config(configure(unseen=[1, 2], unseen_start=s)).identity() for s in STARTS}
    assert len(held) == len(STARTS)


STARTS = ("random", "average", "nearest")


def test_owners_are_held_out_by_name() -> None:
    found = qv.load_dataset("digits")
    everybody = qv.partition(found, "natural")
    name = everybody.names[4]
    held = qv.partition(found, "natural", unseen=[name], unseen_start="average")
    assert held.unseen is not None
    assert held.unseen.data.names == (name,)
    assert held.unseen.start == "average"
    assert name not in held.names
    assert len(held.names) == len(everybody.names) - 1
    x, _ = held.unseen.data.train.of_client(0)
    y, _ = everybody.train.of_client(4)
    assert torch.equal(x, y)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"unseen": 8}, "data.unseen = 8: of 8 clients 1 … 7 can be held out"),
        ({"unseen": 0}, "1 … 7 can be held out"),
        ({"unseen": []}, "it is empty"),
        ({"unseen": [1, 1]}, "one of them is there twice"),
        ({"unseen": [9]}, "there is no client 9; there are 8, 0 … 7"),
        ({"unseen": ["anna"]}, "these clients have no names"),
        ({"unseen": True}, "data.unseen = true: it cannot be true or false"),
        ({"unseen": 2, "unseen_start": "closest"}, "data.unseen_start"),
        ({"unseen": 2, "unseen_epochs": -1}, "data.unseen_epochs = -1: it must be a whole number"),
        ({"unseen_epochs": 3}, "data.unseen_epochs needs data.unseen"),
        ({"unseen": 2.5}, "data.unseen = 2.5: input"),
    ],
)
def test_bad_input_is_one_sentence(data: dict[str, Any], words: str) -> None:
    with pytest.raises(QuiverError) as caught:
        Experiment.of(configure(**data))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


SILENT = """
from dataclasses import dataclass
import quiverfl as qv

@dataclass(frozen=True)
class Silent(qv.Local):
    name, title, topology = "silent", "Silent", "star"

    def message(self, state):
        return {"n": state.u.new_ones(())}

    def merge(self, state, mixed):
        return state
"""


def test_what_cannot_work_is_refused_before_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unseen_method.py").write_text(SILENT)
    monkeypatch.syspath_prepend(tmp_path)
    for sections, words in (
        ({"method": {"name": "unseen_method:Silent"}}, "Silent sends no parameters"),
        (
            {"privacy": {"name": "update"}, "topology": {"name": "random_push", "neighbors": 2}},
            "would carry no noise",
        ),
        (
            {"model": {"name": "mlp", "personal": []}, "method": {"name": "fedavg"}},
            "nothing in this model is personal",
        ),
    ):
        part = {"unseen_part": "personal"} if "model" in sections else {}
        with pytest.raises(QuiverError, match=words):
            Experiment.of({**configure(unseen=2, **part), **sections}).run(tmp_path / "run")
        assert not (tmp_path / "run" / "config.json").exists()


def test_peers_cannot_test_others() -> None:
    with pytest.raises(QuiverError, match=r"data.unseen between peers"):
        check_shared_config(parse_config(configure(unseen=2)))


def test_a_client_without_test_data_is_no_number_and_all_of_them_are_refused() -> None:
    pairs = [(np.ones((4, 6)) * i, np.arange(4) % 3) for i in range(4)]
    empty = (np.ones((0, 6)), np.arange(0))
    data = qv.FederatedData.from_arrays(pairs, [*pairs[:3], empty])
    with pytest.raises(QuiverError, match="none of the 1 unseen clients has test data"):
        data.hold_out([3])
    with pytest.raises(QuiverError, match="held out of this data before"):
        data.hold_out([0]).hold_out([0])


def test_a_batch_of_one_sample_in_batch_norm_is_refused_before_the_first_round() -> None:
    pairs = [(np.ones((n, 6), dtype=np.float32), np.arange(n) % 3) for n in (12, 12, 12, 7)]
    data = qv.FederatedData.from_arrays(pairs, pairs).hold_out([3])
    task = qv.Task(
        lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), personal="2"
    )
    with pytest.raises(QuiverError, match="unseen client 0 has 7 training samples"):
        qv.simulate(
            task, data, method=qv.FedPer(), training=qv.Training(batch_size=6), rounds=1
        )  # fmt: skip


def test_a_fit_that_diverges_names_the_client() -> None:
    with pytest.raises(Diverged, match="the test loss of unseen client 0"):
        run_with_unseen(
            qv.DFedPGP(shared_epochs=0, personal_epochs=0),
            PUSH,
            part="whole",
            epochs=60,
            training=qv.Training(lr=1e30, weight_decay=0.1, batch_size=None),
        )
