"""A configuration: TOML → frozen, checked sections. Unknown keys are refused.

[data]      which data, how many clients, how it is shared out
[model]     which model and its options, which part is personal
[task]      what is learned: loss and metrics
[method]    which method and its options
[topology]  who talks to whom; "auto" takes the usual one of the method
[training]  the optimizer
[compression]  what is sent in place of whole messages
[privacy]  how far what is sent is clipped and blurred
[robustness]  which part of a neighbour's message is taken
[adversary]  clients that attack, and how
[run]       rounds, seed, and how the run is carried out
[overrides.METHOD.SECTION]  what is different for one method when several are compared
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from quiverfl.bundled import config_file
from quiverfl.errors import QuiverError, nearest
from quiverfl.experiment_keys import digest, experiment_settings, run_settings
from quiverfl.methods import Method, find_method
from quiverfl.objectives import find_loss, find_metrics
from quiverfl.references import is_reference
from quiverfl.topologies import TOPOLOGIES, find_topology
from quiverfl.training import Training
from quiverfl.transforms import TRANSFORMS, find_transform, make_transforms
from quiverfl.transforms.chosen import Transforms

Options = dict[str, Any]
UNSET = object()
"""In place of a value: the key is taken out, so that its default holds."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(Section):
    name: str = "digits"
    root: str | None = None
    """Where files lie: $QUIVER_DATA or the folder `data` unless given."""
    clients: int | None = 20
    partition: str = "dirichlet"
    alpha: float | None = None
    classes_per_client: int | None = None
    min_samples: int | None = None
    samples_per_client: int | None = None
    test_per_client: int | None = None
    validation: float | None = None
    augment: str = "none"
    mapped: bool = False
    """Inputs stay on disk; a batch is read when it is used."""
    seed: int | None = None
    """Of the partition; the run's own unless given."""
    options: Options = Field(default_factory=dict)
    """Of the source, such as the columns of a table."""

    @model_validator(mode="after")
    def _all_owners(self) -> DataConfig:
        """Under `natural` the data says how many clients there are, unless fewer are wanted."""
        if self.partition == "natural" and "clients" not in self.model_fields_set:
            object.__setattr__(self, "clients", None)
        return self

    def partition_options(self) -> Options:
        named = ("alpha", "classes_per_client", "min_samples")
        return {key: getattr(self, key) for key in named if getattr(self, key) is not None}


class ModelConfig(Section):
    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = "mlp"
    personal: tuple[str, ...] = ("head",)

    @field_validator("personal", mode="before")
    @classmethod
    def _one_name(cls, value: object) -> object:
        """One name may stand without brackets, as in Python."""
        return (value,) if isinstance(value, str) else value

    def options(self) -> Options:
        return dict(self.model_extra or {})


class TaskConfig(Section):
    loss: str = "cross_entropy"
    metrics: tuple[str, ...] | None = None
    """Those that are usual for the loss unless given; results are judged by the first."""
    inputs: Literal["arguments", "tree"] = "arguments"
    """Whether several inputs are several arguments of the model, or one."""

    @field_validator("metrics", mode="before")
    @classmethod
    def _one_name(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class MethodConfig(Section):
    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = "dfedpgp"

    def options(self) -> Options:
        return dict(self.model_extra or {})


class TopologyConfig(Section):
    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = "auto"

    def options(self) -> Options:
        return dict(self.model_extra or {})


class TransformConfig(Section):
    model_config = ConfigDict(frozen=True, extra="allow")

    name: str | None = None
    """Messages are left as they are unless given."""


class TrainingConfig(Section):
    lr: float = 0.1
    personal_lr: float | None = None
    lr_decay: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_size: int | Literal["all"] = 128
    """ "all": the whole local set in one batch."""
    clip_norm: float | None = None
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    @field_validator("batch_size", mode="before")
    @classmethod
    def _some_or_all(cls, value: object) -> object:
        if value == "all" or (isinstance(value, int) and value >= 1):
            return value
        raise ValueError(
            'it must be a whole number of at least 1, or "all" for the whole local set in one batch'
        )

    def training(self) -> Training:
        values = self.model_dump()
        if values["batch_size"] == "all":
            values["batch_size"] = None
        return Training(**values)


class RunConfig(Section):
    rounds: int = Field(default=20, ge=0)
    seed: int = Field(default=0, ge=0)
    common_init: bool = True
    epochs_per_client: tuple[int, ...] | None = None
    epoch_groups: tuple[int, ...] | None = None
    """Clients in as many equal groups, each with its own number of epochs."""
    evaluate_every: int = Field(default=1, ge=1)
    keep_local: bool = True
    gradients: bool = False
    """Measure the gradients that DFedPGP's theorem bounds in every evaluated round."""
    dtype: Literal["float32", "float64"] = "float32"
    device: str = "cpu"
    threads: int | None = Field(default=None, ge=1)
    executor: Literal["auto", "vectorized", "sequential", "measure"] = "auto"
    precision: Literal["float32", "tf32", "bf16"] = "float32"
    compile: bool = False
    states: Literal["device", "host"] = "device"
    """Where the clients' states lie while others train."""
    arithmetic: Literal["matrix", "peers"] = "matrix"
    """ "peers": rounded as real peers round, so that sync peers equal this run bit for bit."""
    checkpoint_every: int = Field(default=10, ge=1)


class Config(Section):
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    method: MethodConfig = MethodConfig()
    topology: TopologyConfig = TopologyConfig()
    training: TrainingConfig = TrainingConfig()
    compression: TransformConfig = TransformConfig()
    privacy: TransformConfig = TransformConfig()
    robustness: TransformConfig = TransformConfig()
    adversary: TransformConfig = TransformConfig()
    run: RunConfig = RunConfig()
    overrides: dict[str, dict[str, Options]] = Field(default_factory=dict)

    def transforms(self) -> Transforms:
        """What is done to messages on their way."""
        return make_transforms({name: getattr(self, name).model_dump() for name in TRANSFORMS})

    def experiment(self) -> str:
        """A hash of what makes the experiment: everything but seeds and how it is carried out.

        Defaults are left out, so that a key that a later version adds changes nothing.
        """
        return digest(experiment_settings(self.model_dump(mode="json", exclude_defaults=True)))

    def identity(self) -> str:
        """A hash of what decides what a run computes and records: the experiment and its seeds."""
        return digest(run_settings(self.model_dump(mode="json", exclude_defaults=True)))

    def with_values(self, values: Iterable[tuple[str, Any]]) -> Config:
        """The same with some keys set, each named `section.key`."""
        tree = self.model_dump(mode="json", exclude_unset=True)
        for path, value in values:
            _set(tree, path, value)
        return parse(tree)

    def for_method(self, name: str) -> Config:
        """The same for another method: its own options only, and what is overridden for it."""
        find_method(name)
        tree = self.model_dump(mode="json", exclude_unset=True)
        if tree.get("method", {}).get("name", MethodConfig().name) != name:
            tree["method"] = {"name": name}
        for section, options in self.overrides.get(name, {}).items():
            tree.setdefault(section, {}).update(options)
        return parse(tree)


def load_config(path: Path, values: Iterable[str] = ()) -> Config:
    """Read a TOML file, or one that comes with the package, by its name.

    `values` are `section.key=value` texts that win over it.
    """
    values = list(values)
    path = config_file(path)
    tree = read_toml(path, f"{path}: no such configuration file.")
    for text in values:
        _set(tree, *setting(text))
    tree.pop("peers", None)  # what real peers do with the same file can be simulated first
    return parse(tree, f"{path} and --set" if values else str(path))


def read_toml(path: Path, missing: str) -> dict[str, Any]:
    """What a TOML file says; `missing` is the error if there is none."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise QuiverError(missing) from None
    except OSError as error:
        raise QuiverError(f"{path}: cannot be read: {error.strerror}.") from error
    try:
        return tomllib.loads(content.decode("utf-8-sig"))  # editors on Windows write a mark first
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise QuiverError(
            f"{path}: cannot be read: line {line} is not UTF-8 (byte {content[error.start]:#04x}); "
            "save it as UTF-8."
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise QuiverError(f"{path}: not valid TOML: {error}") from error


def setting(text: str) -> tuple[str, Any]:
    """`section.key=value` → the key and its value; UNSET where there is none."""
    key, separator, value = text.partition("=")
    if not separator:
        raise QuiverError(f"--set {text!r}: write section.key=value.")
    return key.strip(), toml_value(value.strip()) if value.strip() else UNSET


def parse(tree: Mapping[str, Any], source: str = "configuration") -> Config:
    """Check everything that can be checked before any data is read."""
    _refuse_unknown(tree, source)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        own = first.get("ctx", {}).get("error")  # what a validator of ours said
        reason = first["msg"].lower() if own is None else str(own)
        raise QuiverError(f"{source}: {key} = {first['input']!r}: {reason}.") from error
    config.training.training()
    try:
        config.transforms()
    except QuiverError as error:
        raise QuiverError(f"{source}: {error}") from error
    try:
        find_loss(config.task.loss)
        find_metrics(config.task.metrics, config.task.loss)
    except QuiverError as error:
        raise QuiverError(f"{source}: [task] {error}") from error
    return config


def _refuse_unknown(tree: Mapping[str, Any], source: str) -> None:
    for section, values in tree.items():
        if section not in Config.model_fields:
            raise QuiverError(
                f"{source}: unknown section [{section}]; {nearest(section, Config.model_fields)}"
            )
        if not isinstance(values, Mapping):
            raise QuiverError(f"{source}: {section} must be a section: write [{section}].")
        kind = Config.model_fields[section].annotation
        if section == "overrides":
            _refuse_unknown_overrides(values, source)
        elif isinstance(kind, type) and issubclass(kind, Section):
            _refuse_unknown_keys(section, values, kind, source)


def _refuse_unknown_overrides(values: Mapping[str, Any], source: str) -> None:
    for method, sections in values.items():
        _method(method, f"{source}: [overrides.{method}]")
        own = dict(sections)
        if isinstance(own.get("method"), Mapping):
            own["method"] = {"name": method, **own["method"]}  # its options, not the base's
        _refuse_unknown(own, f"{source}, [overrides.{method}]")


def _refuse_unknown_keys(
    section: str, values: Mapping[str, Any], kind: type[Section], source: str
) -> None:
    known = set(kind.model_fields)
    if section == "method":
        name = values.get("name", MethodConfig().name)
        known |= set(inspect.signature(_method(str(name), source)).parameters)
    elif section in TRANSFORMS:
        known |= _transform_options(section, values, source)
    elif section == "topology":
        _check_topology(str(values.get("name", "auto")), source)
        return  # its options are checked against the topology's own
    elif kind.model_config.get("extra") == "allow":
        return  # a model's options are checked against the model's own
    for key, value in values.items():
        if key not in known:
            hint = _untyped(str(values.get("name", "")), key) if section == "method" else ""
            raise QuiverError(
                f"{source}: unknown key {section}.{key}; {hint or nearest(key, known)}"
            )
        if isinstance(value, bool) and key in kind.model_fields:
            _refuse_truth(f"{source}: {section}.{key}", value, kind.model_fields[key])


def _transform_options(section: str, values: Mapping[str, Any], source: str) -> set[str]:
    """The options of the transform that a section names."""
    name = values.get("name")
    if name is None and values.keys() - {"name"}:
        key = min(values.keys() - {"name"})
        raise QuiverError(
            f"{source}: {section}.{key} without {section}.name: say what it is an option of, one "
            f"of {', '.join(sorted(TRANSFORMS[section]))}."
        )
    if name is None:
        return set()
    try:
        return set(inspect.signature(find_transform(section, str(name))).parameters)
    except QuiverError as error:
        raise QuiverError(f"{source}: {error}") from error


def _untyped(name: str, key: str) -> str:
    """Why a method of the person's own does not take an option that its class seems to have."""
    kind = find_method(name) if is_reference(name) else None
    if not isinstance(kind, type) or not hasattr(kind, key):
        return ""
    if "__dataclass_fields__" not in vars(kind):
        return f"{kind.__name__} is not a dataclass: put @dataclass(frozen=True) above it."
    return f"{kind.__name__}.{key} has no type, so it is not an option: write {key}: float = … ."


def _refuse_truth(key: str, value: bool, field: FieldInfo) -> None:
    """Python takes true for 1, so that a slip would become one round, or a rate of 1."""
    if field.annotation is not bool:
        example = "" if field.default is None else f"; write a value such as {field.default}"
        raise QuiverError(f"{key} = {str(value).lower()}: it cannot be true or false{example}.")


def _check_topology(name: str, source: str) -> None:
    if is_reference(name):
        try:
            find_topology(name)
        except QuiverError as error:
            raise QuiverError(f"{source}: topology.name = {error}") from error
    elif name not in (*TOPOLOGIES, "auto"):
        raise QuiverError(
            f"{source}: topology.name = {name!r}: unknown topology; "
            f"{nearest(name, [*TOPOLOGIES, 'auto'])} Your own: module:function."
        )


def _method(name: str, source: str) -> Callable[..., Method]:
    try:
        return find_method(name)
    except QuiverError as error:
        raise QuiverError(f"{source}: {error}") from error


def _set(tree: dict[str, Any], path: str, value: Any) -> None:
    section, separator, key = path.partition(".")
    if not separator or not key:
        raise QuiverError(f"{path!r}: name a key as section.key, such as training.lr.")
    if section == "method" and key == "name" and tree.get("method", {}).get("name") != value:
        tree["method"] = {}  # another method, or the default one, has other options
    target = tree.setdefault(section, {})
    *inner, last = _parts(key)
    for part in inner:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise QuiverError(f"{path!r}: {section}.{part} is a value, not a section.")
    if value is UNSET:
        target.pop(last, None)
    else:
        target[last] = value


def _parts(key: str) -> list[str]:
    """The parts between dots; a method of your own, package.module:Class, is one part."""
    if ":" not in key:
        return key.split(".")
    reference, _, rest = key.partition(":")
    name, *others = rest.split(".")
    return [f"{reference}:{name}", *others]


def toml_value(text: str) -> Any:
    """A TOML value, or the text itself where it is none: `method.name=dfedpgp` needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
