"""Twenty and more usual mistakes in Python, each of which ends in a sentence that says what to do.

docs/reference/python.md lists them by these names.
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
from quiverfl.errors import QuiverWarning
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
    "text_for_a_number": (
        lambda: qv.partition("digits", clients="8"),  # type: ignore[arg-type]
        r"clients = '8': give a whole number",
    ),
    "arrays_for_a_data_set": (lambda: qv.partition((X, Y)), r"qv\.load_dataset"),  # type: ignore[arg-type]
    "an_unknown_section": (lambda: qv.Experiment.of({"train": {}}), r"unknown section \[train\]"),
    "an_unknown_key": (lambda: qv.Experiment.of({"run": {"round": 3}}), r"run\.round.*rounds"),
    "a_client_that_is_not_there": (lambda: go().personal(6), r"there are 6 clients, 0 … 5"),
    "a_folder_that_is_no_run": (lambda: qv.load_run("/nowhere"), r"not a run folder"),
    "a_plot_of_no_metric": (lambda: go().plot(metric="f1"), r"no metric 'f1'"),
    "a_plot_into_no_picture": (lambda: go().plot("f1"), r"plot: f1: its name must end in"),
    "a_run_saved_twice": (lambda: _saved_twice(), r"holds a run already"),
    "zero_for_seeds": (
        lambda: qv.compare({}, ["local"], seeds=0),
        r"seeds = 0 is no seed at all.*\[0\]",
    ),
    "words_for_the_seeds_of_a_sweep": (
        lambda: qv.sweep({}, seeds="two", dry_run=True),
        r"seeds = 'two'.*\[0, 1, 2\].*\"0-4\".*how many",
    ),
    "a_name_for_a_compression": (
        lambda: go(compression="quantize"),
        r"compression is 'quantize': give an object, such as qv\.Quantize",
    ),
    "a_class_for_a_compression": (lambda: go(compression=qv.Quantize), r"compression is .*object"),
    "a_dictionary_for_privacy": (lambda: go(privacy={}), r"privacy is a dict.*UpdatePrivacy"),
    "an_attack_for_a_rule": (
        lambda: go(robustness=qv.SignFlip()),
        r"robustness is a SignFlip.*qv\.Balance",
    ),
    "a_name_for_an_adversary": (lambda: go(adversary="noise"), r"adversary is 'noise'.*SignFlip"),
    "a_folder_to_resume": (
        lambda: go(resume="runs/mine"),
        r"resume is a str.*qv\.load_run\(folder\)\.checkpoint\(\)",
    ),
    "a_callback_without_brackets": (
        lambda: go(callbacks=qv.EarlyStopping()),
        r"callbacks is one EarlyStopping: give a list",
    ),
    "a_dictionary_for_settings": (lambda: _settings({}), r"settings is a dict.*rounds=50"),
    "settings_and_options": (
        lambda: go(settings=qv.RunSettings(rounds=1)),
        r"settings or rounds, not both",
    ),
    "one_number_of_epochs_for_all": (
        lambda: go(epochs_per_client=2),
        r"epochs_per_client = 2.*one whole number for each client",
    ),
    "half_an_epoch": (
        lambda: go(epochs_per_client=[1, 2.5, 1, 1, 1, 1]),
        r"epochs_per_client\[1\] = 2\.5: it must be a whole number",
    ),
    "a_number_for_the_personal_part": (
        lambda: qv.Task(TinyModel, personal=2),  # type: ignore[arg-type]
        r"Task\.personal = 2: give names",
    ),
    "a_number_among_the_personal_parts": (
        lambda: qv.Task(TinyModel, personal=("head", 2)),  # type: ignore[arg-type]
        r"Task\.personal = \('head', 2\): give names",
    ),
    "a_name_for_a_client": (
        lambda: go().personal("a"),  # type: ignore[arg-type]
        r"client 'a': there are 6 clients",
    ),
    "a_model_function_that_returns_nothing": (
        lambda: qv.Task(lambda: None),  # type: ignore[arg-type,return-value]
        r"Task\.model returned a NoneType.*nn\.Module",
    ),
    "a_model_function_that_needs_arguments": (
        lambda: qv.Task(nn.Linear),
        r"Task\.model failed .*missing.*without arguments.*lambda",
    ),
    "a_stage_that_is_not_there": (
        lambda: go().plot(stage="locl"),  # type: ignore[arg-type]
        r"stage 'locl'.*did you mean 'local'",
    ),
    "a_name_that_is_too_long": (
        lambda: qv.Experiment.of({"run": {"rounds": 1}}).run("a" * 300),
        r"300 characters is too long",
    ),
    "a_method_in_capital_letters": (
        lambda: qv.Experiment.of({"method": {"name": "DFedPGP"}}),
        r"'DFedPGP'.*did you mean 'dfedpgp'",
    ),
    "a_configuration_for_a_sweep": (
        lambda: qv.sweep({"data": {"clients": 4}}, dry_run=True),
        r"a configuration, not a sweep",
    ),
}


def _settings(settings: Any) -> qv.Run:
    return qv.simulate(
        tiny_task(),
        tiny_data(),
        method=qv.DFedPGP(),
        topology=qv.random_push(clients=6, neighbors=2),
        training=TRAINING,
        settings=settings,
    )


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


def test_what_leaves_nothing_to_look_at_is_warned_of() -> None:
    with pytest.warns(QuiverWarning, match="no client has test data"):
        go(data=qv.FederatedData.from_arrays([(X, Y)] * 6, [(X[:0], Y[:0])] * 6))
    with pytest.warns(QuiverWarning, match="nobody trains"):
        go(rounds=0)


def test_the_documentation_lists_every_mistake() -> None:
    text = (Path(__file__).parents[1] / "docs" / "reference" / "python.md").read_text()
    assert [name for name in MISTAKES if f"`{name}`" not in text] == []


def test_right_data_is_not_refused() -> None:
    assert labelled(Y).complete
    assert labelled(torch.as_tensor(Y)).complete
    squared = lambda outputs, y: ((outputs.mean(dim=1)) - y) ** 2  # noqa: E731
    assert labelled(Y + 0.5, loss=squared, metrics={}).complete
