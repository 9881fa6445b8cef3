"""Mistakes a person makes, and the sentence that helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import quiverfl as qv
from quiverfl.runs.config import parse_config
from quiverfl.runs.config_files import load_config
from small import CLIENTS, PUSH, STAR, TRAINING, TinyModel, simulate, tiny_data, tiny_task


def pairs(**changes: Any) -> list[tuple[Any, Any]]:
    x, y = np.zeros((4, 6)), np.zeros(4, dtype=int)
    return [(x, y), (changes.get("x", x), changes.get("y", y))]


def test_a_client_without_training_data() -> None:
    with pytest.raises(qv.QuiverError, match="client 1 has no training data"):
        qv.FederatedData.from_arrays(pairs(x=np.zeros((0, 6)), y=np.zeros(0, dtype=int)), pairs())


def test_labels_out_of_range_name_client_and_label() -> None:
    with pytest.raises(qv.QuiverError, match=r"client 1: label 7 is out of range"):
        qv.FederatedData.from_arrays(pairs(y=np.full(4, 7)), pairs(), classes=3)
    with pytest.raises(qv.QuiverError, match=r"client 1: label -1 is out of range"):
        qv.FederatedData.from_arrays(pairs(y=np.full(4, -1)), pairs())
    data = qv.FederatedData.from_arrays(pairs(y=np.full(4, 5)), pairs())
    with pytest.raises(qv.QuiverError, match=r"labels go up to 5 but the model has 3 outputs"):
        qv.simulate(
            tiny_task(),
            data,
            method=qv.Local(),
            topology=qv.isolated(clients=2),
            training=TRAINING,
            rounds=1,
        )


def test_not_a_number_in_the_data() -> None:
    with pytest.raises(qv.QuiverError, match="client 1: the inputs hold NaN"):
        qv.FederatedData.from_arrays(pairs(x=np.full((4, 6), np.nan)), pairs())


def test_lengths_and_shapes_that_do_not_fit() -> None:
    with pytest.raises(qv.QuiverError, match="4 inputs but 3 targets"):
        qv.FederatedData.from_arrays(pairs(y=np.zeros(3, dtype=int)), pairs())
    with pytest.raises(qv.QuiverError, match=r"inputs of shape \(5,\)"):
        qv.FederatedData.from_arrays(pairs(x=np.zeros((4, 5))), pairs())
    with pytest.raises(qv.QuiverError, match="train has 2 clients and test has 1"):
        qv.FederatedData.from_arrays(pairs(), pairs()[:1])


def test_a_model_whose_batch_norm_needs_all_processes() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4), nn.Linear(4, 3))

    with pytest.raises(qv.QuiverError, match=r"'1' is a SyncBatchNorm.*qv\.group_norm"):
        qv.Task(model=normed, personal=("2",))


def test_personal_prefixes_that_match_nothing_or_everything() -> None:
    with pytest.raises(qv.QuiverError, match=r"'hed' matches no parameter.*body, head"):
        qv.Task(model=TinyModel, personal=("hed",))
    with pytest.raises(qv.QuiverError, match="match every parameter"):
        qv.Task(model=TinyModel, personal=("body", "head"))


def test_more_neighbours_than_clients() -> None:
    with pytest.raises(qv.QuiverError, match="neighbors"):
        qv.random_push(clients=5, neighbors=5, seed=0)


def test_a_method_that_carries_no_mass_on_a_push_graph() -> None:
    for method in (qv.FedAvg(), qv.DFedAvgM(), qv.DFedAvgMP(), qv.DisPFL(), qv.Ditto()):
        with pytest.raises(qv.QuiverError, match=r"carries no push-sum mass.*random_pull"):
            simulate(method, PUSH(CLIENTS))


def test_a_delay_without_mass_is_refused() -> None:
    class Late(qv.DFedAvgM):
        name, title, delay = "late", "Late", 1

    with pytest.raises(qv.QuiverError, match=r"delay of 1 would shrink.*osgp"):
        simulate(Late(), qv.full(clients=CLIENTS))


def test_a_graph_with_neither_rows_nor_columns_that_sum_to_one() -> None:
    topology = qv.custom(lambda t: np.eye(CLIENTS) / 2, CLIENTS)
    with pytest.raises(qv.QuiverError, match="sum to 1"):
        simulate(qv.DFedPGP(), topology)


def test_numbers_that_make_no_sense() -> None:
    settings: list[dict[str, Any]] = [
        {"lr": 0.0},
        {"lr": float("nan")},
        {"momentum": 1.0},
        {"weight_decay": -1.0},
        {"batch_size": 0},
        {"clip_norm": 0.0},
    ]
    for wrong in settings:
        with pytest.raises(qv.QuiverError, match=f"training.{next(iter(wrong))}"):
            qv.Training(**wrong)
    with pytest.raises(qv.QuiverError, match="shared_epochs = -1"):
        qv.DFedPGP(shared_epochs=-1)
    with pytest.raises(qv.QuiverError, match=r"density = 0"):
        qv.DisPFL(density=0)
    with pytest.raises(qv.QuiverError, match=r"weighting = 'sample'.*did you mean 'samples'"):
        qv.METHODS["fedavg"](weighting="sample")
    with pytest.raises(qv.QuiverError, match="topology has 5 clients and the data 6"):
        simulate(qv.DFedPGP(), PUSH(5))
    with pytest.raises(qv.QuiverError, match="epochs_per_client has 2 entries for 6"):
        simulate(qv.DFedPGP(), PUSH(CLIENTS), epochs_per_client=[1, 2])
    with pytest.raises(qv.QuiverError, match=r"executor = 'vectorised'"):
        simulate(qv.DFedPGP(), PUSH(CLIENTS), executor="vectorised")
    with pytest.raises(qv.QuiverError, match=r"client 6: there are 6 clients"):
        simulate(qv.DFedPGP(), PUSH(CLIENTS), rounds=0).personal(6)


def test_inputs_that_the_model_does_not_take() -> None:
    data = qv.FederatedData.from_arrays(
        [(np.zeros((4, 7)), np.zeros(4, dtype=int))] * 2,
        [(np.zeros((4, 7)), np.zeros(4, dtype=int))] * 2,
    )
    with pytest.raises(qv.QuiverError, match=r"does not take inputs of shape \(7,\)"):
        qv.simulate(
            tiny_task(),
            data,
            method=qv.Local(),
            topology=qv.isolated(clients=2),
            training=TRAINING,
            rounds=1,
        )


def test_a_diverging_run_stops_with_round_and_client() -> None:
    training = qv.Training(lr=1e200, batch_size=4, weight_decay=1.0)
    with pytest.raises(qv.Diverged, match=r"round \d+, client \d+: .* is not finite") as caught:
        simulate(qv.FedAvg(epochs=5), STAR(CLIENTS), training=training, rounds=5)
    assert caught.value.client in range(CLIENTS)


def test_a_loss_that_is_not_a_number_stops_the_run_too() -> None:
    """Parameters may stay finite while the loss they give does not."""

    def broken(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(outputs, targets, reduction="none")
        return torch.where(loss.detach() < 0.9, torch.nan, 0.0) + loss

    task = qv.Task(
        model=TinyModel, loss=lambda o, y: broken(o, y) if not o.requires_grad else o[:, 0]
    )
    with pytest.raises(qv.Diverged, match=r"round 1, client \d: the test loss is not finite"):
        qv.simulate(
            task,
            tiny_data(),
            method=qv.Local(epochs=1),
            topology=qv.isolated(clients=CLIENTS),
            training=TRAINING,
            rounds=2,
        )


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"method": {"name": "dfedpg"}}, r"unknown method; did you mean 'dfedpgp'"),
        ({"method": {"shared_epoch": 3}}, r"method.shared_epoch; did you mean 'shared_epochs'"),
        ({"trainig": {}}, r"unknown section \[trainig\]; did you mean 'training'"),
        ({"training": {"learning_rate": 1}}, "unknown key training.learning_rate"),
        ({"training": {"lr": "fast"}}, r"training.lr = 'fast'"),
        ({"training": {"lr": -1}}, r"training.lr = -1"),
        ({"run": {"roundz": 3}}, r"run.roundz; did you mean 'rounds'"),
        ({"topology": {"name": "rng"}}, r"unknown topology; did you mean 'ring'"),
        ({"overrides": {"fedavgg": {}}}, r"overrides.fedavgg.*did you mean 'fedavg'"),
        ({"overrides": {"fedavg": {"training": {"lrr": 1}}}}, r"training.lrr; did you mean 'lr'"),
        ({"data": 3}, r"data must be a section"),
        ({"run": {"rounds": True}}, r"run.rounds = true: .*cannot be true or false.*such as 20"),
        ({"training": {"lr": False}}, r"training.lr = false: .*cannot be true or false"),
        ({"data": {"validation": True}}, r"data.validation = true: .*cannot be true or false\."),
        (
            {"training": {"batch_size": "al"}},
            r"training.batch_size = 'al': .*at least 1, or \"all\"",
        ),
        ({"training": {"batch_size": 0}}, r"training.batch_size = 0: .*at least 1, or \"all\""),
        ({"training": {"batch_size": 2.5}}, r"training.batch_size = 2.5: .*or \"all\""),
        ({"run": {"rounds": -1}}, r"run.rounds = -1: it must be a whole number ≥ 0"),
        ({"run": {"executor": "fast"}}, r"run.executor = 'fast'"),
    ],
)
def test_a_configuration_with_a_mistake(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(qv.QuiverError, match=message):
        parse_config(tree)


def test_a_configuration_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(qv.QuiverError, match="no such configuration file"):
        load_config(tmp_path / "absent.toml")
    (tmp_path / "broken.toml").write_text("[data\n")
    with pytest.raises(qv.QuiverError, match="not valid TOML"):
        load_config(tmp_path / "broken.toml")
    (tmp_path / "fine.toml").write_text("")
    with pytest.raises(qv.QuiverError, match=r"section.key=value"):
        load_config(tmp_path / "fine.toml", ["training.lr"])
    with pytest.raises(qv.QuiverError, match=r"unknown key training.lrr"):
        load_config(tmp_path / "fine.toml", ["training.lrr=1"])


def test_a_file_as_windows_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xef\xbb\xbf[run]\r\nrounds = 7\r\n")
    assert load_config(path).run.rounds == 7
    path.write_bytes("[run]\nrounds = 7\n# über\n".encode("cp1252"))
    with pytest.raises(qv.QuiverError, match=r"mine.toml: .*line 3 is not UTF-8.*save it as UTF-8"):
        load_config(path)
    path.write_text("[run]\nrounds = 7\n# über\n", encoding="utf-8")
    assert load_config(path).run.rounds == 7


def test_one_personal_part_may_be_written_without_brackets() -> None:
    written = parse_config({"model": {"personal": "head"}})
    assert written.model.personal == ("head",)
    assert written.identity() == parse_config({"model": {"personal": ["head"]}}).identity()


def test_what_is_known_is_said_in_the_same_words() -> None:
    with pytest.raises(
        qv.QuiverError,
        match=r"unknown section \[xyz\]; known are adversary, ",
    ):
        parse_config({"xyz": {}})
    with pytest.raises(qv.QuiverError, match=r"did you mean 'data'\? Known are adversary, "):
        parse_config({"dat": {}})


def test_the_slips_of_a_first_try() -> None:
    data, topology = tiny_data(), PUSH(CLIENTS)
    settings: dict[str, Any] = {"training": TRAINING, "rounds": 1}
    slips: list[tuple[tuple[Any, ...], str]] = [
        ((TinyModel, data, qv.DFedPGP(), topology), "wrap the model"),
        ((tiny_task(), [], qv.DFedPGP(), topology), "from_arrays"),
        ((tiny_task(), data, qv.DFedPGP, topology), r"such as qv.DFedPGP\(\)"),
        ((tiny_task(), data, "dfedpgp", topology), r"such as qv.DFedPGP\(\)"),
        ((tiny_task(), data, qv.DFedPGP(), lambda t: None), "such as qv.random_push"),
    ]
    for arguments, words in slips:
        task, data_, method, graph = arguments
        with pytest.raises(qv.QuiverError, match=words):
            qv.simulate(task, data_, method=method, topology=graph, **settings)
    with pytest.raises(qv.QuiverError, match=r"function that returns a fresh nn\.Module"):
        qv.Task(model=TinyModel())


def test_local_models_that_were_not_kept() -> None:
    run = simulate(qv.DFedPGP(shared_epochs=1), PUSH(CLIENTS), rounds=1, keep_local=False)
    with pytest.raises(qv.QuiverError, match="keep_local=True"):
        run.personal(0, stage="local")
    assert run.personal(0) is not None


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    simulate(qv.DFedPGP(shared_epochs=1), PUSH(CLIENTS), rounds=1, common_init=False)
    assert torch.equal(before, torch.random.get_rng_state())
    assert len(tiny_data().train.y) == sum((5, 7, 11, 9, 6, 8))
