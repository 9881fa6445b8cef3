"""A tiny federated problem, the product's run of it, and how far a transcription is from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import quiverfl as qv
import transcriptions
from transcriptions.spec import Outcome, Setting, Weights, cross_entropy, forward

SIZES = (5, 8, 11, 6, 3, 7)  # batches of 4: rests of 1, none, 3, 2, 3 (a whole set) and 3
CLIENTS = len(SIZES)
UNEQUAL = (1, 2, 1, 3, 2, 1)
TOLERANCE = 1e-10


@contextmanager
def one_thread() -> Iterator[None]:
    """On a busy machine, threads that wait for each other make tiny tensors ten times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh())
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


class HeadFirst(nn.Module):
    """The same function, its parameters listed in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def examples(purpose: int) -> list[tuple[Tensor, Tensor]]:
    """Each client sees its own mixture of three classes around its own centres."""
    pairs = []
    for client, size in enumerate(SIZES):
        random = np.random.default_rng([purpose, client])
        y = random.choice(3, size=size, p=random.dirichlet([0.7, 0.7, 0.7]))
        centres = np.random.default_rng(client).normal(size=(3, 4))
        x = 1.5 * centres[y] + random.normal(size=(size, 4))
        pairs.append((torch.from_numpy(x), torch.from_numpy(y)))
    return pairs


TRAIN, TEST = examples(1), examples(2)


@dataclass(frozen=True, eq=False)
class Case:
    """One method under one setting. Settings are strong, so that nothing in them can hide."""

    method: str
    options: Mapping[str, Any]
    topology: Callable[[], qv.Topology]
    batch_size: int | None = 4
    clip_norm: float | None = 0.6
    momentum: float = 0.9
    personal_lr: float | None = 0.15
    epochs_per_client: tuple[int, ...] | None = UNEQUAL
    common_init: bool = True
    model: type[nn.Module] = Tiny
    personal: str = "head"
    rounds: int = 4
    tolerance: float = TOLERANCE
    untold: Mapping[str, Any] = field(default_factory=dict)  # options only the product is given
    transcription: str | None = None  # of a method that is a setting of another one

    @property
    def training(self) -> qv.Training:
        return qv.Training(
            lr=0.2,
            personal_lr=self.personal_lr,
            lr_decay=0.9,
            momentum=self.momentum,
            weight_decay=0.02,
            batch_size=self.batch_size,
            clip_norm=self.clip_norm,
        )


SEED = 3


@cache
def product(case: Case, executor: str, rounds: int | None = None) -> qv.Run:
    return qv.simulate(
        qv.Task(model=case.model, personal=(case.personal,)),
        qv.FederatedData.from_arrays(train=TRAIN, test=TEST),
        method=getattr(qv, case.method)(**case.options, **case.untold),
        topology=case.topology(),
        training=case.training,
        rounds=case.rounds if rounds is None else rounds,
        seed=SEED,
        dtype=torch.float64,
        threads=1,
        epochs_per_client=None if case.epochs_per_client is None else list(case.epochs_per_client),
        common_init=case.common_init,
        executor=executor,
    )


def setting_of(case: Case) -> Setting:
    graph = cache(case.topology())
    names = [name for name, _ in case.model().named_parameters()]
    return Setting(
        train=TRAIN,
        weights=lambda t: graph(t).weights,
        active=lambda t: graph(t).active,
        training=case.training,
        rounds=case.rounds,
        seed=SEED,
        epochs_per_client=case.epochs_per_client,
        shared=tuple(name for name in names if not name.startswith(case.personal)),
        personal=tuple(name for name in names if name.startswith(case.personal)),
    )


@cache
@one_thread()
def transcribed(case: Case, mutant: str | None = None) -> tuple[Outcome, list[bool]]:
    """Also says for every step whether clipping bit.

    It starts where the product starts, which is all that is taken from the product.
    """
    setting = setting_of(case)
    beginning = product(case, "sequential", 0)
    start = [dict(beginning.state(i).items()) for i in range(CLIENTS)]
    transcription = getattr(transcriptions, case.transcription or case.method.lower())
    outcome: Outcome = transcription(setting, start, mutant=mutant, **case.options)
    return outcome, setting.clipped


@dataclass(frozen=True)
class Observed:
    """What a run of the product shows: states, models of both stages, the recorded metrics."""

    state: list[dict[str, Any]]
    models: dict[str, list[Weights]]
    metrics: dict[str, np.ndarray]  # stage → [round, client, (accuracy, loss)]


@cache
@one_thread()
def observed(case: Case, executor: str) -> Observed:
    run = product(case, executor)
    modules = {
        "local": [run.personal(client, stage="local") for client in range(CLIENTS)],
        "mixed": [run.personal(client) for client in range(CLIENTS)],
    }
    history = run.history.sort_values(["round", "client"])
    metrics = {}
    for stage in modules:
        rows = history[history["stage"] == stage]
        assert rows["round"].tolist() == [t for t in range(case.rounds) for _ in range(CLIENTS)]
        assert rows["client"].tolist() == list(range(CLIENTS)) * case.rounds
        numbers = rows[["accuracy", "loss"]].to_numpy()
        metrics[stage] = numbers.reshape(case.rounds, CLIENTS, 2)
    return Observed(
        state=[dict(run.state(client).items()) for client in range(CLIENTS)],
        models={
            stage: [{n: p.detach() for n, p in m.named_parameters()} for m in of_clients]
            for stage, of_clients in modules.items()
        },
        metrics=metrics,
    )


@one_thread()
def differences(seen: Observed, outcome: Outcome) -> dict[str, float]:
    """The largest difference in each kind of result, relative to the size of its numbers."""
    found: dict[str, float] = defaultdict(float)
    for state, expected in zip(seen.state, outcome.state, strict=True):
        for part in expected:
            if part == "mu" and part not in state and not outcome.push_sum:
                continue
            found[part] = max(found[part], _apart(state[part], expected[part]))
    for stage, of_rounds in (("local", outcome.local), ("mixed", outcome.mixed)):
        for model, weights in zip(seen.models[stage], of_rounds[-1], strict=True):
            found[f"{stage} model"] = max(found[f"{stage} model"], _apart(model, weights))
        for t, models in enumerate(of_rounds):
            for client, weights in enumerate(models):
                wrong = np.abs(seen.metrics[stage][t, client] - _metrics(client, weights)).max()
                wrong = float("inf") if np.isnan(wrong) else float(wrong)
                found[f"{stage} history"] = max(found[f"{stage} history"], wrong)
    return found


def _apart(actual: Any, expected: Any) -> float:
    if not isinstance(expected, dict):
        return _relative(_number(actual), _number(expected))
    if actual.keys() != expected.keys():
        return float("inf")
    return max(_relative(actual[name], expected[name]) for name in expected)


def _number(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)


def _relative(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    scale = max(1.0, float(expected.abs().max()))
    difference = float((actual.double() - expected).abs().max()) / scale
    return float("inf") if np.isnan(difference) else difference


def _metrics(client: int, weights: Weights) -> np.ndarray:
    """Accuracy and loss on the client's own test examples."""
    x, y = TEST[client]
    outputs = forward(weights, x)
    right = int((outputs.argmax(dim=1) == y).sum())
    return np.array([right / len(y), float(cross_entropy(outputs, y))])
