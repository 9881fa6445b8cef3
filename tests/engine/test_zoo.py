"""Models people have: each works under both executors with equal numbers, or falls back, or is
refused with a sentence."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quiverfl as qv
from quiverfl.engine.memory import predict_memory
from quiverfl.errors import QuiverWarning

SIZES = (5, 9, 7, 6)
WORDS, PLACES = 11, 6


class Vectors(nn.Module):
    """A body that subclasses change, and a head."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.body: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.body = kind(8, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        found, _ = self.body(self.words(ids))
        logits: Tensor = self.head(found[:, -1])
        return logits


class Transformer(nn.Module):
    """torch's own, with its default dropout and a mask of padded words."""

    def __init__(self, outputs: int = 3, causal: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, outputs)
        self.causal = causal

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        hidden = self.words(input_ids)
        padding = None if attention_mask is None else attention_mask == 0
        size = input_ids.shape[1]
        ahead = torch.ones(size, size, dtype=torch.bool).triu(1) if self.causal else None
        found = self.body(hidden, mask=ahead, src_key_padding_mask=padding)
        if self.causal:
            return self.head(found)
        if attention_mask is None:
            return self.head(found.mean(dim=1))
        kept = attention_mask.unsqueeze(-1).to(found.dtype)
        return SimpleNamespace(logits=self.head((found * kept).sum(1) / kept.sum(1)), past=None)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.EmbeddingBag(WORDS, 8, mode="mean")
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(ids))
        return logits


class Branching(Vectors):
    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x)
        return self.head(hidden if self.head.weight.sum() > 0 else -hidden)


class Named(Vectors):
    def forward(self, x: Tensor, scale: Tensor) -> Any:
        hidden = self.body(x) * scale.unsqueeze(-1)
        return {"logits": self.head(hidden), "hidden": hidden, "nothing": None}


class Pair(Vectors):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.head(self.body(x) - self.body(y)), self.body(x)


class Whole(Vectors):
    def forward(self, both: dict[str, Tensor]) -> Any:
        return self.head(self.body(both["x"]) * both["scale"].unsqueeze(-1))


class Dropping(Vectors):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3))


class Normed(Vectors):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


class Mobile(nn.Module):
    """A small MobileNet: depthwise and pointwise convolutions, each with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()

        def normed(*convolution: Any, **options: Any) -> list[nn.Module]:
            layer = nn.Conv2d(*convolution, bias=False, **options)
            return [layer, nn.BatchNorm2d(layer.out_channels), nn.ReLU6()]

        self.body = nn.Sequential(
            *normed(1, 4, 3, padding=1),
            *normed(4, 4, 3, padding=1, groups=4),
            *normed(4, 8, 1),
            *normed(8, 8, 3, stride=2, groups=8),
            *normed(8, 6, 1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


class NormedWords(nn.Module):
    """Words of which a linear layer has BatchNorm behind it: for adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(PLACES), nn.Flatten())
        self.head = nn.Linear(8 * PLACES, 3)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.body(self.words(ids))))
        return logits


class Frozen(Vectors):
    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)
        self.between = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.between(self.body(x))))


class Tied(nn.Module):
    """A language model whose last layer is its table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.out = nn.Linear(8, WORDS, bias=False)
        self.out.weight = self.words.weight
        self.head = nn.Parameter(torch.zeros(WORDS))

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.out(self.body(self.words(ids))) + self.head
        return logits


def vectors(r: Any, n: int) -> Any:
    return r.normal(size=(n, 4)), r.integers(0, 3, n)


def sentences(r: Any, n: int) -> Any:
    return r.integers(0, WORDS, (n, PLACES)), r.integers(0, 3, n)


def padded(r: Any, n: int) -> Any:
    """Ragged sequences: as many words as there are, the rest is padding and masked."""
    lengths = r.integers(1, PLACES + 1, n)
    mask = (np.arange(PLACES) < lengths[:, None]).astype(np.int64)
    ids = r.integers(1, WORDS, (n, PLACES)) * mask
    return {"input_ids": ids, "attention_mask": mask}, r.integers(0, 3, n)


def named(r: Any, n: int) -> Any:
    return {"x": r.normal(size=(n, 4)), "scale": r.random(n)}, r.integers(0, 3, n)


def pairs(r: Any, n: int) -> Any:
    return (r.normal(size=(n, 4)), r.normal(size=(n, 4))), r.integers(0, 3, n)


def numbers(r: Any, n: int) -> Any:
    return r.normal(size=(n, 4)), r.normal(size=n)


def labels(r: Any, n: int) -> Any:
    return r.normal(size=(n, 4)), (r.random((n, 3)) < 0.5).astype(np.int64)


def following(r: Any, n: int) -> Any:
    ids = r.integers(0, WORDS, (n, PLACES + 1))
    following = ids[:, 1:].copy()
    following[:, -1] = -100
    return ids[:, :-1], following


def images(r: Any, n: int) -> Any:
    return r.normal(size=(n, 1, 6, 6)), r.integers(0, 3, n)


def two_targets(r: Any, n: int) -> Any:
    return r.normal(size=(n, 4)), {"kind": r.integers(0, 3, n), "size": r.normal(size=n)}


def both_losses(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
    kinds = nn.functional.cross_entropy(outputs[:, :3], targets["kind"], reduction="none")
    return kinds + (outputs[:, 3] - targets["size"]) ** 2


def pretrained(**options: Any) -> nn.Module:
    """A network with BatchNorm whose weights come from a file, under a fresh head."""
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(5)
        torch.save(Images().state_dict(), Path(folder) / "weights.pt")
        weights = Path(folder) / "weights.pt"
        return qv.make_model(
            "pretrained", (1, 6, 6), 4, source=Images, weights=weights, normalize="data", **options
        )


def adapted() -> nn.Module:
    return qv.lora(Transformer(), rank=2, targets=("attention", "linear1"))


@dataclass(frozen=True)
class Row:
    model: Callable[[], nn.Module]
    data: Callable[[Any, int], Any] = vectors
    task: dict[str, Any] = field(default_factory=dict)
    stacks: bool = True
    """Otherwise it is computed for one client after the other."""
    convolutional: bool = False
    """What `auto` computes one by one on a CPU anyway, and so says nothing of."""


ZOO = {
    "MLP": Row(Vectors),
    "LSTM": Row(lambda: Recurrent(nn.LSTM), sentences, stacks=False),
    "GRU": Row(lambda: Recurrent(nn.GRU), sentences, stacks=False),
    "transformer": Row(Transformer, sentences),
    "padded sequences with a mask, an object with logits": Row(Transformer, padded),
    "embedding bag": Row(Bag, sentences, stacks=False),
    "a branch on a value": Row(Branching, stacks=False),
    "dictionary in and out": Row(Named, named),
    "several inputs, a tuple out": Row(Pair, pairs),
    "a dictionary as one argument": Row(Whole, named, {"inputs": "tree"}),
    "several targets": Row(lambda: Vectors(4), two_targets, {"loss": both_losses, "metrics": {}}),
    "dropout": Row(Dropping),
    "BatchNorm CNN": Row(Images, images, stacks=False, convolutional=True),
    "BatchNorm, all of it shared": Row(
        Images, images, {"personal": (), "buffers": "mixed"}, stacks=False, convolutional=True
    ),
    "MobileNet with BatchNorm": Row(Mobile, images, stacks=False, convolutional=True),
    "BatchNorm and LoRA": Row(
        lambda: qv.lora(NormedWords(), rank=2, targets=("body",), train=("head",)),
        sentences,
        stacks=False,
    ),
    "pretrained body from a file": Row(pretrained, images, stacks=False, convolutional=True),
    "pretrained body, partly frozen": Row(
        lambda: pretrained(train=["body.0"]), images, convolutional=True
    ),
    "BatchNorm made GroupNorm": Row(lambda: qv.group_norm(Normed())),
    "BatchNorm2d made GroupNorm": Row(lambda: qv.group_norm(Images()), images),
    "frozen body": Row(Frozen),
    "LoRA": Row(adapted, padded),
    "regression": Row(lambda: Vectors(1), numbers, {"loss": "mse"}),
    "multi-label": Row(Vectors, labels, {"loss": "bce", "metrics": ["f1", "auroc"]}),
    "language model": Row(
        lambda: Transformer(WORDS, causal=True),
        following,
        {"loss": "next_token", "metrics": ["perplexity", "accuracy"]},
    ),
    "tied weights": Row(Tied, following, {"loss": "next_token"}),
    "a model that comes in bfloat16": Row(lambda: Vectors().bfloat16()),
    "a transformer that comes in float16": Row(lambda: Transformer().half(), padded),
}


def run(row: Row, dtype: torch.dtype = torch.float64, **options: Any) -> qv.Run:
    random = np.random.default_rng(0)
    train = [row.data(random, n) for n in SIZES]
    test = [row.data(random, n + 2) for n in SIZES]
    settings = {"rounds": 2, "seed": 1, "threads": 1, "dtype": dtype, **options}
    return qv.simulate(
        qv.Task(row.model, **row.task),
        qv.FederatedData.from_arrays(train, test),
        method=qv.DFedPGP(personal_epochs=1, shared_epochs=2),
        topology=qv.random_push(clients=len(SIZES), neighbors=2, seed=0),
        training=qv.Training(lr=0.1, momentum=0.9, batch_size=4, clip_norm=1.0),
        **settings,
    )


def apart(one: qv.Run, other: qv.Run) -> float:
    both = zip(one._shard.state, other._shard.state, strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in both)


@pytest.mark.parametrize("name", [name for name, row in ZOO.items() if row.stacks])
def test_both_executors_agree(name: str) -> None:
    stacked, alone = (run(ZOO[name], executor=e) for e in ("vectorized", "sequential"))
    assert apart(stacked, alone) < 1e-10
    ours, theirs = (found.history.drop(columns="stage").to_numpy() for found in (stacked, alone))
    np.testing.assert_allclose(ours.astype(float), theirs.astype(float), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [name for name, row in ZOO.items() if row.stacks])
def test_auto_does_not_fall_back(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(ZOO[name], rounds=1)


@pytest.mark.parametrize(
    "name", [name for name, row in ZOO.items() if not row.stacks and not row.convolutional]
)
def test_auto_falls_back_and_says_so_once(name: str) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = run(ZOO[name])
    words = [str(w.message) for w in said if issubclass(w.category, QuiverWarning)]
    assert len(words) == 1
    assert "cannot be computed for several clients at once" in words[0]
    assert "file us an issue" not in words[0]
    assert apart(found, run(ZOO[name], executor="sequential")) == 0


@pytest.mark.parametrize("name", ["LSTM", "GRU", "a branch on a value", "BatchNorm CNN"])
def test_what_cannot_be_stacked_is_refused_if_asked_for(name: str) -> None:
    with pytest.raises(qv.QuiverError, match=r"executor = 'vectorized': .* Use 'sequential'"):
        run(ZOO[name], executor="vectorized")


@pytest.mark.parametrize("name", ["MLP", "transformer", "LoRA", "dropout"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    stacked, alone = (run(ZOO[name], dtype, executor=e) for e in ("vectorized", "sequential"))
    assert stacked._shard.state.u.dtype == dtype
    assert apart(stacked, alone) < 0.1
    assert apart(stacked, run(ZOO[name], torch.float32)) < 0.1


def test_running_statistics_of_a_frozen_body_are_the_clients_own() -> None:
    """With adapters: what is frozen is not trained, and its statistics still follow the data."""
    found = run(ZOO["BatchNorm and LoRA"])
    one, other = (found.parameters(client) for client in (0, 1))
    assert not torch.equal(one["body.1.running_mean"], other["body.1.running_mean"])
    assert "body.0.weight" not in one
    assert one["body.1.num_batches_tracked"] > 0


@pytest.mark.parametrize("name", ZOO)
def test_a_personal_model_says_what_was_evaluated(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(ZOO[name])
    x, y = found._data.test.of_client(1)
    task, model = found._task, found.personal(1)
    x = {"both": x} if name == "a dictionary as one argument" else x
    with torch.no_grad():
        said = model(**x) if isinstance(x, dict) else model(*(x if isinstance(x, tuple) else (x,)))
    said = {"logits": said.logits} if isinstance(said, SimpleNamespace) else said
    last = found.history.query("round == 1 and stage == 'mixed' and client == 1")["loss"]
    assert task.loss(said, y).mean().item() == pytest.approx(float(last.iloc[0]), abs=1e-9)


def test_ids_stay_ids_and_masks_stay_masks() -> None:
    random = np.random.default_rng(0)
    data = qv.FederatedData.from_arrays([padded(random, 3)], [padded(random, 2)])
    assert data.train.x["input_ids"].dtype == torch.int64
    assert data.train.sizes.tolist() == [3]
    assert data.select([0]).train.x["attention_mask"].shape == (3, PLACES)


A = np.zeros((3, 2))


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        ([({"a": A, "b": A[:2]}, np.zeros(3))], r"client 0: 3 inputs 'a' but 2 inputs 'b'"),
        ([((A, A), np.zeros(2))], r"3 inputs '0' but 3 inputs '1' but 2 targets"),
        ([({"a": A}, np.zeros(3)), ({"b": A}, np.zeros(3))], r"client 1: inputs \['b'\], other"),
        ([({"a": A}, np.zeros(3)), ({"a": A[:, :1]}, np.zeros(3))], r"inputs 'a' of shape \(1,\)"),
        ([(A, {"y": np.full(3, np.nan)})], "targets 'y' hold NaN"),
        (
            [({"a": ["x", "y", "z"]}, np.zeros(3))],
            r"client 0: text or objects \(str\)",
        ),
        ([(A,)], "give a pair"),
        ([({}, {})], "no inputs and no targets"),
    ],
)
def test_trees_that_do_not_fit_are_named(clients: Any, words: str) -> None:
    with pytest.raises(qv.QuiverError, match=words):
        qv.FederatedData.from_arrays(clients, clients)


def test_a_client_without_test_samples_may_come_with_any_shape() -> None:
    random = np.random.default_rng(0)
    full = padded(random, 3)
    data = qv.FederatedData.from_arrays([full, full], [(np.zeros(0), np.zeros(0)), full])
    assert data.test.sizes.tolist() == [0, 3]
    assert data.test.x["input_ids"].shape == (3, PLACES)


def test_the_memory_of_trees_is_counted() -> None:
    random = np.random.default_rng(0)
    data = qv.FederatedData.from_arrays([padded(random, 5)] * 2, [padded(random, 4)] * 2)
    task, settings = qv.Task(Transformer), qv.RunSettings(rounds=1)
    needed = predict_memory(task, data, qv.DFedPGP(), qv.Training(batch_size=4), settings)
    assert needed.data == 2 * (5 + 4) * (2 * PLACES + 1) * 8
    assert needed.per_client > 0
