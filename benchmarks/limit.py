"""The limit: the bare arithmetic of a round's samples on one model, without anything federated.

No optimizer, no batch order, no averaging, no second model. Batches are cut and laid out before the
clock starts. What is differentiated is what the phases of the method differentiate: the head on
the frozen body's features, then the body under the frozen head. The whole model in every epoch
would be half as much again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.works import BATCH, Work
from quiverfl.data.examples import ClientExamples

Batches = list[tuple[Tensor, Tensor]]
Run = Callable[[], None]

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def forms(work: Work) -> tuple[str, ...]:
    """The memory formats a model of this work can be computed in; the faster one is the limit."""
    if work.compiled:
        return ("channels_last",)
    return tuple(FORMATS) if len(work.shape) == 3 else ("contiguous",)


def phases(work: Work, form: str, batch: int = BATCH) -> Run:
    """Bare forward and backward of the method's phases."""
    model, batches = _laid_out(work, form, batch)
    body, head = model.get_submodule("body"), model.get_submodule("head")

    def run() -> None:
        with _rounding(work):
            differentiate()

    def differentiate() -> None:
        head.requires_grad_(True)
        with torch.no_grad():
            features = [(body(x), y) for x, y in batches]
        for _ in range(work.personal_epochs):
            _differentiate(head, features, list(head.parameters()))
        head.requires_grad_(False)
        for _ in range(work.shared_epochs):
            _differentiate(model, batches, list(body.parameters()))

    return run


def forward(work: Work, form: str) -> Run:
    """Bare forward pass of the test samples, a client's at a time."""
    model, batches = _laid_out(work, form, work.test, test=True)

    def run() -> None:
        with torch.no_grad(), _rounding(work):
            for x, _ in batches:
                model(x)

    return run


def _rounding(work: Work) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=work.precision == "bf16")


def _laid_out(work: Work, form: str, batch: int, test: bool = False) -> tuple[nn.Module, Batches]:
    data = work.data()
    split = data.test if test else data.train
    model = work.model().to(memory_format=FORMATS[form])  # type: ignore[call-overload]
    pieces = _pieces(split, batch) if batch <= split.sizes[0] else _everything(split, batch)
    return model, [(x.contiguous(memory_format=FORMATS[form]), y) for x, y in pieces]


def _pieces(split: ClientExamples, batch: int) -> Batches:
    """Batches of one client each, the last of each client as short as it is in training."""
    batches: Batches = []
    for client in range(split.clients):
        x, y = split.of_client(client)
        batches += zip(torch.split(x, batch), torch.split(y, batch), strict=True)
    return batches


def _everything(split: ClientExamples, batch: int) -> Batches:
    return list(zip(torch.split(split.x, batch), torch.split(split.y, batch), strict=True))


def _differentiate(model: nn.Module, batches: Batches, parameters: list[nn.Parameter]) -> None:
    for x, y in batches:
        torch.autograd.grad(cross_entropy(model(x), y), parameters)
