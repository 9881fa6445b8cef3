"""DFedPGP-SAM: DFedPGP with sharpness-aware steps on the shared part.

DFedPGP (Liu et al., CVPR 2024) whose line 10 takes its gradient at (z + ρ g/‖g‖, v), with
g = ∇_u F(z, v) on the same batch, as DFedSAM (Shi et al., ICML 2023) does for whole models. The
personal phase is plain: a head has few parameters and its own data. ρ is a distance from z,
whatever `step` says of how far z then moves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quiverfl.methods.blocks import sam_lookahead
from quiverfl.methods.contract import Train
from quiverfl.methods.dfedpgp import DFedPGP
from quiverfl.methods.push_sum import PushSumState
from quiverfl.options import NotNegative
from quiverfl.task import Task


@dataclass(frozen=True)
class DFedPGPSAM(DFedPGP):
    rho: NotNegative = 0.05

    name = "dfedpgpsam"
    title = "DFedPGP-SAM"

    def phases(self, task: Task) -> tuple[Train[PushSumState], ...]:
        """DFedPGP's phases; the gradient of u is taken at z + ρ g/‖g‖."""
        train_personal, train_shared = super().phases(task)
        return train_personal, replace(train_shared, lookahead=sam_lookahead(self.rho))
