"""What single methods promise, in exact numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import quiverfl as qv
from quiverfl.methods.masks import erk_counts, regrown
from quiverfl.trees import Layout
from small import CLIENTS, PUSH, REGULAR, STAR, TRAINING, simulate, tiny_data, tiny_task


def test_fedbabus_head_is_bit_identical_after_twenty_rounds_with_decay() -> None:
    method = qv.FedBABU(epochs=1, finetune_epochs=1)
    start = simulate(method, STAR(CLIENTS), rounds=0)
    run = simulate(method, STAR(CLIENTS), rounds=20, evaluate_every=20)
    for client in range(CLIENTS):
        for name, tensor in start.state(0).v.items():
            assert torch.equal(run.state(client).v[name], tensor)
    tuned = dict(run.personal(0).named_parameters())
    assert not torch.equal(tuned["head.weight"], run.state(0).v["head.weight"])


def test_dispfls_density_is_constant_and_its_weights_stay_in_the_mask() -> None:
    start = simulate(qv.DisPFL(epochs=1), REGULAR(CLIENTS), rounds=0)
    run = simulate(qv.DisPFL(epochs=1), REGULAR(CLIENTS), rounds=6)
    moved = 0
    for client in range(CLIENTS):
        before, after = start.state(client), run.state(client)
        for mask, weights in (("mask_u", "u"), ("mask_v", "v")):
            for name, kept in after[mask].items():
                assert kept.sum() == before[mask][name].sum()
                assert ((kept == 0) | (kept == 1)).all()
                assert (after[weights][name][kept == 0] == 0).all()
                moved += int((kept != before[mask][name]).sum())
    assert moved > 0


def test_erk_densities_by_hand() -> None:
    """Two matrices 2×8 and 8×16 and a bias of 4, density 0.5: 148 weights, 74 kept.

    The bias is dense: 70 are left. Raw densities 10/16 and 24/128; with one scale e for both,
    e·10 + e·24 = 70, e = 2.0588: the first would have density 1.287 > 1, so it is dense (16), and
    the second gets 70 - 16 = 54.
    """
    assert erk_counts([(2, 8), (8, 16), (4,)], 0.5) == [16, 54, 4]
    assert erk_counts([(8, 16), (16, 16)], 0.5) == [round(192 * 24 / 56), round(192 * 32 / 56)]
    assert erk_counts([(3, 3), (3,)], 1.0) == [9, 3]
    with pytest.raises(qv.QuiverError, match="density"):
        erk_counts([(2, 2), (40,)], 0.5)


def test_pruning_and_regrowing_by_hand() -> None:
    layout = Layout(("w",), ((8,),))
    weights = torch.tensor([3.0, -0.1, 0.2, 5.0, 0, 0, 0, 0])
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0])
    scores = torch.tensor([0.9, 0.9, 0.9, 0.9, 0.1, 0.7, 0.7, 0.2])
    # half of four: the two smallest go; the best inactive ones come, the tie by index
    assert regrown(layout, weights, mask, scores, 0.5).tolist() == [1, 0, 0, 1, 0, 1, 1, 0]
    # more to regrow than was inactive: then the just pruned, best first
    full = torch.tensor([1.0, 1, 1, 1, 1, 1, 1, 0])
    kept = regrown(layout, weights, full, scores, 0.5)
    assert kept.sum() == 7


def test_osgps_mass_with_messages_in_flight_survives_checkpoint_and_resume(
    tmp_path: Path,
) -> None:
    from quiverfl.engine.checkpoint import Checkpoint
    from quiverfl.engine.history import History

    paths = []
    method = qv.OSGP(epochs=1, delay=2)

    def keep(checkpoint: Checkpoint) -> None:
        paths.append(checkpoint.save(tmp_path))

    whole = simulate(method, PUSH(CLIENTS), rounds=6, checkpoint=keep, checkpoint_every=3)
    half = Checkpoint.load(paths[0], History())
    mass = sum(float(t.sum()) for n, t in half.tensors.items() if n.endswith("/mu"))
    assert mass == pytest.approx(CLIENTS, abs=1e-12)
    assert any(name.startswith("flight/") for name in half.tensors)
    resumed = simulate(method, PUSH(CLIENTS), rounds=6, resume=half)
    for client in range(CLIENTS):
        assert torch.equal(whole.state(client).mu, resumed.state(client).mu)
        for name, tensor in whole.state(client).u.items():
            assert torch.equal(tensor, resumed.state(client).u[name])


class Quadratic(nn.Module):
    """Every client wants its own centre: F_i(p) = ½‖p - c_i‖²; the inputs are the centres."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.zeros(3))
        self.head = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.shared, self.head]) - x


CENTRES = np.arange(30, dtype=np.float64).reshape(6, 1, 5) / 10


def quadratic_run(method: qv.Method, topology: qv.Topology, rounds: int) -> qv.Run:
    pairs = [(centre, np.zeros((1, 1))) for centre in CENTRES]
    task = qv.Task(model=Quadratic, loss=lambda out, _: out.square().sum(dim=-1) / 2, metrics={})
    return qv.simulate(
        task,
        qv.FederatedData.from_arrays(pairs, pairs),
        method=method,
        topology=topology,
        training=qv.Training(lr=0.5, lr_decay=0.97, batch_size=None),
        rounds=rounds,
        dtype=torch.float64,
        threads=1,
    )


@pytest.mark.parametrize("method", [qv.DFedPGP(), qv.DFedAvgMP()])
def test_7_partial_methods_find_the_common_and_the_own_optimum(method: object) -> None:
    topology = qv.full(clients=6)
    run = quadratic_run(method, topology, 200)
    for client in range(6):
        model = dict(run.personal(client).named_parameters())
        shared = torch.from_numpy(CENTRES[:, 0, :3].mean(axis=0))
        torch.testing.assert_close(model["shared"].detach(), shared, rtol=0, atol=1e-2)
        own = torch.from_numpy(CENTRES[client, 0, 3:])
        torch.testing.assert_close(model["head"].detach(), own, rtol=0, atol=1e-2)


@pytest.mark.parametrize(
    ("method", "topology"),
    [
        (qv.FedAvg(), qv.star(clients=6, sampled=6)),
        (qv.DFedAvgM(), qv.full(clients=6)),
        (qv.OSGP(), qv.full(clients=6)),
    ],
)
def test_7_whole_model_methods_find_the_mean(method: object, topology: qv.Topology) -> None:
    run = quadratic_run(method, topology, 200)
    model = dict(run.personal(2).named_parameters())
    mean = torch.from_numpy(CENTRES[:, 0].mean(axis=0))
    found = torch.cat([model["shared"], model["head"]]).detach()
    torch.testing.assert_close(found, mean, rtol=0, atol=1e-2)


@pytest.mark.parametrize("method", [qv.Local(), qv.Ditto(proximal=0.0), qv.DisPFL(density=1.0)])
def test_7_loss_falls_for_the_others(method: object) -> None:
    run = quadratic_run(method, qv.full(clients=6), 40)
    loss = run.history.query("stage == 'local'").groupby("round")["loss"].mean()
    untrained = float((CENTRES**2).sum(axis=-1).mean() / 2)
    assert loss.iloc[-1] < 0.3 * untrained


def test_one_step_by_hand() -> None:
    """One client, one sample, one step: clip, then decay, then η; v at fixed z, then u at new v."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Parameter(torch.tensor(2.0))
            self.head = nn.Parameter(torch.tensor(3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body * self.head * x

    task = qv.Task(model=Product, loss=lambda out, y: (out - y).square() / 2, metrics={})
    data = qv.FederatedData.from_arrays([([1.0], [4.0])] * 2, [([1.0], [4.0])] * 2)
    run = qv.simulate(
        task,
        data,
        method=qv.DFedPGP(personal_epochs=1, shared_epochs=1),
        topology=qv.isolated(clients=2),
        training=qv.Training(
            lr=0.1, personal_lr=0.01, weight_decay=0.5, clip_norm=3.0, batch_size=None
        ),
        rounds=1,
        dtype=torch.float64,
    )
    # v: gradient (6 - 4)·2 = 4, clipped to 3, plus 0.5·3; v = 3 - 0.01·4.5 = 2.955
    # u: gradient (2·2.955 - 4)·2.955 = 5.64405, clipped to 3, plus 0.5·2; u = 2 - 0.1·4 = 1.6
    assert float(run.state(0).v["head"]) == pytest.approx(2.955, abs=1e-12)
    assert float(run.state(0).u["body"]) == pytest.approx(1.6, abs=1e-12)


def test_accounting_by_hand() -> None:
    """35 body and 18 head parameters in float64, six clients, two neighbours."""
    body, head = 35 * 8, 18 * 8
    push = simulate(qv.DFedPGP(shared_epochs=1), PUSH(CLIENTS), rounds=1)
    assert push.rounds["sent_bytes"][0] == CLIENTS * 2 * (body + 8)
    assert push.rounds["network_bytes"][0] == CLIENTS * 2 * (body + 8)
    star = simulate(qv.FedAvg(epochs=1), STAR(CLIENTS), rounds=1)
    assert star.rounds["network_bytes"][0] == 2 * 3 * (body + head + 8)
    assert star.rounds["busiest_bytes"][0] == 2 * 3 * (body + head + 8)
    partial = simulate(qv.FedPer(epochs=1), STAR(CLIENTS), rounds=1)
    assert partial.rounds["network_bytes"][0] == 2 * 3 * (body + 8)
    assert simulate(qv.Local(epochs=1), PUSH(CLIENTS), rounds=1).rounds["sent_bytes"][0] == 0
    steps = [-(-n // 4) for n in (5, 7, 11, 9, 6, 8)]
    assert push.rounds["steps"][0] == 2 * sum(steps)
    sparse = simulate(qv.DisPFL(epochs=1), REGULAR(CLIENTS), rounds=1)
    kept = sum(
        int(mask.sum()) for f in ("mask_u", "mask_v") for mask in sparse.state(0)[f].values()
    )
    assert sparse.rounds["sent_bytes"][0] == CLIENTS * 2 * (kept * 8 + -(-53 // 8))


def test_how_far_clients_are_apart_by_hand() -> None:
    """(1/m) Σ ‖z_i - z̄‖² with z = u / μ; without a mass μ is 1."""
    runs = {
        "mu": simulate(qv.DFedPGP(shared_epochs=1), PUSH(CLIENTS), rounds=2),
        None: simulate(qv.DFedAvgM(epochs=1), REGULAR(CLIENTS), rounds=2),
    }
    for mass, run in runs.items():
        states = [run.state(client) for client in range(CLIENTS)]
        z = torch.stack([torch.cat([leaf.ravel() for leaf in s.u.values()]) for s in states])
        if mass:
            z = z / torch.stack([torch.as_tensor(s[mass]) for s in states]).view(-1, 1)
        apart = (z - z.mean(dim=0)).square().sum() / CLIENTS
        assert apart > 1e-4
        assert run.rounds["consensus"].iloc[-1] == pytest.approx(float(apart), rel=1e-12)


def test_unequal_epochs_replace_those_of_the_phase_that_is_sent() -> None:
    run = simulate(
        qv.FedRep(personal_epochs=2, shared_epochs=9),
        qv.star(clients=CLIENTS, sampled=CLIENTS),
        rounds=1,
        epochs_per_client=[1, 2, 3, 0, 1, 1],
    )
    steps = np.array([-(-n // 4) for n in (5, 7, 11, 9, 6, 8)])
    assert run._shard.steps.tolist() == (steps * (2 + np.array([1, 2, 3, 0, 1, 1]))).tolist()


def test_own_starts_differ_and_common_starts_agree() -> None:
    own = simulate(qv.FedBABU(), STAR(CLIENTS), rounds=0, common_init=False)
    common = simulate(qv.FedBABU(), STAR(CLIENTS), rounds=0)
    assert not torch.equal(own.state(0).u["body.0.weight"], own.state(1).u["body.0.weight"])
    assert torch.equal(own.state(0).v["head.weight"], own.state(1).v["head.weight"])
    assert torch.equal(common.state(0).u["body.0.weight"], common.state(1).u["body.0.weight"])


def test_the_public_example() -> None:
    run = qv.simulate(
        tiny_task(),
        tiny_data(),
        method=qv.DFedPGP(personal_epochs=1, shared_epochs=1),
        topology=qv.random_push(clients=6, neighbors=2, seed=0),
        training=TRAINING,
        rounds=12,
        seed=0,
        dtype=torch.float32,
        device="cpu",
        threads=1,
        epochs_per_client=None,
    )
    assert list(run.history.columns[:3]) == ["round", "stage", "client"]
    assert {"accuracy", "loss"} <= set(run.history)
    assert len(run.history) == 12 * 2 * 6
    assert set(run.summary["stages"]["mixed"]) == {"last", "best", "last10"}
    assert {"mean", "std", "worst10"} <= set(run.summary["stages"]["local"]["last"])
    assert {"bytes", "steps", "seconds"} <= set(run.summary)
    model, before = run.personal(3), run.personal(3, stage="local")
    assert model(torch.zeros(1, 6)).shape == (1, 3)
    assert not torch.equal(model.body[0].weight, before.body[0].weight)  # type: ignore[index, union-attr]
    assert torch.equal(model.head.weight, before.head.weight)  # type: ignore[union-attr]
    assert set(run.state(0).u) == {"body.0.weight", "body.0.bias"}
    assert set(run.state(0)["v"]) == {"head.weight", "head.bias"}
    assert run.state(0).mu.shape == ()
