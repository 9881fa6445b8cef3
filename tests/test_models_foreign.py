"""Hugging Face's transformers as they are, and `peft` adapters on them: trained here for real.

Models are made from a configuration, so nothing is downloaded.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import quiverfl as qv
from quiverfl.errors import QuiverWarning

transformers = pytest.importorskip("transformers", reason="pip install 'quiverfl[peft]'")
peft = pytest.importorskip("peft", reason="pip install 'quiverfl[peft]'")
pytestmark = pytest.mark.slow

WORDS, PLACES, SIZES = 30, 8, (5, 9, 7, 6)


def bert(**options: Any) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=3,
        **options,
    )
    return transformers.BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def adapted() -> nn.Module:
    config = peft.LoraConfig(
        r=2,
        lora_dropout=0.1,
        target_modules=["query", "value"],
        modules_to_save=["classifier"],
        task_type="SEQ_CLS",
    )
    return peft.get_peft_model(bert(), config)


def padded(r: Any, n: int) -> Any:
    mask = (np.arange(PLACES) < r.integers(1, PLACES + 1, n)[:, None]).astype(np.int64)
    ids = r.integers(1, WORDS, (n, PLACES)) * mask
    return {"input_ids": ids, "attention_mask": mask}, r.integers(0, 3, n)


def following(r: Any, n: int) -> Any:
    ids = r.integers(0, WORDS, (n, PLACES + 1))
    return {"input_ids": ids[:, :-1]}, ids[:, 1:]


def run(task: qv.Task, data: Any, **options: Any) -> qv.Run:
    random = np.random.default_rng(0)
    train, test = ([data(random, n) for n in SIZES] for _ in range(2))
    return qv.simulate(
        task,
        qv.FederatedData.from_arrays(train, test),
        method=qv.DFedPGP(personal_epochs=1, shared_epochs=2),
        topology=qv.random_push(clients=len(SIZES), neighbors=2, seed=0),
        training=qv.Training(lr=0.1, momentum=0.9, batch_size=4, clip_norm=1.0),
        **{"rounds": 2, "seed": 1, "threads": 1, "dtype": torch.float64, **options},
    )


def both(task: qv.Task, data: Any) -> tuple[qv.Run, list[str]]:
    """The run under `auto`, equal to the one by one; and what was said."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = run(task, data)
    alone = run(task, data, executor="sequential")
    for one, other in zip(found._shard.state, alone._shard.state, strict=True):
        assert float((one - other).abs().max()) < 1e-9
    words = [str(w.message) for w in said if issubclass(w.category, QuiverWarning)]
    assert len(words) <= 1
    return found, words


def test_a_classifier_as_it_is() -> None:
    """Its mask branches on a value, so it is computed for one client after the other."""
    task = qv.Task(bert, personal="classifier")
    found, words = both(task, padded)
    assert "data-dependent" in words[0]
    assert np.isfinite(found.history["loss"]).all()
    x, y = found._data.test.of_client(1)
    with torch.no_grad():
        said = found.personal(1)(**x).logits
    last = found.history.query("round == 1 and stage == 'mixed' and client == 1")["loss"]
    assert float(task.loss(said, y).mean()) == pytest.approx(float(last.iloc[0]), abs=1e-9)


def test_a_language_model_with_tied_weights_as_it_is() -> None:
    task = qv.Task(gpt2, personal="transformer.ln_f", loss="next_token")
    found, words = both(task, following)
    assert words == []  # for several clients at once
    assert np.isfinite(found.history["perplexity"]).all()


@pytest.mark.parametrize(
    ("personal", "own"),
    [("*.classifier", "classifier"), ("*.lora_B", "lora_B"), ("*.lora_*", "lora_")],
)
def test_adapters_are_shared_or_personal_and_the_body_is_kept_once(personal: str, own: str) -> None:
    task = qv.Task(adapted, personal=personal)
    assert all(own in name for name in task.personal_layout.names)
    assert not any(own in name for name in task.shared_layout.names)
    names = (*task.personal_layout.names, *task.shared_layout.names)
    assert all("lora_" in name or "classifier" in name for name in names)
    found, _ = both(task, padded)
    start = dict(task.skeleton.named_parameters())
    model = dict(found.personal(2).named_parameters())
    for name, parameter in model.items():
        frozen = not parameter.requires_grad
        same = torch.equal(parameter.detach(), start[name].detach().double())
        assert not frozen or same
    moved = [n for n in names if not torch.equal(model[n].detach(), start[n].detach().double())]
    assert moved
    body = sum(p.numel() for p in start.values() if not p.requires_grad)
    state = found._shard.state
    per_client = sum(leaf[0].numel() for leaf in state)
    assert per_client < body / 2
    shared = task.shared_layout.size
    assert found.rounds["sent_bytes"].iloc[0] <= len(SIZES) * 2 * (shared + 1) * 8
