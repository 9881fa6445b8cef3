"""What is measured of all clients together, with the sums of one process in their order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.distributed.columns import Columns
from quiverfl.distributed.placement import Placement
from quiverfl.distributed.ranks import Ranks
from quiverfl.engine.accounting import consensus_width, squared_distance
from quiverfl.engine.gradients import full_gradient
from quiverfl.engine.mixing import NARROWEST
from quiverfl.engine.settings import RunSettings
from quiverfl.methods.state import fields_of
from quiverfl.task import Point
from quiverfl.transforms.privacy import spent

if TYPE_CHECKING:
    from quiverfl.distributed.rank_shard import RankShard

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Measures:
    """A shard's own record says it of its clients; this one of everybody's."""

    ranks: Ranks
    placement: Placement
    columns: Columns

    def record(self, shard: RankShard, settings: RunSettings, round: int) -> dict[str, Any]:
        name = shard.method.mass
        mass = None if name is None else self._all(getattr(shard.state, name))
        record: dict[str, Any] = {
            "steps": self._all(torch.from_numpy(shard.steps)).tolist(),
            "mu_min": None if mass is None else float(mass.min()),
            "mu_max": None if mass is None else float(mass.max()),
            "consensus": None,
            "gradient_shared": None,
            "gradient_personal": None,
        }
        if shard.context.private is not None:
            visits = self._all(torch.from_numpy(shard.visits)).numpy()
            record["epsilon"] = spent(visits, shard.context.private).tolist()
        if settings.evaluates(round):
            shared = next(iter(fields_of(shard.state, "shared").values()), None)
            record["consensus"] = None if shared is None else self._consensus(shared, mass)
            if settings.gradients:
                record.update(self._gradients(shard, mass))
        return record

    def _all(self, own: Tensor) -> Tensor:
        return self.ranks.rows(own, self.placement.counts)

    def _consensus(self, shared: Tensor, mass: Tensor | None) -> float:
        width = consensus_width(self.placement.clients, shared.element_size())
        nothing = torch.zeros((), dtype=torch.float64)
        apart = partial(squared_distance, mass=mass)
        return float(self.columns.summed(shared, width, apart, nothing))

    def _gradients(self, shard: RankShard, mass: Tensor | None) -> dict[str, float]:
        """As engine/gradients.py: a group at a time, gathered in the group's order."""
        mean = self._mean_shared(shard, mass).to(shard.context.device)
        total = torch.zeros_like(mean)
        personal = 0.0
        for clients in shard.whole_groups():
            first, second = self._of_group(shard, clients, mean)
            total += first.sum(dim=0)
            personal += float(second.square().sum())
        count = self.placement.clients
        return {
            "gradient_shared": float((total / count).square().sum()),
            "gradient_personal": personal / count,
        }

    def _mean_shared(self, shard: RankShard, mass: Tensor | None) -> Tensor:
        """ū = Σu / Σμ, its columns added up here and there and put together everywhere."""
        shared = next(iter(fields_of(shard.state, "shared").values()))
        total = shared.new_zeros(shared.shape[1], dtype=torch.float64)
        for block, whole in self.columns.dealt(shared, NARROWEST):
            begin = block.cuts[self.ranks.rank]
            total[begin : begin + whole.shape[1]] = whole.sum(dim=0, dtype=torch.float64)
        total = self.ranks.total(total)
        return total / (self.placement.clients if mass is None else mass.sum())

    def _of_group(self, shard: RankShard, clients: Integers, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Everybody's gradients: of the shared part at the mean, of the personal at its own."""
        context, group = shard.context, shard.part(clients)
        layouts = context.task.shared_layout, context.task.personal_layout
        found = tuple(mean.new_zeros(0, layout.size) for layout in layouts)
        if len(group.rows):
            own: Point = shard.visiting(torch.vmap(shard.method.personal)(shard.rows(group.rows)))
            agreed = mean.to(own.shared.dtype).expand(len(group.rows), -1).contiguous()
            common = Point(agreed, own.personal)
            found = (
                full_gradient(context, common, "shared", group),
                full_gradient(context, own, "personal", group),
            )
        # Gathered they are in the order of ranks.
        owner = np.searchsorted(self.placement.cuts, clients, side="right")
        back = torch.from_numpy(np.argsort(np.argsort(owner, kind="stable"), kind="stable"))
        counts = self.placement.counted(clients)
        shared, personal = (self.ranks.rows(part, counts)[back] for part in found)
        return shared, personal
