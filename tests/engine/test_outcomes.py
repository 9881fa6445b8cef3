"""What comes out of `simulate`: models that take the user's data, checkpoints, partial runs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import quiverfl as qv
from quiverfl.data.dataset import Dataset
from quiverfl.data.federated import make_federated
from quiverfl.data.partition import make_partition
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.models import make_model
from quiverfl.runs.simulate import _useful_threads
from small import CLIENTS, PUSH, SIZES, STAR, TRAINING, simulate, states, tiny_task


def pictures(dtype: Any) -> Dataset:
    """Two classes of pictures, dark and bright; floats far from 0 and 1 where not bytes."""
    random = np.random.default_rng(0)
    y = random.integers(0, 2, 120)
    level = np.where(y, 200, 60)[:, None, None, None] + random.normal(0, 20, (120, 1, 6, 6))
    x = level.clip(0, 255).astype(np.uint8) if dtype == np.uint8 else level.astype(np.float32)
    return Dataset("pictures", x, y, x, y, 2, ("dark", "bright"), (0.5,), (0.25,))


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_personal_model_takes_what_the_data_look_like(dtype: Any) -> None:
    dataset = pictures(dtype)
    if dtype == np.float32:
        dataset = Dataset(**{**vars(dataset), "mean": (130.0,), "std": (70.0,)})
    data = make_federated(dataset, make_partition(dataset, "iid", 4, 0))
    run = qv.simulate(
        qv.Task(lambda: make_model("mlp", (1, 6, 6), 2, hidden=(8,))),
        data,
        method=qv.DFedPGP(),
        topology=qv.random_push(4, 2),
        training=qv.Training(lr=0.1, batch_size=8),
        rounds=5,
    )
    recorded = run.history.query("stage == 'mixed' and round == 4").set_index("client")["accuracy"]
    shares = make_partition(dataset, "iid", 4, 0).test
    for client in range(4):
        raw, labels = dataset.test_x[shares[client]], dataset.test_y[shares[client]]
        model = run.personal(client)
        right = (model(torch.from_numpy(raw)).argmax(dim=1).numpy() == labels).mean()
        assert right == pytest.approx(recorded[client])
        if dtype == np.uint8:  # also the same pictures on the scale of [0, 1]
            again = model(torch.from_numpy(raw.astype(np.float32) / 255))
            torch.testing.assert_close(again, model(torch.from_numpy(raw)), rtol=0, atol=1e-4)
    assert recorded.mean() > 0.9


def test_checkpoints_can_be_kept_and_resumed_from_while_runs_go_on() -> None:
    kept: list[Checkpoint] = []
    whole = simulate(
        qv.OSGP(epochs=1, delay=2),
        PUSH(CLIENTS),
        rounds=6,
        checkpoint=kept.append,
        checkpoint_every=2,
    )
    rows, final, summary = len(whole.history), states(whole), whole.summary
    for checkpoint in (kept[0], kept[0], kept[1]):
        resumed = simulate(qv.OSGP(epochs=1, delay=2), PUSH(CLIENTS), rounds=6, resume=checkpoint)
        assert all(torch.equal(a, b) for a, b in zip(states(resumed), final, strict=True))
        assert resumed.history.equals(whole.history)
    assert len(whole.history) == rows
    assert whole.summary == summary


EXPLOSIVE = qv.Training(lr=1e4, weight_decay=1.0, batch_size=4)
"""Every step multiplies the parameters by ten thousand."""


def test_a_run_that_diverges_leaves_what_it_had() -> None:
    with pytest.raises(qv.Diverged) as caught:
        simulate(qv.DFedPGP(), PUSH(CLIENTS), rounds=60, training=EXPLOSIVE)
    run = caught.value.run
    assert isinstance(run, qv.Run)
    assert len(run.rounds) == caught.value.round
    run.personal(0)


def test_an_interrupted_run_leaves_what_it_had() -> None:
    class Impatient:
        def on_evaluation(self, *_: Any) -> None: ...

        def on_round_end(self, record: dict[str, Any]) -> None:
            if record["round"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        simulate(qv.DFedPGP(), PUSH(CLIENTS), rounds=9, recorder=Impatient())
    assert isinstance(caught.value, qv.Interrupted)
    assert len(caught.value.run.rounds) == 3
    assert caught.value.run.summary["stages"]["mixed"]["last"]["round"] == 2


def test_small_work_is_done_by_one_thread_and_torch_keeps_its_setting() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert _useful_threads(tiny_task(), CLIENTS, max(SIZES), TRAINING) == 1
        wide = qv.Task(lambda: make_model("mlp", (6,), 3, hidden=(2000, 2000)))
        large = qv.Training(batch_size=None)
        assert _useful_threads(wide, CLIENTS, 200, large) == 2
        simulate(qv.FedAvg(), STAR(CLIENTS), rounds=1, threads=None)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_unknown_options_of_simulate_are_refused_with_the_nearest() -> None:
    with pytest.raises(qv.QuiverError, match="no option 'thread'; did you mean 'threads'"):
        simulate(qv.FedAvg(), STAR(CLIENTS), thread=1)
    for wrong in ({"rounds": 2.5}, {"seed": "a"}, {"dtype": "float32"}, {"checkpoint_every": 0}):
        with pytest.raises(qv.QuiverError, match=next(iter(wrong))):
            simulate(qv.FedAvg(), STAR(CLIENTS), **wrong)
    with pytest.raises(qv.QuiverError, match="training is a dict"):
        simulate(qv.FedAvg(), STAR(CLIENTS), training={})


def test_a_run_says_what_it_is() -> None:
    run = simulate(qv.FedAvg(), STAR(CLIENTS), rounds=1)
    assert repr(run).startswith("<Run of FedAvg: clients 6, rounds 1, local accuracy 0.")


def test_a_task_says_what_it_is_without_addresses() -> None:
    assert repr(tiny_task()) == (
        "<Task with TinyModel: parameters 53, personal head (18), loss cross_entropy, "
        "metrics accuracy>"
    )
    alone = qv.Task(lambda: torch.nn.Linear(2, 1), (), torch.nn.MSELoss(reduction="none"), {})
    assert repr(alone) == (
        "<Task with Linear: parameters 3, personal nothing (0), loss MSELoss, metrics none>"
    )


def test_the_public_names_are_all_there() -> None:
    code = "import quiverfl as q; [getattr(q, n) for n in q.__all__]; print(len(q.__all__))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 60
