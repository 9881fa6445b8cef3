"""The gradients that DFedPGP's theorem bounds, on the full local training sets.

    Δ_ū = ‖(1/m) Σ_i ∇_u F_i(ū, v_i)‖²      at the mean ū of the clients' shared parts
    Δ_v = (1/m) Σ_i ‖∇_v F_i(z_i, v_i)‖²    at the model (z_i, v_i) each client would use

They cost two passes over all training data, forward and backward, and so are asked for by name.
Inputs are prepared and not augmented, and nothing is dropped: F_i is the loss on the examples as
they are, of the model as it is in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.engine.context import ClientGroup, PhaseContext
from quiverfl.engine.lifting import lift_point
from quiverfl.engine.picks import weights_of
from quiverfl.engine.programs import aligned
from quiverfl.methods.contract import Part
from quiverfl.methods.state import fields_of
from quiverfl.task import Point

if TYPE_CHECKING:
    from quiverfl.engine.shard import Shard

Integers = npt.NDArray[np.int64]

SLAB = 512
"""Samples per client that pass through the model at once."""


def gradient_norms(shard: Shard) -> dict[str, float]:
    """Δ_ū and Δ_v of the states as they are now, for a shard that holds every client."""
    context = shard.context
    mean = mean_shared(shard).to(context.device)
    shared = torch.zeros_like(mean, dtype=torch.float64)
    personal = 0.0
    for group in shard.groups(np.arange(len(shard.ids))):
        own = shard.visiting(lift_point(shard.method.personal)(shard.rows(group.rows)))
        agreed = mean.to(own.shared.dtype).expand(len(group.rows), -1).contiguous()
        common = Point(agreed, own.personal)
        shared += full_gradient(context, common, "shared", group).sum(dim=0)
        personal += float(full_gradient(context, own, "personal", group).square().sum())
    clients = len(shard.ids)
    return {
        "gradient_shared": float((shared / clients).square().sum()),
        "gradient_personal": personal / clients,
    }


def mean_shared(shard: Shard) -> Tensor:
    """ū = Σu / Σμ: the mean of the u, since Σμ = m; with messages in flight, of what is here."""
    shared = next(iter(fields_of(shard.state, "shared").values()))
    total = shared.sum(dim=0, dtype=torch.float64)
    mass = shard.method.mass
    return total / (len(shared) if mass is None else getattr(shard.state, mass).sum())


def full_gradient(context: PhaseContext, point: Point, part: Part, group: ClientGroup) -> Tensor:
    """The gradient of each client's mean training loss, float64 [clients, size of the part]."""
    rows = group.rows
    sizes = context.examples.sizes[rows]
    everyone = sizes if group.company is None else group.company.train
    values = point.shared if part == "shared" else point.personal
    total = torch.zeros_like(values, dtype=torch.float64)
    if not values.shape[1]:
        return total
    for begin in range(0, int(sizes.max()), SLAB):
        here = np.flatnonzero(sizes > begin)
        counts = np.minimum(sizes[here] - begin, SLAB)
        among = np.minimum(everyone[everyone > begin] - begin, SLAB)
        width = int(among.max())
        samples = np.minimum(np.arange(begin, begin + width), sizes[here][:, None] - 1)
        x, y = context.examples.gather(rows[here], samples)
        some = point if len(here) == len(rows) else Point(*(half[here] for half in point))
        some = Point(*(aligned(half) for half in some))
        gradient = context.executor.bind(context.program(), some, part, training=False)
        slope = gradient(len(here), x, y, weights_of(counts, among, values), None)
        share = torch.from_numpy(counts / sizes[here]).to(total.device)
        total[here] += slope.double() * share.unsqueeze(1)
    return total
