"""BatchNorm → GroupNorm in one call.

BatchNorm's output for a sample depends on the others in its batch, and on statistics that are
neither trained nor sent: a client's model would not be a function of its parameters. GroupNorm
(Wu & He 2018) normalises every sample by itself.
"""

from __future__ import annotations

import torch
from torch import nn

from quiverfl.errors import QuiverError

GROUPS = 32
"""Wu and He's number of groups."""


def group_norm(model: nn.Module, groups: int = GROUPS) -> nn.Module:
    """The same model with every BatchNorm replaced by a GroupNorm of the same weights.

    It has at most this many groups, of at least two channels each; BatchNorm1d, whose inputs may be
    vectors without further dimensions, becomes one group. Running statistics are left out: a
    pre-trained model needs some training to recover without them.
    """
    if not isinstance(model, nn.Module):
        raise QuiverError(f"group_norm: a {type(model).__name__} is not an nn.Module.")
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise QuiverError(
            f"group_norm: groups = {groups!r}: it must be a whole number, at least 1."
        )
    made: dict[nn.Module, nn.Module] = {}  # a layer used in two places stays one
    if isinstance(model, nn.modules.batchnorm._BatchNorm):
        return _replaced(model, groups)
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                if child not in made:
                    made[child] = _replaced(child, groups)
                module._modules[name] = made[child]
    return model


def _replaced(norm: nn.modules.batchnorm._BatchNorm, groups: int) -> nn.GroupNorm:
    if isinstance(norm, nn.modules.lazy.LazyModuleMixin):
        raise QuiverError(
            f"group_norm: a {type(norm).__name__} does not know its channels yet; run the model on "
            "a batch first, or give num_features."
        )
    channels = norm.num_features
    most = 1 if isinstance(norm, nn.BatchNorm1d) else min(groups, max(1, channels // 2))
    chosen = next(count for count in range(most, 0, -1) if channels % count == 0)
    made = nn.GroupNorm(chosen, channels, norm.eps, norm.affine)
    made.train(norm.training)
    if norm.affine:
        made.to(device=norm.weight.device, dtype=norm.weight.dtype)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                parameter.copy_(getattr(norm, name))
                parameter.requires_grad_(getattr(norm, name).requires_grad)
    return made
