"""A multilayer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from quiverfl.errors import QuiverError


class MLP(nn.Module):
    """Linear and ReLU for each width in `hidden`, then the classifier; inputs are flattened."""

    def __init__(
        self, input_shape: tuple[int, ...], classes: int, hidden: Sequence[int] = (128, 64)
    ) -> None:
        super().__init__()
        listed = list(hidden) if isinstance(hidden, Sequence) else []
        if not listed or not all(isinstance(width, int) and width >= 1 for width in listed):
            raise QuiverError(
                f"model.hidden = {hidden!r}: give a list of at least one width, such as [64, 32], "
                "each 1 or more; without a body there would be nothing to share."
            )
        widths = [math.prod(input_shape), *hidden]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x.flatten(1)))
        return logits
