"""A peer's folder: what it shares with all peers, and what is its own.

run.toml      the run: the configuration of an experiment and a [peers] section; same for all
roster.toml   the members; same for all
peer.toml     this peer: name, address to bind, metrics, its own data
ca.pem cert.pem key.pem
store/        its durable memory
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from quiverfl.errors import QuiverError, suggest
from quiverfl.methods import METHODS
from quiverfl.methods.push_sum import Step, offers_step
from quiverfl.peer.accounts.disk import write_durably
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.context import Agreement, Limits
from quiverfl.peer.link.identity import (
    AUTHORITY_CERTIFICATE,
    CERTIFICATE,
    KEY,
    Identity,
)
from quiverfl.peer.link.messages import Manifest, canonical_hash
from quiverfl.peer.link.roster import ROSTER, Roster, read_toml, say_invalid
from quiverfl.peer.link.wire import Name
from quiverfl.runs.config import MethodConfig
from quiverfl.support.output_folders import list_contents, refuse_foreign
from quiverfl.transforms.robustness import Robustness

# How a peer runs, and how that ended.


@dataclass(frozen=True)
class Settings:
    """Settings of one peer; `rounds`, `mode` and `deadline` are the same for all peers of a run."""

    rounds: int
    mode: Literal["sync", "async"] = "sync"
    deadline: float = 60.0  # the most seconds that a round waits for missing shares
    deadline_floor: float | None = None  # the least, if the deadline follows what was measured
    deadline_percentile: float = 0.9  # of the past shares' delays
    deadline_factor: float = 3.0  # times that
    quorum: float = 1.0  # the part of the promised shares that is enough
    quorum_by: Literal["members", "mass"] = "members"
    staleness: int | None = None  # async: rounds a peer may be ahead of the slowest it knows of
    max_debt: float = 0.25  # async: mass a neighbour may hold of this peer's, net of what it gave
    round_interval: float = 0.0  # async: seconds between rounds
    linger: float = 30.0  # seconds without news before a finished peer stops serving others
    bind: str = "127.0.0.1:0"
    metrics: str = ""
    trust_store: bool = False
    evaluate_every: int = 1
    founders: int | None = None  # members that began the run; all of the roster if not given
    copies: bool = False  # send whole messages, not shares with mass
    rule: Robustness | None = None  # the rule for messages of other peers


@dataclass
class Outcome:
    """The way in which the process ended."""

    finished: bool = False
    left: bool = False
    stopped: bool = False  # on request, before the run was over
    undelivered: int = 0  # shares in the outbox: safe, and sent when it starts again
    metrics: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)  # by neighbour, why its shares wait


RUN, PEER, STORE = "run.toml", "peer.toml", "store"
WAITING_KEYS = ("quorum", "quorum_by", "deadline_floor", "deadline_percentile", "deadline_factor")
LATER_KEYS = ("noise", *WAITING_KEYS)
"""Keys of [peers] that runs were begun without: at their defaults they are not hashed."""
RENAMED_KEYS = {"lend": "max_debt", "pause": "round_interval"}
"""Keys of [peers] that had other names; the agreement still hashes those."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


AnySection = TypeVar("AnySection", bound=_Section)


class OwnData(_Section):
    """The source of this peer's examples: one of Quiver's, or module:function."""

    name: str
    root: str | None = None
    path: str | None = None
    test_share: float = Field(
        default=0.2, ge=0, lt=1
    )  # set aside where the source has no test part
    options: dict[str, Any] = Field(default_factory=dict)


class OwnSettings(_Section):
    name: Name
    bind: Annotated[str, StringConstraints(pattern=r"^\S*:\d{1,5}$")]  # HOST:PORT
    metrics: str = ""
    device: str = "cpu"
    threads: int | None = 1
    relay_rate: float = Field(default=8.0, gt=0)  # MiB a second for each member, if it relays
    data: OwnData | None = None


class PeersSection(_Section):
    """[peers] of run.toml: how the members deal with each other."""

    mode: Literal["sync", "async"] = "sync"
    deadline: float = Field(default=60.0, gt=0)
    deadline_floor: float | None = Field(default=None, gt=0)
    deadline_percentile: float = Field(default=0.9, gt=0, le=1)
    deadline_factor: float = Field(default=3.0, ge=1)
    quorum: float = Field(default=1.0, gt=0, le=1)
    quorum_by: Literal["members", "mass"] = "members"
    staleness: int | None = Field(default=None, ge=0)
    max_debt: float = Field(default=0.25, gt=0)
    round_interval: float = Field(default=0.0, ge=0)
    linger: float = Field(default=30.0, gt=0)
    outlier: Literal["off", "warn", "refuse"] = "off"
    outlier_factor: float = Field(default=10.0, gt=0)
    mass_cap: float | None = Field(default=None, gt=0)
    noise: Literal["secret", "seed"] = "secret"
    """The source of [privacy]'s noise: each peer's own secret, or the run's seed, from which
    every peer can compute it."""

    @model_validator(mode="after")
    def _check_waiting(self) -> PeersSection:
        if self.mode == "async" and (self.quorum < 1 or self.deadline_floor is not None):
            raise ValueError(
                "quorum and deadline_floor are for mode = sync: async waits for nobody"
            )
        if self.deadline_floor is not None and self.deadline_floor > self.deadline:
            raise ValueError(
                f"deadline_floor = {self.deadline_floor:g} is above deadline = {self.deadline:g}"
            )
        return self


@dataclass(frozen=True)
class PeerFolder:
    """All settings of a peer, as its folder has them."""

    path: Path
    own: OwnSettings
    roster: Roster
    peers: PeersSection
    experiment: dict[str, Any]
    """The sections of run.toml that make an experiment."""

    @classmethod
    def read(cls, path: Path) -> PeerFolder:
        if not (path / PEER).exists():
            raise QuiverError(f"{path} is not a peer's folder: make one with quiver peer init.")
        own = parse_section(OwnSettings, read_toml(path / PEER), path / PEER)
        return cls.combine(path, own, path / RUN, path / ROSTER)

    @classmethod
    def combine(cls, path: Path, own: OwnSettings, run: Path, roster: Path) -> PeerFolder:
        """Read the two files that all peers share, wherever they lie."""
        tree = read_toml(run)
        peers = parse_section(PeersSection, tree.get("peers", {}), run)
        members = Roster.read(roster)
        members.member(own.name)
        experiment = {key: value for key, value in tree.items() if key != "peers"}
        return cls(path, own, members, peers, experiment)

    @property
    def store(self) -> Path:
        return self.path / STORE

    @property
    def number(self) -> int:
        return self.roster.number(self.own.name)

    @cached_property
    def agreed_experiment(self) -> dict[str, Any]:
        """The experiment with the step in force, as it is run, recorded and agreed on."""
        return fill_in_step(self.experiment, self.peers.mode)

    def identity(self) -> Identity:
        identity = Identity.read(self.path)
        identity.check(self.own.name)
        self.roster.identify(identity.certificate)
        return identity

    def agreement(self, manifest: Manifest) -> Agreement:
        peers = self.peers.model_dump()
        for old, new in RENAMED_KEYS.items():  # hashed as they were, so that runs go on
            peers[old] = peers.pop(new)
        for key in LATER_KEYS:
            if peers[key] == PeersSection.model_fields[key].default:
                del peers[key]
        agreed, written = (
            canonical_hash({"experiment": experiment, "peers": peers})
            for experiment in (self.agreed_experiment, self.experiment)
        )
        choice = choose_step(self.experiment, self.peers.mode)
        implicit = choice is not None and not choice.named and agreed != written
        earlier = written if implicit else ""
        return Agreement(self.roster.run, self.own.name, agreed, manifest, earlier=earlier)

    def settings(self, rounds: int, evaluate_every: int, trust_store: bool) -> Settings:
        return Settings(
            rounds=rounds,
            mode=self.peers.mode,
            deadline=self.peers.deadline,
            staleness=self.peers.staleness,
            max_debt=self.peers.max_debt,
            round_interval=self.peers.round_interval,
            linger=self.peers.linger,
            bind=self.own.bind,
            metrics=self.own.metrics,
            trust_store=trust_store,
            evaluate_every=evaluate_every,
            **{key: getattr(self.peers, key) for key in WAITING_KEYS},
        )

    def limits(self) -> Limits:
        members = len(self.roster.members)
        cap = members if self.peers.mass_cap is None else self.peers.mass_cap
        return Limits(
            outlier=self.peers.outlier,
            outlier_factor=self.peers.outlier_factor,
            mass_cap=int(cap * UNIT),
            staged=max(64, members),
            relay_rate=int(self.own.relay_rate * (1 << 20)),
        )


def make_folder(path: Path, run: Path, roster: Path, keys: Path, own: OwnSettings) -> PeerFolder:
    """Make a peer's folder from the run's configuration, its roster, and the peer's keys."""
    if (path / PEER).exists():
        raise QuiverError(f"{path} is a peer's folder already; it is not overwritten.")
    Roster.read(roster).member(own.name)
    pairs = [(run, RUN), (roster, ROSTER)]
    pairs += [(keys / name, name) for name in (AUTHORITY_CERTIFICATE, CERTIFICATE, KEY)]
    for source, name in pairs:
        if not source.exists():
            raise QuiverError(f"{source} does not exist: it is needed as {path / name}.")
    names = {name for _, name in pairs}
    refuse_foreign(path, lambda _: set(list_contents(path)) <= names, "choose another folder")
    for source, name in pairs:
        target = path / name
        if target.exists() and target.read_bytes() != source.read_bytes():
            raise QuiverError(
                f"{target} is there already, and is not {source}: choose another folder, or move "
                "it away."
            )
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for source, name in pairs:
        target = path / name
        if source.resolve() != target.resolve():
            shutil.copyfile(source, target)
        target.chmod(0o600 if name == KEY else 0o644)
    write_durably(path / PEER, _format_own(own).encode(), 0o600)
    return PeerFolder.read(path)


def _format_own(own: OwnSettings) -> str:
    lines = [f'name = "{own.name}"', f'bind = "{own.bind}"']
    lines.append(f'metrics = "{own.metrics}"  # a loopback address such as 127.0.0.1:9464')
    lines += [f'device = "{own.device}"', f"threads = {own.threads or 1}", ""]
    if own.data is None:
        lines.append("# Without [data], this peer takes its share of the run's own data set.")
        lines += ["# [data]", '# name = "table"', '# path = "patients.csv"']
        lines += ["# [data.options]", '# label = "diagnosis"']
    else:
        lines += ["[data]", f"name = {json.dumps(own.data.name)}"]
        lines += [f"path = {json.dumps(own.data.path)}"] if own.data.path else []
        lines += ["", "[data.options]"] if own.data.options else []
        lines += [f"{key} = {json.dumps(value)}" for key, value in own.data.options.items()]
    return "\n".join(lines) + "\n"


def parse_section(kind: type[AnySection], values: Any, path: Path) -> AnySection:
    if isinstance(values, dict):
        for key in values:
            if key not in kind.model_fields:
                if key in RENAMED_KEYS:
                    raise QuiverError(f"{path}: {key} is now called {RENAMED_KEYS[key]}.")
                raise QuiverError(f"{path}: unknown key {key}; {suggest(key, kind.model_fields)}")
    try:
        return kind.model_validate(values)
    except ValidationError as problem:
        raise QuiverError(say_invalid(path, problem)) from problem


# The step of a run between peers


Experiment = dict[str, Any]


class StepChoice(NamedTuple):
    """The step on z = u/μ that is in force, and whether run.toml names it."""

    step: Step
    floor: float | None
    named: bool


def choose_step(experiment: Mapping[str, Any], mode: Literal["sync", "async"]) -> StepChoice | None:
    """Choose the step for a run.toml as it is written; None if the method offers no choice.

    Without waiting, mass gathers at slow peers and fast ones hold little. With the paper's step η/μ
    a fast peer then moves its model by many times η. So async peers take the debiased step, by η,
    unless run.toml says otherwise; sync peers take the paper's.
    """
    method = experiment.get("method", {})
    if not isinstance(method, Mapping) or not _offers_step(method):
        return None
    floor, named = method.get("step_floor"), "step" in method or "step_floor" in method
    default: Step = "debiased" if mode == "async" and not named else "paper"
    return StepChoice(method.get("step", default), floor, named)


def fill_in_step(experiment: Experiment, mode: Literal["sync", "async"]) -> Experiment:
    """Write the step in force into the experiment, before that is hashed.

    The paper's step is the method's default and is left out. So the agreement of such a run is the
    same as before there was a choice.
    """
    choice = choose_step(experiment, mode)
    if choice is None:
        return experiment
    method = {key: value for key, value in experiment.get("method", {}).items() if key != "step"}
    if choice.step != "paper":
        method["step"] = choice.step
    empty = not method and "method" not in experiment
    return experiment if empty else {**experiment, "method": method}


def _offers_step(method: Mapping[str, Any]) -> bool:
    try:
        return offers_step(METHODS.find(str(method.get("name", MethodConfig().name))))
    except QuiverError:  # refused with its place when the configuration is checked
        return False
