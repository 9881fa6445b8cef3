"""Random numbers in a model: keyed per client, round, phase and step; dropout as it should be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quiverfl as qv
from quiverfl.engine.local.model_rng import KeyedRandomMode
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.shard import Shard
from quiverfl.seeds import key_hashes
from small import CLIENTS, PUSH, TRAINING, tiny_data


class Model(nn.Module):
    """A body with something in it that draws, then a head."""

    def __init__(self, drop: nn.Module | None = None) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.drop = nn.Identity() if drop is None else drop
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.drop(torch.tanh(self.body(x))))
        return logits


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.4, self.training)


class Planes(nn.Module):
    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        planes: Tensor = self.drop(x.view(len(x), 2, 4))
        return planes.flatten(1)


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        words = x.view(len(x), 2, 4)
        if self.fused:
            dropped = 0.3 if self.training else 0.0
            found = F.scaled_dot_product_attention(words, words, words, dropout_p=dropped)
        else:
            found, _ = self.attention(words, words, words, need_weights=False)
        return x + found.flatten(1)


class Noise(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        drawn = {
            "rand_like": lambda: torch.rand_like(x),
            "randn_like": lambda: torch.randn_like(x),
            "rand": lambda: torch.rand(len(x), 1),
            "randn": lambda: torch.randn((x.shape[0], 8), dtype=x.dtype),
            "bernoulli": lambda: torch.bernoulli(torch.full_like(x, 0.7)),
            "drop_path": lambda: x.new_empty(len(x), 1).bernoulli_(0.8) / 0.8,
            "uniform_": lambda: torch.empty_like(x).uniform_(-1, 1),
            "normal_": lambda: torch.empty_like(x).normal_(0, 0.1),
        }
        return x * drawn[self.kind]()


DRAWING: dict[str, Any] = {
    "nn.Dropout": lambda: nn.Dropout(0.5),
    "F.dropout": Functional,
    "in place": lambda: nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.2, inplace=True)),
    "Dropout1d": lambda: Planes(nn.Dropout1d(0.5)),
    "AlphaDropout": lambda: nn.AlphaDropout(0.3),
    "FeatureAlphaDropout": lambda: Planes(nn.FeatureAlphaDropout(0.3)),
    "attention layer": lambda: Attention(fused=False),
    "attention": lambda: Attention(fused=True),
    **{
        kind: lambda kind=kind: Noise(kind) for kind in ("rand_like", "randn_like", "rand", "randn")
    },
    **{kind: lambda kind=kind: Noise(kind) for kind in ("bernoulli", "drop_path")},
    **{kind: lambda kind=kind: Noise(kind) for kind in ("uniform_", "normal_")},
}


def run(drop: Any, method: Any = None, **options: Any) -> qv.Run:
    settings = {"rounds": 2, "seed": 3, "dtype": torch.float64, "threads": 1, **options}
    return qv.simulate(
        qv.Task(lambda: Model(drop())),
        tiny_data(),
        method=method or qv.DFedPGP(personal_epochs=1, shared_epochs=2),
        topology=PUSH(CLIENTS) if method is None else qv.random_regular(CLIENTS, 2, 0),
        training=TRAINING,
        **settings,
    )


def apart(one: qv.Run, other: qv.Run) -> float:
    pairs = zip(one._shard.state, other._shard.state, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("kind", DRAWING)
def test_both_executors_draw_the_same_and_it_is_at_work(kind: str) -> None:
    """Batches are ragged here, so padded where clients are stacked."""
    before = torch.random.get_rng_state()
    stacked = run(DRAWING[kind], executor="vectorized")
    alone = run(DRAWING[kind], executor="sequential")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert apart(stacked, alone) < 1e-12
    assert apart(stacked, run(DRAWING[kind], executor="vectorized")) == 0
    without = run(nn.Identity)
    assert stacked.history["loss"].iloc[-1] != without.history["loss"].iloc[-1]


@pytest.mark.parametrize(
    "method", [qv.DFedSAM(epochs=1), qv.PerFedAvg(epochs=1), qv.PFedMe(steps=3), qv.APFL(epochs=1)]
)
def test_methods_with_several_gradients_a_step_draw_the_same_everywhere(method: Any) -> None:
    both = [run(DRAWING["nn.Dropout"], method, executor=e) for e in ("vectorized", "sequential")]
    assert apart(*both) < 1e-12


def test_nothing_is_dropped_in_use() -> None:
    found = run(DRAWING["nn.Dropout"])
    model, x = found.personal(0), torch.randn(4, 6, dtype=torch.float64)
    assert torch.equal(model(x), model(x))
    data = tiny_data()
    logits = model(data.test.x[: int(data.test.sizes[0])])
    loss = F.cross_entropy(logits, data.test.y[: len(logits)])
    last = found.history.query("round == 1 and stage == 'mixed' and client == 0")["loss"]
    assert loss.item() == pytest.approx(float(last.iloc[0]), abs=1e-12)


def test_a_client_draws_the_same_wherever_it_is_hosted() -> None:
    data, task = tiny_data(), qv.Task(lambda: Model(nn.Dropout(0.5)))
    settings = RunSettings(rounds=2, seed=3, dtype=torch.float64)
    method = qv.DFedPGP(shared_epochs=2)
    together = Shard(task, data, method, TRAINING, settings)
    alone = Shard(task, data.select([4]), method, TRAINING, settings, clients=[4])
    together.train(1, np.ones(CLIENTS, dtype=bool))
    alone.train(1, np.ones(1, dtype=bool), active_fraction=1.0)
    for many, one in zip(together.state, alone.state, strict=True):
        torch.testing.assert_close(many[4], one[0], rtol=0, atol=1e-12)


def splitmix(bits: int) -> int:
    top = (1 << 64) - 1
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & top
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & top
    return bits ^ (bits >> 31)


def mask(key: int, shape: tuple[int, int], p: float) -> np.ndarray:
    """A literal transcription of the first draw, in Python's own integers."""
    golden, top = 0x9E3779B97F4A7C15, (1 << 64) - 1
    start = splitmix(key)

    def kept(row: int, column: int) -> bool:
        bits = splitmix((start + row * golden + column * golden * golden) & top)
        signed = bits - (1 << 64) if bits >> 63 else bits
        return signed >= round(p * 2**64) - 2**63

    return np.array([[kept(i, j) for j in range(shape[1])] for i in range(shape[0])])


def test_one_step_by_hand() -> None:
    """w ← w − η ∇ mean (w·dropout(x) − y)², with the mask written down from the key."""

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.line = nn.Dropout(0.25), nn.Linear(4, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.line(self.drop(x)).squeeze(-1)

    random = np.random.default_rng(0)
    x, y = random.normal(size=(5, 4)), random.normal(size=5)
    found = qv.simulate(
        qv.Task(Line, personal=(), loss=lambda out, y: (out - y) ** 2, metrics={}),
        qv.FederatedData.from_arrays([(x, y)], [(x, y)]),
        method=qv.Local(epochs=2),
        topology=qv.isolated(clients=1),
        training=qv.Training(lr=0.1, batch_size=None),
        rounds=2,
        seed=7,
        dtype=torch.float64,
    )
    w = qv.Task(Line, personal=()).initial_params(7).shared.double().numpy()
    for round in range(2):
        for step in range(2):
            kept = mask(int(key_hashes(7, "draws", 0, round, 0, step)), (5, 4), 0.25)
            dropped = x * kept / 0.75
            w = w - 0.1 * 2 * ((dropped @ w - y)[:, None] * dropped).mean(axis=0)
    np.testing.assert_allclose(found._shard.state.u[0].numpy(), w, rtol=0, atol=1e-12)


def test_draws_look_random() -> None:
    draws = KeyedRandomMode(torch.tensor(5))
    count = 200_000
    uniform = draws.uniform((count,), torch.float64)
    assert abs(float(uniform.mean()) - 0.5) < 4 * (1 / 12 / count) ** 0.5
    assert float(uniform.min()) >= 0
    assert float(uniform.max()) < 1
    normal = draws.normal((count,), torch.float64)
    assert abs(float(normal.mean())) < 4 / count**0.5
    assert abs(float(normal.std()) - 1) < 0.01
    kept = draws.keep_mask((100, 100, 20), 0.3).double()
    assert abs(float(kept.mean()) - 0.7) < 4 * (0.21 / count) ** 0.5
    for axis in (0, 1, 2):  # neighbours are not alike
        pairs = kept.flatten(), kept.roll(1, dims=axis).flatten()
        assert abs(float(torch.corrcoef(torch.stack(pairs))[0, 1])) < 4 / count**0.5
    other = KeyedRandomMode(torch.tensor(6)).keep_mask((100, 100, 20), 0.3).double()
    assert abs(float(torch.corrcoef(torch.stack([kept.flatten(), other.flatten()]))[0, 1])) < 0.01


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    with KeyedRandomMode(torch.tensor(1)):
        found = F.alpha_dropout(x, 0.2, training=True)
    assert abs(float(found.mean())) < 0.02
    assert abs(float(found.std()) - 1) < 0.02


def test_padding_changes_no_draw() -> None:
    few = KeyedRandomMode(torch.tensor(9)).bits((3, 5))
    many = KeyedRandomMode(torch.tensor(9)).bits((7, 8))
    assert torch.equal(many[:3, :5], few)


def test_a_generator_of_the_models_own_is_refused() -> None:
    class Own(nn.Module):
        generator = torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(x.shape, generator=self.generator) if self.training else x

    with pytest.raises(qv.QuiverError, match="rand with a generator of its own"):
        run(Own, dtype=torch.float32)


def test_dropout_inside_a_recurrent_layer_is_refused_by_name() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(2, 2, num_layers=2, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.view(len(x), 4, 2))[0].flatten(1)

    with pytest.raises(qv.QuiverError, match=r"random numbers with lstm.*nn.Dropout between"):
        run(Deep, dtype=torch.float32)


def test_a_loss_that_cannot_be_differentiated_is_refused() -> None:
    with pytest.raises(qv.QuiverError, match=r"cannot be differentiated.*inplace"):
        run(lambda: nn.Dropout(0.5, inplace=True))  # tanh needs its own output for its gradient


def test_resumed_equals_uninterrupted() -> None:
    kept: list[Any] = []
    whole = run(DRAWING["nn.Dropout"], rounds=4, checkpoint=kept.append, checkpoint_every=2)
    again = run(DRAWING["nn.Dropout"], rounds=4, resume=kept[0])
    assert apart(whole, again) == 0
    assert replace(kept[0]).round == 2
