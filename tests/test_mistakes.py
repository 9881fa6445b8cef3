"""Twenty and more usual mistakes in Python, each of which ends in a sentence that says what to do.

docs/python.md lists them by these names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import quiverfl as qv
from small import TRAINING, TinyModel, tiny_data, tiny_task

X = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
Y = np.array([0, 1, 2, 0, 1, 2])


def go(task: Any = None, data: Any = None, **options: Any) -> qv.Run:
    settings: dict[str, Any] = {
        "method": qv.DFedPGP(),
        "topology": qv.random_push(clients=6, neighbors=2, seed=0),
        "training": TRAINING,
        "rounds": 1,
        **options,
    }
    return qv.simulate(task or tiny_task(), tiny_data() if data is None else data, **settings)


def labelled(y: Any, **task: Any) -> qv.Run:
    data = qv.FederatedData.from_arrays([(X, y)] * 6, [(X, y)] * 6)
    return go(qv.Task(model=TinyModel, **task), data)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "one_hot_labels": (lambda: labelled(np.eye(3)[Y]), r"one-hot.*argmax"),
    "labels_in_a_column": (lambda: labelled(Y[:, None]), r"\(n, 1\).*reshape"),
    "float_labels": (lambda: labelled(Y.astype(float)), r"float64.*whole numbers"),
    "text_labels": (lambda: labelled(np.array(list("abcabc"))), r"text.*return_inverse"),
    "regression_with_the_default_loss": (
        lambda: labelled(Y + 0.5),
        r"not classes.*regression.*loss",
    ),
    "loss_that_is_a_mean": (
        lambda: labelled(Y, loss=nn.CrossEntropyLoss()),
        r"one number per sample.*reduction='none'",
    ),
    "loss_of_another_shape": (
        lambda: labelled(Y, loss=nn.MSELoss(reduction="none")),
        r"loss.*outputs of shape \(3,\)",
    ),
    "labels_beyond_the_outputs": (lambda: labelled(Y + 2), r"labels go up to 4 .* 3 outputs"),
    "not_a_pair": (
        lambda: qv.FederatedData.from_arrays([X], [X]),
        r"client 0: give a pair",
    ),
    "no_test_data": (
        lambda: qv.FederatedData.from_arrays([(X, Y)], None),  # type: ignore[arg-type]
        r"test is a NoneType.*empty test pair",
    ),
    "a_dictionary_for_training": (lambda: go(training={}), r"training is a dict.*qv\.Training"),
    "a_model_for_a_task": (lambda: go(TinyModel()), r"task is a TinyModel.*qv\.Task"),
    "an_instance_for_a_factory": (
        lambda: qv.Task(model=TinyModel()),  # type: ignore[arg-type]
        r"function that returns a fresh",
    ),
    "arrays_for_data": (lambda: go(data=(X, Y)), r"data is a tuple.*from_arrays"),
    "a_class_for_a_method": (lambda: go(method=qv.DFedPGP), r"method object"),
    "a_name_for_a_method": (lambda: go(method="dfedpgp"), r"method object"),
    "a_name_for_a_topology": (lambda: go(topology="ring"), r"topology is a str.*qv\.random_push"),
    "a_topology_of_another_size": (lambda: go(topology=qv.ring(clients=5)), r"5 clients.*6"),
    "rounds_that_are_no_number": (lambda: go(rounds=2.5), r"rounds = 2\.5.*whole number"),
    "dtype_by_name": (lambda: go(dtype="float32"), r"dtype = 'float32'.*torch\.float32"),
    "batch_size_all": (
        lambda: qv.Training(batch_size="all"),  # type: ignore[arg-type]
        r"batch_size = 'all'.*None in Python",
    ),
    "lr_that_is_text": (lambda: qv.Training(lr="a"), r"lr = 'a'"),  # type: ignore[arg-type]
    "an_unknown_option": (lambda: go(round=3), r"no option 'round'.*rounds"),
    "a_function_for_a_callback": (lambda: go(callbacks=[print]), r"callback .*qv\.Callback"),
    "a_class_for_a_callback": (lambda: go(callbacks=[qv.EarlyStopping]), r"is a class"),
    "a_metric_that_is_not_there": (
        lambda: go(callbacks=[qv.EarlyStopping("acuracy", 2)]),
        r"no metric 'acuracy'.*'accuracy'",
    ),
    "an_unknown_partition": (
        lambda: qv.partition("digits", "dirichlt"),
        r"unknown partition 'dirichlt'.*'dirichlet'",
    ),
    "arrays_for_a_data_set": (lambda: qv.partition((X, Y)), r"qv\.load_dataset"),  # type: ignore[arg-type]
    "an_unknown_section": (lambda: qv.Experiment.of({"train": {}}), r"unknown section \[train\]"),
    "an_unknown_key": (lambda: qv.Experiment.of({"run": {"round": 3}}), r"run\.round.*rounds"),
    "a_client_that_is_not_there": (lambda: go().personal(6), r"there are 6 clients, 0 … 5"),
    "a_folder_that_is_no_run": (lambda: qv.load_run("/nowhere"), r"not a run folder"),
    "a_plot_of_no_metric": (lambda: go().plot("f1"), r"no metric 'f1'"),
    "a_run_saved_twice": (lambda: _saved_twice(), r"holds a run already"),
}


def _saved_twice() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        run = go()
        run.save(Path(place) / "a")
        run.save(Path(place) / "a")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_in_a_sentence(name: str) -> None:
    mistake, words = MISTAKES[name]
    with pytest.raises(qv.QuiverError, match=f"(?s){words}") as caught:
        mistake()
    assert str(caught.value).rstrip().endswith((".", "?"))
    assert "\n" not in str(caught.value)


def test_the_documentation_lists_every_mistake() -> None:
    text = (Path(__file__).parents[1] / "docs" / "python.md").read_text()
    assert [name for name in MISTAKES if f"`{name}`" not in text] == []


def test_right_data_is_not_refused() -> None:
    assert labelled(Y).complete
    assert labelled(torch.as_tensor(Y)).complete
    squared = lambda outputs, y: ((outputs.mean(dim=1)) - y) ** 2  # noqa: E731
    assert labelled(Y + 0.5, loss=squared, metrics={}).complete
