"""Adapters and GroupNorm in place of BatchNorm: exact, and refused where they cannot be made."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quiverfl as qv
from quiverfl.models.lora import LoraAttention, LoraLinear


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(self.encoder(x, src_key_padding_mask=padding))
        return logits


X = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))
PADDING = torch.arange(5) >= torch.tensor([5, 3, 4, 1])[:, None]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padding", [None, PADDING])
def test_an_adapted_model_starts_as_the_given_one(training: bool, padding: Tensor | None) -> None:
    torch.manual_seed(0)
    given = Net().train(training)
    adapted = qv.lora(Net(), rank=2)
    missing, unknown = adapted.load_state_dict(given.state_dict(), strict=False)
    assert not unknown  # pre-trained weights keep their names
    assert all("lora" in name for name in missing)
    with torch.no_grad():
        said, expected = (m.train(training)(X, padding) for m in (adapted, given))
    if padding is not None:
        said, expected = said[~padding], expected[~padding]
    torch.testing.assert_close(said, expected, rtol=1e-5, atol=1e-5)


def test_in_use_the_adapters_are_at_work() -> None:
    """torch replaces a whole transformer layer in use, unless it is told that it cannot."""
    torch.manual_seed(0)
    model = qv.lora(Net(), rank=2, targets=("attention",)).eval()
    with torch.no_grad():
        before = model(X)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_()
        assert not torch.allclose(model(X), before, atol=1e-3)
        trained = model.train()(X)
        torch.testing.assert_close(model.eval()(X), trained, rtol=1e-5, atol=1e-5)


def test_an_adapted_layer_by_hand() -> None:
    layer = nn.Linear(3, 2)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    made: Any = qv.lora(nn.Sequential(layer), rank=1, alpha=4.0, train=())[0]
    with torch.no_grad():
        made.lora.lora_A.copy_(torch.tensor([[1.0, 2.0, 3.0]]))
        made.lora.lora_B.copy_(torch.tensor([[1.0], [-1.0]]))
    x = torch.tensor([[1.0, 0.0, 2.0]])
    expected = x @ weight.T + bias + 4.0 * torch.tensor([[7.0, -7.0]])
    torch.testing.assert_close(made(x), expected)


def test_only_adapters_and_what_is_named_are_trained() -> None:
    model = qv.lora(Net(), rank=2, targets=("self_attn",))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all("lora" in name or name.startswith("head.") for name in names)
    assert isinstance(model.encoder.layers[1].self_attn, LoraAttention)
    assert isinstance(model.encoder.layers[0].linear1, nn.Linear)
    everything = qv.lora(Net(), rank=2)
    assert isinstance(everything.encoder.layers[0].linear1, LoraLinear)
    assert isinstance(everything.head, nn.Linear)


def test_adapters_shared_and_heads_personal_or_the_reverse() -> None:
    task = qv.Task(lambda: qv.lora(Net(), rank=2), personal=("head",))
    assert all("lora" in name for name in task.shared_layout.names)
    assert task.personal_layout.names == ("head.weight", "head.bias")
    reverse = qv.Task(lambda: qv.lora(Net(), rank=2), personal=("encoder",))
    assert reverse.shared_layout.names == ("head.weight", "head.bias")
    split = qv.Task(lambda: qv.lora(Net(), rank=2), personal=("head", "*.lora_B"))
    assert all(name.endswith("lora_A") for name in split.shared_layout.names)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, "rank = 0: it must be a whole number"),
        ({"targets": ("conv",)}, r"match no linear or attention layer; .*encoder.layers.0"),
        ({"targets": (3,)}, "give names"),
    ],
)
def test_adapters_that_cannot_be_made(options: Any, words: str) -> None:
    with pytest.raises(qv.QuiverError, match=words):
        qv.lora(Net(), **options)
    odd = nn.MultiheadAttention(4, 2, kdim=3)
    with pytest.raises(qv.QuiverError, match="kdim"):
        qv.lora(nn.Sequential(odd))


def test_a_batch_norm_becomes_a_group_norm_of_the_same_weights() -> None:
    norm = nn.BatchNorm2d(6)
    nn.init.normal_(norm.weight)
    model = qv.group_norm(nn.Sequential(nn.Conv2d(1, 6, 3), norm, nn.Sequential(norm)))
    made = model[1]
    assert isinstance(made, nn.GroupNorm)
    assert made is model[2][0]  # used in two places, still one layer
    assert made.num_groups == 3  # of at least two channels
    assert torch.equal(made.weight, norm.weight)


@pytest.mark.parametrize(
    ("norm", "groups"),
    [
        (nn.BatchNorm2d(64), 32),
        (nn.BatchNorm2d(1), 1),
        (nn.BatchNorm3d(7), 1),
        (nn.BatchNorm1d(64), 1),
        (nn.BatchNorm2d(48), 24),
        (nn.BatchNorm2d(4, affine=False), 2),
    ],
)
def test_how_many_groups(norm: nn.Module, groups: int) -> None:
    made: Any = qv.group_norm(norm)
    assert made.num_groups == groups
    assert made.affine == norm.affine


def test_vectors_are_not_normalised_to_nothing() -> None:
    """One channel a group would make every value its bias."""
    made = qv.group_norm(nn.Sequential(nn.BatchNorm1d(32)))
    assert made(torch.randn(3, 32)).abs().sum() > 1


class NormAct(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


def test_norms_that_cannot_be_replaced() -> None:
    with pytest.raises(qv.QuiverError, match="a NormAct has a forward of its own"):
        qv.group_norm(nn.Sequential(NormAct(4)))
    assert isinstance(qv.group_norm(nn.SyncBatchNorm(4)), nn.GroupNorm)
    with pytest.raises(qv.QuiverError, match="does not know its channels"):
        qv.group_norm(nn.Sequential(nn.LazyBatchNorm2d()))
    with pytest.raises(qv.QuiverError, match="groups = 0"):
        qv.group_norm(nn.Linear(2, 2), groups=0)


def load_example() -> Any:
    """The module examples/lora_text.py."""
    path = Path(__file__).parents[1] / "examples" / "lora_text.py"
    spec = importlib.util.spec_from_file_location("lora_text", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lora_text"] = module
    spec.loader.exec_module(module)
    return module


def test_alternating_adapters_train_one_factor_a_round() -> None:
    """The option of examples/lora_text.py: B in even rounds, A in odd ones."""
    example = load_example()
    draw = np.random.default_rng(0)
    pairs = [(draw.normal(size=(6, 5, 8)), draw.integers(0, 3, (6, 5))) for _ in range(3)]
    task = qv.Task(lambda: qv.lora(Net(), rank=2), loss="next_token")
    data = qv.FederatedData.from_arrays(pairs, pairs)

    def factors(rounds: int) -> dict[str, Tensor]:
        run = qv.simulate(
            task,
            data,
            method=example.AlternatingLoRA(shared_epochs=1),
            topology=qv.random_push(clients=3, neighbors=1, seed=0),
            training=qv.Training(lr=0.5, momentum=0.9, batch_size=3),
            rounds=rounds,
            dtype=torch.float64,
        )
        found = [run.parameters(client) for client in range(3)]
        return {
            letter: torch.stack(
                [
                    torch.cat([p.flatten() for n, p in one.items() if n.endswith(letter)])
                    for one in found
                ]
            )
            for letter in ("lora_A", "lora_B")
        }

    start = task.named_params(task.initial_params(0))
    first = torch.cat([p.flatten() for n, p in start.items() if n.endswith("lora_A")]).double()
    one, two = factors(1), factors(2)
    torch.testing.assert_close(one["lora_A"], first.expand(3, -1), rtol=0, atol=1e-12)
    assert float(one["lora_B"].abs().min(dim=0).values.max()) > 1e-3
    assert float((two["lora_A"] - first).abs().max()) > 1e-4
    # The Bs rest in the second round: what clients hold of them are averages of what they held.
    low, high = one["lora_B"].min(dim=0).values, one["lora_B"].max(dim=0).values
    assert bool((two["lora_B"] >= low - 1e-12).all())
    assert bool((two["lora_B"] <= high + 1e-12).all())


def test_a_frozen_a_is_neither_trained_nor_sent() -> None:
    example = load_example()
    task = qv.Task(lambda: example.freeze_a(qv.lora(Net(), rank=2)))
    assert task.shared_layout.names
    assert all(name.endswith("lora_B") for name in task.shared_layout.names)
