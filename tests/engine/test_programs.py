"""How models are computed, and the memory they are computed in."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from quiverfl import Task, keep_freed_memory
from quiverfl.engine.local.programs import Program, Sequential, choose_executor
from quiverfl.models import make_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("model", "image_format"),
    [("cnn_small", torch.channels_last), ("resnet8_gn", torch.contiguous_format)],
)
def test_images_lie_as_their_layers_like_it(model: str, image_format: torch.memory_format) -> None:
    executor = choose_executor("auto", Task(lambda: make_model(model, (3, 32, 32), 10)), CPU)
    assert executor == Sequential(image_format=image_format)


def test_tied_parameters_are_bound_in_every_place() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 3)
            self.again = self.body
            self.head = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(self.again(self.body(x)))
            return logits

    task = Task(Tied)
    program = Program.of(task, torch.float64, CPU)
    point = task.initial_params(0)
    stacked = type(point)(*(part.double().unsqueeze(0) for part in point))
    x = torch.ones(1, 5, 3, dtype=torch.float64)
    found = Sequential().forward(program, stacked, x).outputs
    weights = program.named_params(type(point)(*(part[0] for part in stacked)))
    hidden = nn.functional.linear(x[0], weights["body.weight"], weights["body.bias"])
    hidden = nn.functional.linear(hidden, weights["body.weight"], weights["body.bias"])
    expected = nn.functional.linear(hidden, weights["head.weight"], weights["head.bias"])
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-12)


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_freed_memory_can_be_kept_and_asking_twice_does_no_harm() -> None:
    assert keep_freed_memory()
    assert keep_freed_memory()
