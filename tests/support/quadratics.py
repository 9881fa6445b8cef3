"""Quadratic losses with a known optimum: the test bed of decentralized optimization."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quiverfl.data.federated import FederatedData
from quiverfl.errors import QuiverError
from quiverfl.seeds import stream

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Quadratics:
    """Least squares for every client: F_i(w) = mean over its rows of ½ (x·w - y)².

    `optima[i]` minimises F_i, `optimum` minimises their mean. Targets have the shape [n, 1], as a
    linear layer without bias gives them. There is no noise: at its optimum a client's loss is 0.
    """

    data: FederatedData
    optima: Floats
    optimum: Floats


def quadratics(
    clients: int,
    dimension: int = 4,
    samples: int = 16,
    spread: float = 1.0,
    seed: int = 0,
) -> Quadratics:
    """`spread` is how far the clients' optima lie from their common centre."""
    if min(clients, dimension) < 1 or samples < dimension:
        raise QuiverError(
            f"quadratics with {clients} clients, dimension {dimension} and {samples} samples: use "
            "at least one of each, and as many samples as dimensions."
        )
    centre = stream(seed, "quadratics-centre").standard_normal(dimension)
    optima = np.empty((clients, dimension))
    curvature = np.zeros((dimension, dimension))
    pull = np.zeros(dimension)
    pairs: list[tuple[Floats, Floats]] = []
    for client in range(clients):
        generator = stream(seed, "quadratics-client", client)
        optima[client] = centre + spread * generator.standard_normal(dimension)
        x = generator.standard_normal((samples, dimension))
        y = x @ optima[client]
        curvature += x.T @ x
        pull += x.T @ y
        pairs.append((x, y[:, None]))
    data = FederatedData.from_arrays(train=pairs, test=pairs)
    optimum = np.linalg.solve(curvature, pull).astype(np.float64)
    return Quadratics(data, optima, optimum)
