"""Models: plain nn.Module, no federated learning in them.

Every one is a function (input_shape, classes, **options) → nn.Module whose classifier, one linear
layer called `head`, is the last thing it computes: the part that is usually personal.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from quiverfl.errors import QuiverError, nearest
from quiverfl.loading import is_reference, load_callable
from quiverfl.models.cnn import cnn_small, fedavg_cnn, lenet5
from quiverfl.models.mlp import MLP
from quiverfl.models.resnet_gn import resnet8_gn, resnet18_gn

ModelFactory = Callable[..., nn.Module]

MODELS: dict[str, ModelFactory] = {
    "mlp": MLP,
    "lenet5": lenet5,
    "cnn_small": cnn_small,
    "fedavg_cnn": fedavg_cnn,
    "resnet8_gn": resnet8_gn,
    "resnet18_gn": resnet18_gn,
}

GIVEN = ("input_shape", "classes")


def make_model(name: str, input_shape: tuple[int, ...], classes: int, **options: Any) -> nn.Module:
    """A fresh model by its name in MODELS, or one's own by `module:function`."""
    factory = model_factory(name)
    _check_options(name, factory, options)
    try:
        model = factory(input_shape, classes, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise QuiverError(
            f"model {name!r} cannot be made for inputs {list(input_shape)}, {classes} classes and "
            f"options {options}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise QuiverError(
            f"model {name!r} returned a {type(model).__name__}: it must return a torch nn.Module."
        )
    return model


def model_factory(name: str) -> ModelFactory:
    """The function behind a model's name."""
    if is_reference(name):
        return load_callable(name)
    if name not in MODELS:
        raise QuiverError(
            f"unknown model {name!r}; {nearest(name, MODELS)} Your own: module:function."
        )
    return MODELS[name]


def _check_options(name: str, factory: ModelFactory, options: dict[str, Any]) -> None:
    parameters = inspect.signature(factory).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    known = [p for p in parameters if p not in GIVEN]
    for option in options:
        if option in known:
            continue
        hint = nearest(option, known) if known else "it has no options."
        raise QuiverError(f"model {name!r} has no option {option!r}; {hint}")
