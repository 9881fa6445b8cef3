"""What single methods promise, in exact numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import quiverfl as qv
from quiverfl.methods.dispfl import erk_counts, regrow_mask
from quiverfl.methods.fedala import ALAState
from quiverfl.runs.compare import check_methods
from quiverfl.runs.config import parse_config
from quiverfl.trees import Layout
from small import CLIENTS, PUSH, REGULAR, STAR, TRAINING, TinyModel, simulate, tiny_data, tiny_task


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
    assert regrow_mask(layout, weights, mask, scores, 0.5).tolist() == [1, 0, 0, 1, 0, 1, 1, 0]
    # more to regrow than was inactive: then the just pruned, best first
    full = torch.tensor([1.0, 1, 1, 1, 1, 1, 1, 0])
    kept = regrow_mask(layout, weights, full, scores, 0.5)
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


def quadratic_run(
    method: qv.Method,
    topology: qv.Topology,
    rounds: int,
    training: qv.Training = qv.Training(lr=0.5, lr_decay=0.97, batch_size=None),
) -> qv.Run:
    pairs = [(centre, np.zeros((1, 1))) for centre in CENTRES]
    task = qv.Task(model=Quadratic, loss=lambda out, _: out.square().sum(dim=-1) / 2, metrics={})
    return qv.simulate(
        task,
        qv.FederatedData.from_arrays(pairs, pairs),
        method=method,
        topology=topology,
        training=training,
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


def test_7_corrections_take_kgt_to_the_optimum_that_local_steps_miss() -> None:
    """On a ring, at a constant rate; their mean stays 0 in every round."""
    mean = torch.from_numpy(CENTRES[:, 0].mean(axis=0))
    apart = []
    for method in (qv.KGT(epochs=3), qv.DFedAvgM(epochs=3)):
        run = quadratic_run(method, qv.ring(clients=6), 100, qv.Training(lr=0.1, batch_size=None))
        model = dict(run.personal(2).named_parameters())
        found = torch.cat([model["shared"], model["head"]]).detach()
        apart.append(float((found - mean).norm()))
        if method.name == "kgt":
            corrections = run._shard.state.correction_u
            assert float(corrections.mean(dim=0).abs().max()) < 1e-14 < float(corrections.norm())
    assert apart[0] < 1e-6
    assert apart[1] > 1e-2


@pytest.mark.parametrize(
    ("alias", "name"), [("dfedalt", "dfedavgmp"), ("fedalt", "fedrep"), ("fedsim", "fedper")]
)
def test_another_name_for_a_method_gives_its_run(alias: str, name: str) -> None:
    assert type(qv.METHODS.find(alias)()) is type(qv.METHODS[name]())
    one, other = (parse_config({"method": {"name": which}}) for which in (alias, name))
    assert one == other == parse_config({}).for_method(alias)
    assert check_methods(["local", alias]) == ["local", name]


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


def test_scaffolds_control_variates_are_kept_without_a_step_and_their_mean_is_the_servers() -> None:
    """c = the mean of all c_i in every round (Karimireddy et al. 2020), also with idle clients."""
    everybody = qv.star(clients=CLIENTS, sampled=CLIENTS)
    for rounds in (1, 3):
        run = simulate(
            qv.SCAFFOLD(), everybody, rounds=rounds, epochs_per_client=[1, 2, 3, 0, 1, 1]
        )
        shard = run._shard
        control, server = shard.state.control_u, shard.state.server_u
        assert (control[3] == 0).all()
        assert (control[[0, 1, 2, 4, 5]].abs().amax(dim=1) > 1e-3).all()
        torch.testing.assert_close(
            server, control.mean(dim=0).expand_as(server), rtol=0, atol=1e-12
        )
        assert shard.steps[3] == 0


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


def one_sample_each(sizes: tuple[int, ...] = (4, 4)) -> tuple[qv.Task, qv.FederatedData]:
    """Least squares on w ∈ R¹ with the gradient w - a: clients of these sizes want a = 1, 2, …"""

    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(1, 1, bias=False)
            self.body.weight.data.zero_()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w: torch.Tensor = self.body(x)
            return w

    def loss(w: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return (w - a).square().sum(dim=-1) / 2

    pairs = [(np.ones((n, 1)), np.full((n, 1), 1.0 + i)) for i, n in enumerate(sizes)]
    data = qv.FederatedData.from_arrays(train=pairs, test=pairs)
    return qv.Task(model=Weight, personal=(), loss=loss, metrics={}), data


def shared_numbers(run: qv.Run, field: str) -> list[float]:
    values = [run.state(client)[field] for client in range(len(run._shard.ids))]
    return [float(v["body.weight"] if isinstance(v, dict) else v) for v in values]


def test_scaffolds_control_variates_have_clipping_and_decay_in_them() -> None:
    """By hand: two clients that want 1 and 2, one step a round from w = 0."""
    task, data = one_sample_each()
    clip, decay, eta = 0.5, 0.1, 0.2
    training = qv.Training(lr=eta, batch_size=None, clip_norm=clip, weight_decay=decay)
    options = {"method": qv.SCAFFOLD(epochs=1), "topology": qv.star(clients=2, sampled=2)}
    options |= {"training": training, "dtype": torch.float64, "threads": 1}
    one, two = (qv.simulate(task, data, rounds=rounds, **options) for rounds in (1, 2))

    def stepped(w: float, a: float, own: float, server: float) -> tuple[float, float]:
        g = (w - a) - own + server
        g = max(-clip, min(clip, g)) + decay * w  # decay behind the clipped, corrected gradient
        y = w - eta * g
        return y, own - server + (w - y) / eta

    ends = [stepped(0.0, a, 0.0, 0.0) for a in (1.0, 2.0)]
    w, controls = sum(y for y, _ in ends) / 2, [c for _, c in ends]
    assert controls == pytest.approx([-clip, -clip])  # the gradients were -1 and -2
    assert shared_numbers(one, "control_u") == pytest.approx(controls, abs=1e-14)
    server = sum(controls) / 2
    ends = [stepped(w, a, c, server) for a, c in zip((1.0, 2.0), controls, strict=True)]
    assert shared_numbers(two, "control_u") == pytest.approx([c for _, c in ends], abs=1e-14)
    assert shared_numbers(two, "u") == pytest.approx([sum(y for y, _ in ends) / 2] * 2, abs=1e-14)


@pytest.mark.parametrize(
    "kind", [lambda **o: qv.PFedMe(steps=1, **o), lambda **o: qv.PerFedAvg(epochs=1, **o),
             lambda **o: qv.APFL(epochs=1, **o)], ids=["pfedme", "perfedavg", "apfl"]
)  # fmt: skip
def test_their_means_are_by_sample_counts_and_plain_on_request(kind: Any) -> None:
    """Two clients of 4 and 12 samples: every client ends at (4 w₁ + 12 w₂)/16, or (w₁ + w₂)/2."""
    task, data = one_sample_each((4, 12))
    options = {"training": qv.Training(lr=0.1, batch_size=None), "rounds": 1}
    options |= {"dtype": torch.float64, "threads": 1}
    apart = qv.simulate(task, data, method=kind(), topology=qv.isolated(clients=2), **options)
    own = shared_numbers(apart, "u")
    assert own[0] != own[1]
    star = qv.star(clients=2, sampled=2)
    weighted, plain = (
        shared_numbers(qv.simulate(task, data, method=method, topology=star, **options), "u")
        for method in (kind(), kind(weighting="uniform"))
    )
    assert weighted == pytest.approx([(4 * own[0] + 12 * own[1]) / 16] * 2, abs=1e-14)
    assert plain == pytest.approx([(own[0] + own[1]) / 2] * 2, abs=1e-14)


def test_fedprotos_prototypes_weigh_samples_and_not_clients() -> None:
    """Clients with 1 and 3 samples of a class: the global prototype is the mean of all four."""
    method = qv.FedProto()
    sums, counts = torch.tensor([[2.0]]), torch.tensor([1.0])
    others, held = torch.tensor([[30.0]]), torch.tensor([3.0])
    zero = torch.zeros(1)
    state = method.init(tiny_task(), _start_of_features())._replace(
        prototypes=torch.zeros(1, 1), known=zero
    )
    mixed = {"sums": (sums + others) / 2, "counts": (counts + held) / 2}
    assert method.merge(state, mixed).prototypes.tolist() == [[8.0]]  # plain: (2 + 10) / 2 = 6


def test_fedproto_pulls_every_samples_feature() -> None:
    """Features 1 and 3 of a class whose prototype is 2: their mean lies on it, and yet they are
    pulled: the term is ((1 - 2)² + (3 - 2)²)/2 = 1, the distance of the means would be 0."""
    task = qv.Task(
        model=lambda: nn.Linear(1, 1),
        personal=(),
        loss=lambda out, y: 0 * out[:, 0],
        metrics={},
    )
    train, _ = qv.FedProto(proximal=1.0).phases(task)
    seen = qv.ModelOutputs(outputs=torch.zeros(2, 1), features=torch.tensor([[1.0], [3.0]]))
    state = (
        qv.FedProto()
        .init(task, _start_of_features())
        ._replace(prototypes=torch.tensor([[2.0]]), known=torch.ones(1))
    )
    terms = train.loss.function(seen, torch.zeros(2, dtype=torch.int64), state, ())
    assert terms.tolist() == [1.0, 1.0]


def _start_of_features() -> qv.Start:
    """One class, one feature."""
    point = qv.Params(torch.zeros(1), torch.zeros(0))
    return qv.Start(point, point, 1, np.random.default_rng(0), (1,), (1,))


def test_apfls_alpha_moves_once_a_round() -> None:
    """α₁ = α₀ - η ⟨v - w, ∇F(v̄)⟩ at the start of the round, however many epochs follow."""
    task, data = one_sample_each()
    options = {"topology": qv.star(clients=2, sampled=2), "dtype": torch.float64, "threads": 1}
    options |= {"training": qv.Training(lr=0.1, batch_size=1)}
    alphas = []
    for epochs in (1, 4):
        first, second = (
            qv.simulate(task, data, method=qv.APFL(epochs=epochs), rounds=r, **options)
            for r in (1, 2)
        )
        assert shared_numbers(first, "alpha") == [0.5, 0.5]  # v = w at the start
        own, w = shared_numbers(first, "own_u"), shared_numbers(first, "u")
        slopes = [(v - u) * ((v + u) / 2 - a) for v, u, a in zip(own, w, (1.0, 2.0), strict=True)]
        expected = [0.5 - 0.1 * slope for slope in slopes]
        assert shared_numbers(second, "alpha") == pytest.approx(expected, abs=1e-14)
        alphas.append(expected)
    assert alphas[0] != pytest.approx(alphas[1], abs=1e-4)


def test_fedrods_heads_are_one_linear_layer() -> None:
    """The logits of two heads add up to one head's only there."""
    task = qv.Task(model=TinyModel, personal=("body.0",))
    point = qv.Params(torch.zeros(task.shared_layout.size), torch.zeros(task.personal_layout.size))
    start = qv.Start(point, point, 1, np.random.default_rng(0), (6,), (3,))
    with pytest.raises(qv.QuiverError, match="must be one linear layer"):
        qv.FedRoD().init(task, start)
    task = qv.Task(TinyModel, personal=("head",), loss=lambda outputs, y: outputs.sum(dim=1))
    point = qv.Params(torch.zeros(task.shared_layout.size), torch.zeros(task.personal_layout.size))
    start = qv.Start(point, point, 1, np.random.default_rng(0), (5,), (3,))
    with pytest.raises(qv.QuiverError, match="would be that of the personal head alone"):
        qv.FedRoD().init(task, start)


def test_fedalas_weights_by_hand() -> None:
    """One head weight: own 0, received 2, wanted 1: W moves by η · 2 · (v̂ - 1) and is cut."""
    method = qv.FedALA(epochs=0, weight_epochs=1, weight_lr=0.1)
    learn, cut = method.phases(tiny_task())[0].phases
    own, received, share = torch.tensor([0.0]), torch.tensor([2.0]), torch.ones(1)
    state = ALAState(torch.zeros(0), received, own, share, torch.ones(()))
    for expected in (0.8, 0.68):
        at = learn.gradient_at(qv.Params(state.u, share), state._replace(share=share)).personal
        slope = learn.gradient(qv.Params(torch.zeros(0), at - 1.0), None, state).personal
        share = cut.step(state._replace(share=share - 0.1 * slope), None).share
        assert share.tolist() == pytest.approx([expected])
    assert cut.step(state._replace(share=torch.tensor([1.5])), None).share.tolist() == [1.0]
