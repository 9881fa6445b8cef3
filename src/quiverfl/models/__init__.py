"""Models: plain nn.Module, no federated learning in them.

Every one is a function (input_shape, classes, **options) → nn.Module whose classifier, one linear
layer called `head`, is the last thing it computes: the part that is usually personal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from quiverfl.errors import QuiverError
from quiverfl.models.networks import MLP, cnn_small, fedavg_cnn, lenet5
from quiverfl.models.pretrained import pretrained
from quiverfl.models.resnet import resnet8_bn, resnet8_gn, resnet18_gn
from quiverfl.support.references import Registry, check_options, describe_origin

ModelFactory = Callable[..., nn.Module]

_MODELS: dict[str, ModelFactory] = {
    "mlp": MLP,
    "lenet5": lenet5,
    "cnn_small": cnn_small,
    "fedavg_cnn": fedavg_cnn,
    "resnet8_gn": resnet8_gn,
    "resnet8_bn": resnet8_bn,
    "resnet18_gn": resnet18_gn,
}
MODELS = Registry("model", _MODELS, own='module:function, or "pretrained"')
PRETRAINED = "pretrained"
"""No model of its own: a network of yours, with its weights, under a fresh head."""


def make_model(name: str, input_shape: tuple[int, ...], classes: int, **options: Any) -> nn.Module:
    """A fresh model by its name in MODELS, or your own by `module:function`."""
    factory = check_model(name, options)
    if isinstance(input_shape, int | float | str):
        raise QuiverError(
            f"make_model: input_shape = {input_shape!r}: give the shape of one input, such as "
            "(3, 32, 32)."
        )
    if isinstance(classes, int) and classes < 1:
        raise QuiverError(f"make_model: classes = {classes!r}: it must be a whole number ≥ 1.")
    try:
        model = factory(input_shape, classes, **options)
    except QuiverError as error:
        raise QuiverError(f"model {name!r} for inputs {list(input_shape)}: {error}") from error
    except Exception as error:
        # Also whatever a function of your own raises: where it did is all they need.
        raise QuiverError(
            f"model {name!r} cannot be made for inputs {list(input_shape)}, {classes} classes and "
            f"options {options}: {type(error).__name__}: {error} ({describe_origin(error)})"
        ) from error
    if not isinstance(model, nn.Module):
        raise QuiverError(
            f"model {name!r} returned a {type(model).__name__}: it must return a torch nn.Module."
        )
    return model


def check_model(name: str, options: Iterable[str]) -> ModelFactory:
    """The function behind a model's name; options that it does not take are refused."""
    factory = pretrained if name == PRETRAINED else MODELS.find(name)
    check_options(f"model {name!r}", factory, options, "model", given=("input_shape", "classes"))
    return factory
