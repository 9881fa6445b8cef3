"""A pretrained network as a body under a fresh head: `model.name = "pretrained"`.

The network is any function or class that makes an nn.Module: torchvision's, timm's, transformers',
your own. Its weights come from a local file: nothing is downloaded here.

    weights      .pt, .pth (a state_dict, loaded with weights_only), .safetensors, or a folder that
                 transformers' save_pretrained wrote
    head         its last linear layer, replaced by one with an output per class
    train        which parts are trained; the rest is frozen, with its running statistics
    normalize    how inputs were normalised when the weights were made
"""

from __future__ import annotations

import hashlib
import json
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quiverfl.errors import QuiverError
from quiverfl.models.lora import lora as add_adapters
from quiverfl.support.references import describe_origin, load_callable

Statistics = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation per channel, of images on the scale of [0, 1]."""
IMAGENET: Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HEADS = ("fc", "classifier", "head", "heads", "score")
"""What the last linear layer is called, as a part of its name, in the usual libraries."""
FILES = ("model.safetensors", "pytorch_model.bin")
"""Weights in a folder of save_pretrained."""
PROCESSOR = "preprocessor_config.json"
WRAPPERS = ("state_dict", "model", "model_state_dict")
"""Keys under which training scripts keep a state_dict in a checkpoint."""


class Pretrained(nn.Module):
    """The network without its last layer, `body`, and a layer of its own, `head`."""

    def __init__(self, body: nn.Module, head: nn.Linear, statistics: Statistics | None) -> None:
        super().__init__()
        self.body, self.head = body, head
        self.input_statistics = statistics
        """How its inputs must be normalised; None: as the data's are."""

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        features = self.body(*inputs, **named)
        logits: Tensor = self.head(getattr(features, "logits", features))
        return logits


class FrozenNorm(nn.Module):
    """A BatchNorm that is not trained: weight · (x - mean) / √(var + ε) + bias, all constant."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        ones = torch.ones_like(norm.running_var)
        scale = (ones if norm.weight is None else norm.weight.detach()).clone()
        shift = torch.zeros_like(ones) if norm.bias is None else norm.bias.detach().clone()
        self.register_buffer("weight", scale)
        self.register_buffer("bias", shift)
        self.register_buffer("running_mean", norm.running_mean.clone())
        self.register_buffer("running_var", norm.running_var.clone())
        self.eps = norm.eps

    def forward(self, x: Tensor) -> Tensor:
        named: Any = self
        scale = named.weight * (named.running_var + self.eps).rsqrt()
        shift = named.bias - named.running_mean * scale
        shape = (1, -1) + (1,) * (x.ndim - 2)
        normed: Tensor = x * scale.view(shape) + shift.view(shape)
        return normed


class HeldNorm(nn.Module):
    """A BatchNorm with a forward of its own, such as timm's with an activation, that stays in use.

    It normalises by the statistics of the weights also where the network around it is trained.
    """

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm = norm.eval()
        norm.track_running_stats = False  # they are nobody's own

    def train(self, mode: bool = True) -> HeldNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x)
        return normed


def pretrained(
    input_shape: tuple[int, ...],
    classes: int,
    source: str | Callable[..., nn.Module] = "",
    weights: str | Path | None = None,
    head: str | None = None,
    train: str | Sequence[str] | None = None,
    lora: int | None = None,
    targets: Sequence[str] | None = None,
    normalize: str | Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    sha256: str | None = None,
) -> nn.Module:
    """`source` makes the network, called with `options`; a text names it, module:function.

    `train`: "all", "head", or prefixes of the network's parameters, such as ["layer4"], which are
    trained beside the head. `lora` is the rank of adapters on the linear and attention layers that
    `targets` name; the rest is then frozen. `normalize`: "imagenet", "data" (as the data is
    standardised), or {mean = […], std = […]}; unless given, what the network or the folder of its
    weights says. `sha256` is that of the file of weights: any other is refused.
    """
    network = _make_network(source, options or {})
    name = _find_head(network, head)
    if weights is not None:
        path = Path(weights).expanduser()
        _check_sha256(path, sha256)
        _load(network, path, name)
    elif sha256 is not None:
        raise QuiverError("model.sha256 is that of a file of weights: set model.weights, too.")
    last: Any = network.get_submodule(name)
    _check_last(network, name, input_shape)
    fresh = nn.Linear(last.in_features, classes)
    statistics = _find_statistics(network, weights, normalize, input_shape)
    parent, _, leaf = name.rpartition(".")
    network.get_submodule(parent)._modules[leaf] = nn.Identity()
    model = Pretrained(network, fresh, statistics)
    _freeze(model, train, lora, targets)
    return model


def _make_network(source: str | Callable[..., nn.Module], options: Mapping[str, Any]) -> nn.Module:
    if not source or not (isinstance(source, str) or callable(source)):
        raise QuiverError(
            f"model.source = {source!r}: name the function that makes the network, such as "
            '"torchvision.models:resnet18"; in Python it may be the function itself.'
        )
    function = load_callable(source) if isinstance(source, str) else source
    called = source if isinstance(source, str) else getattr(source, "__name__", "source")
    try:
        network = function(**options)
    except QuiverError:
        raise
    except Exception as error:
        # Whatever a library raises: where it did, and what it was given, is all they need.
        raise QuiverError(
            f"model.source = {called!r} failed with model.options = {dict(options)}: "
            f"{type(error).__name__}: {error} ({describe_origin(error)})."
        ) from error
    if not isinstance(network, nn.Module):
        raise QuiverError(
            f"model.source = {called!r} returned a {type(network).__name__}: it must return a "
            "torch nn.Module."
        )
    return network


def _find_head(network: nn.Module, head: str | None) -> str:
    """The name of the layer that is replaced; timm's classifiers are of a subclass of its own."""
    inside = nn.modules.linear.NonDynamicallyQuantizableLinear  # of an attention
    linear: list[str] = [
        name
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear) and not isinstance(layer, inside) and name
    ]
    if head is not None:
        if head in linear:
            return head
        known = ", ".join(linear[-5:]) or "none"
        raise QuiverError(
            f"model.head = {head!r}: the network has no linear layer of this name; its last ones "
            f"are {known}."
        )
    if not linear:
        raise QuiverError(
            f"the network ({type(network).__name__}) has no nn.Linear that a fresh head could take "
            "the place of: give a source whose classifier is one."
        )
    if any(part in HEADS for part in linear[-1].split(".")):
        return linear[-1]
    raise QuiverError(
        "model.head: say which linear layer is the network's last one; its last ones are "
        f"{', '.join(linear[-5:])}."
    )


# Weights.


def find_weights(path: Path) -> Path:
    """The file of the weights: itself, or that in a folder of save_pretrained."""
    file = next((path / f for f in FILES if (path / f).is_file()), None) if path.is_dir() else path
    if file is None or not file.is_file():
        what = f"holds none of {', '.join(FILES)}" if path.is_dir() else "is not there"
        raise QuiverError(f"model.weights = {str(path)!r}: it {what}.")
    return file


def hash_weights(path: Path) -> str:
    """Hash the weights' file: another file under the same name makes another run."""
    file = find_weights(path)
    status = file.stat()
    return _hash_file(file, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)
def _hash_file(file: Path, changed: int, size: int) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _check_sha256(path: Path, wanted: str | None) -> None:
    if wanted is not None and hash_weights(path) != wanted.lower():
        raise QuiverError(
            f"{find_weights(path)} has the sha256 {hash_weights(path)}, not model.sha256 = "
            f"{wanted!r}: it is another file, or damaged."
        )


def _load(network: nn.Module, path: Path, head: str) -> None:
    """Load all but the head; what does not fit the network is refused."""
    file = find_weights(path)
    status = file.stat()
    given = _read_weights(file, status.st_mtime_ns, status.st_size)
    own = network.state_dict()
    wanted = {name for name in own if not name.startswith(f"{head}.")}
    if path.is_dir() and not wanted <= given.keys() and hasattr(network, "from_pretrained"):
        given = _read_by_library(network, path)
    weights = {name: leaf for name, leaf in given.items() if not name.startswith(f"{head}.")}
    counters = {name for name in wanted if name.endswith("num_batches_tracked")}
    for one, other, names in (
        ("lacks", "has", wanted - weights.keys() - counters),
        ("has", "lacks", weights.keys() - wanted),
    ):
        if names:
            first = ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
            raise QuiverError(
                f"{file} {one} {first}, which the network {other}: the weights are those of "
                "another network, or model.options must say more."
            )
    for name, leaf in weights.items():
        if leaf.shape != own[name].shape:
            raise QuiverError(
                f"{file}: {name} has the shape {tuple(leaf.shape)}, and the network's has "
                f"{tuple(own[name].shape)}: the weights are those of another network."
            )
        if leaf.is_floating_point() and not torch.isfinite(leaf).all():
            raise QuiverError(f"{file}: {name} holds NaN or infinity: the file is damaged.")
    network.load_state_dict({**own, **weights})


def _read_by_library(network: Any, folder: Path) -> dict[str, Tensor]:
    """The weights as transformers reads its own folder: it writes some under their older names."""
    try:
        loaded, report = type(network).from_pretrained(
            folder,
            config=network.config,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:
        # Whatever the library raises: the folder is the user's.
        raise QuiverError(
            f"{folder} cannot be read by {type(network).__name__}: {type(error).__name__}: "
            f"{(str(error).splitlines() or [''])[0].rstrip('.')}."
        ) from error
    state: dict[str, Tensor] = loaded.state_dict()
    fresh = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    unknown = {name: torch.zeros(()) for name in report["unexpected_keys"]}
    return {**{name: leaf for name, leaf in state.items() if name not in fresh}, **unknown}


@lru_cache(maxsize=2)
def _read_weights(file: Path, changed: int, size: int) -> dict[str, Tensor]:
    """A state_dict by its file, which is read again when it was changed."""
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            content: Any = load_file(file)
        else:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise QuiverError(
            f"{file} is damaged, or holds Python objects, which may run any program when they are "
            "loaded: save the parameters alone, torch.save(model.state_dict(), …)."
        ) from error
    except (OSError, ValueError, RuntimeError, EOFError, KeyError, zipfile.BadZipFile) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise QuiverError(f"{file} is not a readable file of weights ({first}).") from error
    except Exception as error:  # safetensors has a kind of its own
        raise QuiverError(f"{file} is not a readable file of weights ({error}).") from error
    for key in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(v, Tensor) for v in content.values()):
        raise QuiverError(f"{file} is no state_dict: it should hold tensors by name.")
    return {str(name).removeprefix("module."): leaf for name, leaf in content.items()}


# What its inputs are, and its last layer.

_TRIED: set[tuple[str, str, tuple[int, ...]]] = set()
"""Networks whose last layer was tried: one is made for every client."""


def _check_last(network: nn.Module, name: str, input_shape: tuple[int, ...]) -> None:
    """Refuse a layer whose output is not what the network says; needs a single input."""
    key = repr(network), name, tuple(input_shape) if isinstance(input_shape, tuple | list) else ()
    if key in _TRIED or not key[2]:
        return
    outputs: list[Tensor] = []
    hook = network.get_submodule(name).register_forward_hook(
        lambda layer, given, out: outputs.append(out)
    )
    ids = isinstance(next(_leaves(network), None), nn.Embedding)
    example = torch.zeros(2, *input_shape, dtype=torch.int64 if ids else torch.float32)
    training = network.training
    before = torch.random.get_rng_state()
    try:
        with torch.no_grad():
            said = network.eval()(example)
    except Exception as error:
        # Whatever the network raises for inputs that it cannot take.
        raise QuiverError(
            f"the network does not take inputs {list(input_shape)}: "
            f"{str(error).splitlines()[0].rstrip('.') if str(error) else type(error).__name__}."
        ) from error
    finally:
        hook.remove()
        network.train(training)
        torch.random.set_rng_state(before)
    said = getattr(said, "logits", said)
    if not (isinstance(said, Tensor) and len(outputs) == 1 and torch.equal(said, outputs[0])):
        raise QuiverError(
            f"model.head = {name!r} is not the last thing that the network computes: name that "
            "layer, or wrap the network in a module whose last layer it is."
        )
    _TRIED.add(key)


def _leaves(network: nn.Module) -> Iterator[nn.Module]:
    return (m for m in network.modules() if next(m.parameters(recurse=False), None) is not None)


def _find_statistics(
    network: nn.Module,
    weights: str | Path | None,
    normalize: str | Mapping[str, Any] | None,
    input_shape: tuple[int, ...],
) -> Statistics | None:
    images = isinstance(input_shape, tuple | list) and len(input_shape) == 3
    if normalize == "data":
        return None
    if normalize == "imagenet":
        statistics: Any = IMAGENET
    elif isinstance(normalize, Mapping):
        statistics = normalize.get("mean"), normalize.get("std")
    elif normalize is not None:
        raise QuiverError(
            f'model.normalize = {normalize!r}: "imagenet", "data", or {{mean = […], std = […]}}.'
        )
    else:
        statistics = _read_statistics(network, weights)
        if statistics is None and weights is not None and images:
            raise QuiverError(
                "model.normalize: neither the network nor its weights say how images were "
                'normalised: "imagenet", "data" (as this data is standardised), or {mean = […], '
                "std = […]}."
            )
        if statistics is None:
            return None
    mean, std = (_check_numbers(part) for part in statistics)
    if not images or len(mean) != input_shape[0] or len(std) != len(mean) or min(std) <= 0:
        raise QuiverError(
            f"model.normalize = {{mean = {list(mean)}, std = {list(std)}}}: give a mean and a "
            f"positive deviation per channel of an image; inputs are {list(input_shape)}."
        )
    return mean, std


def _check_numbers(given: Any) -> tuple[float, ...]:
    numbers = isinstance(given, list | tuple) and all(isinstance(n, int | float) for n in given)
    if not numbers or not given:
        raise QuiverError(f"model.normalize: {given!r} is no list of a number per channel.")
    return tuple(float(number) for number in given)


def _read_statistics(network: nn.Module, weights: str | Path | None) -> Any:
    """Mean and std of a timm network, or of the image processor in a transformers folder."""
    said = getattr(network, "pretrained_cfg", None) or getattr(network, "default_cfg", None)
    if isinstance(said, Mapping) and said.get("mean") and said.get("std"):
        return said["mean"], said["std"]
    file = None if weights is None else Path(weights).expanduser() / PROCESSOR
    if file is None or not file.is_file():
        return None
    try:
        read = json.loads(file.read_bytes())
        return read["image_mean"], read["image_std"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise QuiverError(f"{file} names no image_mean and image_std: set normalize.") from error


# Which parts are trained.


def _freeze(
    model: Pretrained,
    train: str | Sequence[str] | None,
    lora: int | None,
    targets: Sequence[str] | None,
) -> None:
    if lora is None and targets is not None:
        raise QuiverError("model.targets are the layers that get adapters: set model.lora, too.")
    if lora is not None and train == "all":
        raise QuiverError(
            'model.train = "all" with model.lora: adapters are for a network that is frozen; leave '
            "one of them out."
        )
    if train is None:
        train = "all" if lora is None else "head"
    if train == "all":
        return
    parts = () if train == "head" else (train,) if isinstance(train, str) else tuple(train)
    names = [name for name, _ in model.body.named_parameters()]
    for part in parts:
        if not any(name == part or name.startswith(f"{part}.") for name in names):
            tops = ", ".join(dict.fromkeys(name.split(".")[0] for name in names))
            raise QuiverError(
                f'model.train: the network has no part {part!r}; "all", "head", or some of: {tops}.'
            )
    trained = ("head", *(f"body.{part}" for part in parts))
    if lora is not None:
        add_adapters(model, lora, targets, train=trained)
    else:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(name.startswith(f"{p}.") or name == p for p in trained))
    _freeze_norms(model, trained)


def _freeze_norms(model: nn.Module, trained: Sequence[str]) -> None:
    """BatchNorm of a frozen part keeps the statistics that belong to the weights."""
    kinds = nn.modules.batchnorm._BatchNorm
    for name, module in list(model.named_modules()):
        if any(name == part or name.startswith(f"{part}.") for part in trained):
            continue
        for leaf, child in module._modules.items():
            path = f"{name}.{leaf}" if name else leaf
            below = any(path == part or path.startswith(f"{part}.") for part in trained)
            if isinstance(child, kinds) and not below and child.running_mean is not None:
                plain = type(child).forward is kinds.forward
                module._modules[leaf] = FrozenNorm(child) if plain else HeldNorm(child)
