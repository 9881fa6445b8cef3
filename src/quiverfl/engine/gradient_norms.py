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
import torch
from torch import Tensor

from quiverfl.engine.local.context import ClientGroup, PhaseContext
from quiverfl.engine.local.examples import Batch, padding_weights
from quiverfl.engine.local.programs import align_rows
from quiverfl.engine.states import open_client, to_device
from quiverfl.methods.contract import Part
from quiverfl.support.environment import NO_FLOAT64
from quiverfl.task import Params

if TYPE_CHECKING:
    from quiverfl.engine.shard import Shard

SLAB = 512
"""Samples per client that pass through the model at once."""


def gradient_norms(shard: Shard, mass: Tensor | None) -> dict[str, float]:
    """Δ_ū and Δ_v of the states of all clients as they are now."""
    context, world = shard.context, shard.world
    device = context.device if context.device.type not in NO_FLOAT64 else torch.device("cpu")
    mean = mean_shared(shard, mass).to(device)
    layouts = context.task.shared_layout, context.task.personal_layout
    shared, personal = torch.zeros_like(mean, dtype=torch.float64), 0.0
    clients = len(world.all_ids)
    for group in world.groups(np.arange(clients), context.executor.chunk):
        own_shared, own_personal = (mean.new_zeros(0, layout.size) for layout in layouts)
        if len(group.rows):
            if shard.opens_clients:
                open_client(shard, group.rows)
            own = to_device(shard.personal(group.rows), context.device)
            agreed = mean.to(own.shared.dtype).to(own.shared.device)
            agreed = agreed.expand(len(group.rows), -1).contiguous()
            common = Params(agreed, own.personal)
            own_shared = full_gradient(context, common, "shared", group)
            own_personal = full_gradient(context, own, "personal", group)
        shared += world.gather_group(own_shared, group).sum(dim=0)
        personal += float(world.gather_group(own_personal, group).square().sum())
    return {
        "gradient_shared": float((shared / clients).square().sum()),
        "gradient_personal": personal / clients,
    }


def mean_shared(shard: Shard, mass: Tensor | None) -> Tensor:
    """ū = Σu / Σμ: the mean of the u, since Σμ = m; with messages in flight, of what is here.

    `mass` is that of all clients.
    """
    assert shard.shared is not None
    total = shard.world.sum_rows(getattr(shard.state, shard.shared))
    return total / (len(shard.world.all_ids) if mass is None else mass.sum())


def full_gradient(context: PhaseContext, point: Params, part: Part, group: ClientGroup) -> Tensor:
    """The gradient of each client's mean training loss, float64 [clients, size of the part]."""
    rows = group.rows
    sizes = context.examples.sizes[rows]
    everyone = sizes if group.full_group is None else group.full_group.train
    values = point.shared if part == "shared" else point.personal
    device = values.device if values.device.type not in NO_FLOAT64 else torch.device("cpu")
    total = torch.zeros_like(values, dtype=torch.float64, device=device)
    if not values.shape[1]:
        return total
    for begin in range(0, int(sizes.max()), SLAB):
        present = np.flatnonzero(sizes > begin)
        counts = np.minimum(sizes[present] - begin, SLAB)
        among = np.minimum(everyone[everyone > begin] - begin, SLAB)
        width = int(among.max())
        samples = np.minimum(np.arange(begin, begin + width), sizes[present][:, None] - 1)
        x, y = context.examples.gather(rows[present], samples)
        everybody = len(present) == len(rows)
        stacked = (half if everybody else half[present] for half in point)
        params = Params(*(align_rows(half) for half in stacked))
        gradient = context.executor.bind(context.program(), params, part, training=False)
        gradients = gradient(Batch(len(present), x, y, padding_weights(counts, among, values)))
        fraction = torch.from_numpy(counts / sizes[present]).to(total.device)
        total[present] += gradients.to(device).double() * fraction.unsqueeze(1)
    return total
