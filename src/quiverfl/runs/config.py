"""A configuration: frozen, checked sections. Unknown keys are refused.

[data]      which data, how many clients, how it is partitioned
[model]     which model and its options, which part is personal
[task]      what is learned: loss and metrics
[method]    which method and its options
[topology]  who sends to whom; "auto" takes the usual topology of the method
[training]  the optimizer
[compression]  how messages are compressed
[privacy]  how updates are clipped, and the noise on them
[robustness]  which messages of neighbours are trusted
[adversary]  clients that attack, and how
[devices]   how fast clients compute, when they are there; [network]: their links
[clock]     who waits for whom, in seconds
[run]       rounds, seed, and how the run is carried out
[track]     where else its numbers go: TensorBoard, Weights & Biases, MLflow
[overrides.METHOD.SECTION]  values for one method when several are compared

[run] and [training] are RunSettings and Training themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticUndefined

from quiverfl.clock.settings import (
    ClockSettings,
    DeviceSettings,
    NetworkSettings,
    Timing,
    choose_rounds,
    make_devices,
)
from quiverfl.data.unseen import UNSEEN_OPTIONS, Part, Start, When
from quiverfl.engine.settings import RunSettings
from quiverfl.errors import QuiverError, suggest
from quiverfl.identity import hash_settings, select_experiment_settings, select_run_settings
from quiverfl.methods import METHODS, Method
from quiverfl.objectives import find_loss, find_metrics
from quiverfl.options import python_number
from quiverfl.support.references import is_reference
from quiverfl.topologies import TOPOLOGIES, topology_options
from quiverfl.training import Training
from quiverfl.transforms import TRANSFORMS, Transforms, make_transforms

Options = dict[str, Any]
UNSET = object()
"""In place of a value: takes the key out, so that its default holds."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(Section):
    name: str = "digits"
    root: str | None = None
    """Folder of the files; $QUIVER_DATA or `data` unless given."""
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
    """Seed of the partition; the run's own unless given."""
    unseen: int | tuple[int | str, ...] | None = None
    """Clients held out of the federation: how many, or a list of numbers or owners' names."""
    unseen_start: Start = "random"
    """Source of the parameters that each receives (data/unseen.py)."""
    unseen_epochs: int | None = None
    unseen_part: Part | None = None
    unseen_when: When = "last"
    joins: tuple[tuple[int, int], ...] | None = None
    """Rounds in which members join, and how many: the last of the clients, in their order."""
    leaves: tuple[tuple[int, int], ...] | None = None
    """Rounds from which members are gone for good, and how many."""
    join_mass: float = 1.0
    """The push-sum mass that each newcomer brings."""
    options: Options = Field(default_factory=dict)
    """Options of the source, such as the columns of a table."""

    @model_validator(mode="after")
    def _all_owners(self) -> DataConfig:
        """Take all clients of the data under `natural`, unless a number is given."""
        if self.partition == "natural" and "clients" not in self.model_fields_set:
            object.__setattr__(self, "clients", None)
        return self

    @model_validator(mode="after")
    def _tests_of_somebody(self) -> DataConfig:
        """Refuse to say how unseen clients are tested where there are none."""
        for key in UNSEEN_OPTIONS:
            default = type(self).model_fields[key].default
            if self.unseen is None and getattr(self, key) != default:
                raise QuiverError(
                    f"data.{key} needs data.unseen: say how many clients are held out."
                )
        return self

    @model_validator(mode="after")
    def _mass_of_somebody(self) -> DataConfig:
        if self.joins is None and self.join_mass != 1:
            raise QuiverError("data.join_mass needs data.joins: say who joins, and when.")
        return self

    @property
    def changes_members(self) -> bool:
        return bool(self.joins or self.leaves)

    def unseen_options(self) -> Options:
        return {key: getattr(self, key) for key in UNSEEN_OPTIONS}

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
        """Accept one name without brackets, as in Python."""
        return (value,) if isinstance(value, str) else value

    def options(self) -> Options:
        return dict(self.model_extra or {})


class TaskConfig(Section):
    loss: str = "cross_entropy"
    metrics: tuple[str, ...] | None = None
    """The usual ones for the loss unless given; results are judged by the first."""
    inputs: Literal["arguments", "tree"] = "arguments"
    """Whether the model takes several inputs as arguments, or as one tree."""
    buffers: Literal["personal", "mixed"] = "personal"
    """Running statistics (BatchNorm) stay with a client, or are averaged with the shared part."""
    labels: Literal["common", "own"] = "common"
    """`own`: a client's model tells apart the classes that this client has, and no others."""

    @field_validator("metrics", mode="before")
    @classmethod
    def _one_name(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class MethodConfig(Section):
    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = "dfedpgp"

    @field_validator("name")
    @classmethod
    def _own_name(cls, name: str) -> str:
        """Another name for a method, such as dfedalt, gives the run of the method's own name."""
        return METHODS.resolve_alias(name)

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
    """None leaves messages as they are."""


class TrackConfig(Section):
    tensorboard: bool = False
    """Event files in the folder `tensorboard` of the run, written as it goes."""
    wandb: str | None = None
    """The project of Weights & Biases that gets the run."""
    mlflow: str | None = None
    """The experiment of MLflow that gets the run; MLFLOW_TRACKING_URI says where."""


class Config(Section):
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    method: MethodConfig = MethodConfig()
    topology: TopologyConfig = TopologyConfig()
    training: Training = Training()
    compression: TransformConfig = TransformConfig()
    privacy: TransformConfig = TransformConfig()
    robustness: TransformConfig = TransformConfig()
    adversary: TransformConfig = TransformConfig()
    devices: DeviceSettings = DeviceSettings()
    network: NetworkSettings = NetworkSettings()
    clock: ClockSettings = ClockSettings()
    run: RunSettings = RunSettings()
    track: TrackConfig = TrackConfig()
    overrides: dict[str, dict[str, Options]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _count_evaluations(self) -> Config:
        """Without waiting there are no common rounds: set one per evaluation."""
        if self.clock.asynchronous:
            given = {} if "run" not in self.model_fields_set else asdict(self.run)
            if given.get("rounds") == RunSettings.rounds:  # the default: not given, or as if not
                del given["rounds"]
            chosen: Any = choose_rounds(self.clock, given)
            object.__setattr__(self, "run", replace(self.run, **chosen))
        return self

    def timing(self, clients: int) -> Timing | None:
        """Make the devices and the clock, if the run has one."""
        if self.clock.waits is None:
            for name in ("devices", "network"):
                if getattr(self, name) != Config.model_fields[name].default:
                    raise QuiverError(
                        f'[{name}] without clock.waits: say who waits: "graph", "all", "pairs" or '
                        '"nobody". (`quiver report --devices FILE` times a finished run.)'
                    )
            return None
        seed, size = self.run.seed, self.training.batch_size
        devices = make_devices(self.devices, self.network, clients, seed, size)
        return Timing(devices, **asdict(self.clock))

    def transforms(self) -> Transforms:
        """Make the transforms of messages."""
        return make_transforms({name: getattr(self, name).model_dump() for name in TRANSFORMS})

    def experiment(self) -> str:
        """Return the hash of the experiment: everything but seeds and the runtime.

        Defaults are left out, so that a key of a later version changes nothing.
        """
        return hash_settings(
            select_experiment_settings(self.model_dump(mode="json", exclude_defaults=True))
        )

    def identity(self) -> str:
        """Return the hash of what a run computes and records: the experiment and its seeds."""
        return hash_settings(
            select_run_settings(self.model_dump(mode="json", exclude_defaults=True))
        )

    def with_values(self, values: Iterable[tuple[str, Any]]) -> Config:
        """Return a configuration with some keys set, each named `section.key`."""
        tree = self.model_dump(mode="json", exclude_unset=True)
        set_values(tree, values)
        return parse_config(tree)

    def for_method(self, name: str) -> Config:
        """Return the configuration of another method: its own options only, and its overrides."""
        METHODS.find(name)
        name = METHODS.resolve_alias(name)
        tree = self.model_dump(mode="json", exclude_unset=True)
        if tree.get("method", {}).get("name", MethodConfig().name) != name:
            tree["method"] = {"name": name}
        for section, options in self.overrides.get(name, {}).items():
            tree.setdefault(section, {}).update(options)
        return parse_config(tree)


def parse_config(tree: Mapping[str, Any], source: str = "configuration") -> Config:
    """Check everything that can be checked before any data is read."""
    try:
        tree = python_number(tree)
    except RecursionError:
        raise QuiverError(f"{source}: its sections are too deep in one another.") from None
    _refuse_unknown(tree, source)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        # Of a choice of types pydantic adds the one it tried, which is no key of the file.
        tried = ("int", "float", "str", "bool")
        key = ".".join(p for p in map(str, first["loc"]) if not (p in tried or "[" in p))
        ours = first.get("ctx", {}).get("error")  # from a validator of ours
        reason = first["msg"].lower() if ours is None else str(ours)
        raise QuiverError(f"{source}: {key} = {first['input']!r}: {reason}.") from error
    except QuiverError as error:
        raise QuiverError(f"{source}: {error}") from error
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
                f"{source}: unknown section [{section}]; {suggest(section, Config.model_fields)}"
            )
        if not isinstance(values, Mapping):
            raise QuiverError(f"{source}: {section} must be a section: write [{section}].")
        if section == "overrides":
            _refuse_unknown_overrides(values, source)
        else:
            _refuse_unknown_keys(section, values, source)


def _refuse_unknown_overrides(values: Mapping[str, Any], source: str) -> None:
    for method, sections in values.items():
        _find_method(method, f"{source}: [overrides.{method}]")
        if not isinstance(sections, Mapping):
            raise QuiverError(
                f"{source}: overrides.{method} = {sections!r}: write a section for each section "
                f"that differs, such as [overrides.{method}.training]."
            )
        own = dict(sections)
        if isinstance(own.get("method"), Mapping):
            own["method"] = {"name": method, **own["method"]}  # its options, not the base's
        _refuse_unknown(own, f"{source}, [overrides.{method}]")


def section_keys(section: str) -> dict[str, Any]:
    """Keys of a section and their defaults, apart from options of what the section names."""
    default = Config.model_fields[section].default
    if is_dataclass(default):
        return {field.name: field.default for field in fields(default)}
    return {key: field.default for key, field in type(default).model_fields.items()}


def _refuse_unknown_keys(section: str, values: Mapping[str, Any], source: str) -> None:
    defaults = section_keys(section)
    known = set(defaults)
    if section == "method":
        name = values.get("name", defaults["name"])
        known |= set(inspect.signature(_find_method(str(name), source)).parameters)
    elif section in TRANSFORMS:
        known |= _transform_options(section, values, source)
    elif section == "topology":
        _check_topology(str(values.get("name", "auto")), source)
        return  # its options are checked against the topology's own
    elif section == "model":
        return  # its options are checked against the model's own
    for key, value in values.items():
        if key not in known:
            hint = _explain_untyped(str(values.get("name", "")), key) if section == "method" else ""
            raise QuiverError(
                f"{source}: unknown key {section}.{key}; {hint or suggest(key, known)}"
            )
        # Python takes true for 1, so that a slip would become one round, or a rate of 1.
        if isinstance(value, bool) and key in defaults and not isinstance(defaults[key], bool):
            default = defaults[key]
            example = (
                "" if default in (None, PydanticUndefined) else f"; write a value such as {default}"
            )
            raise QuiverError(
                f"{source}: {section}.{key} = {str(value).lower()}: it cannot be true or false"
                f"{example}."
            )


def _transform_options(section: str, values: Mapping[str, Any], source: str) -> set[str]:
    """Return the options of the transform that a section names."""
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
        return set(inspect.signature(TRANSFORMS[section].find(str(name))).parameters)
    except QuiverError as error:
        raise QuiverError(f"{source}: {error}") from error


def _explain_untyped(name: str, key: str) -> str:
    """Explain why your own method does not take an option that its class seems to have."""
    kind = METHODS.find(name) if is_reference(name) else None
    if not isinstance(kind, type) or not hasattr(kind, key):
        return ""
    if "__dataclass_fields__" not in vars(kind):
        return f"{kind.__name__} is not a dataclass: put @dataclass(frozen=True) above it."
    return f"{kind.__name__}.{key} has no type, so it is not an option: write {key}: float = … ."


def _check_topology(name: str, source: str) -> None:
    if is_reference(name):
        try:
            TOPOLOGIES.find(name)
        except QuiverError as error:
            raise QuiverError(f"{source}: topology.name = {error}") from error
    elif name not in (*TOPOLOGIES, "auto"):
        raise QuiverError(
            f"{source}: topology.name = {name!r}: unknown topology; "
            f"{suggest(name, [*TOPOLOGIES, 'auto'])} Your own: module:function."
        )


def _find_method(name: str, source: str) -> Callable[..., Method]:
    try:
        return METHODS.find(name)
    except QuiverError as error:
        raise QuiverError(f"{source}: {error}") from error


def set_values(tree: dict[str, Any], values: Iterable[tuple[str, Any]]) -> None:
    """Set keys `section.key`: names first, since another name takes options out."""
    for path, value in sorted(values, key=lambda one: not one[0].endswith(".name")):
        set_value(tree, path, value)


def set_value(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set a key `section.key` of a tree of sections; UNSET takes it out."""
    section, separator, key = path.partition(".")
    if not separator or not section or not key:
        raise QuiverError(f"{path!r}: name a key as section.key, such as training.lr.")
    if section == "method" and key == "name" and tree.get("method", {}).get("name") != value:
        tree["method"] = {}  # another method, or the default one, has other options
    if (section, key) == ("topology", "name") and value in TOPOLOGIES:
        leave_topology_options(tree, value)
    target = tree.setdefault(section, {})
    *inner, last = _split_key(key)
    for part in inner:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise QuiverError(f"{path!r}: {section}.{part} is a value, not a section.")
    if value is UNSET:
        target.pop(last, None)
    else:
        target[last] = value


def leave_topology_options(tree: dict[str, Any], name: str) -> None:
    """Take out what was written for the graphs of "auto" and this one has no use for."""
    options = tree.get("topology", {})
    if options.get("name", "auto") == "auto":
        for key in {"neighbors", "sampled"} - set(topology_options(name)):
            options.pop(key, None)


def _split_key(key: str) -> list[str]:
    """Split at dots; your own method, package.module:Class, is one part."""
    if ":" not in key:
        return key.split(".")
    reference, _, rest = key.partition(":")
    name, *others = rest.split(".")
    return [f"{reference}:{name}", *others]
