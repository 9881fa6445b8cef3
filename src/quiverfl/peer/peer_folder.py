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
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from quiverfl.errors import QuiverError, nearest
from quiverfl.peer.agreement import Agreement, Limits
from quiverfl.peer.files import write_durably
from quiverfl.peer.identity import AUTHORITY_CERTIFICATE, CERTIFICATE, KEY, Identity
from quiverfl.peer.ledger import UNIT
from quiverfl.peer.manifest import Manifest, canonical_hash
from quiverfl.peer.peer_settings import Settings
from quiverfl.peer.roster import ROSTER, Roster
from quiverfl.peer.wire import Name

RUN, PEER, STORE = "run.toml", "peer.toml", "store"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


AnySection = TypeVar("AnySection", bound=_Section)


class OwnData(_Section):
    """Where this peer's examples are: one of Quiver's sources, or module:function."""

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
    data: OwnData | None = None


class PeersSection(_Section):
    """[peers] of run.toml: how the members deal with each other."""

    mode: Literal["sync", "async"] = "sync"
    deadline: float = Field(default=60.0, gt=0)
    staleness: int | None = Field(default=None, ge=0)
    lend: float = Field(default=0.25, gt=0)
    pause: float = Field(default=0.0, ge=0)
    linger: float = Field(default=30.0, gt=0)
    outlier: Literal["off", "warn", "refuse"] = "off"
    outlier_factor: float = Field(default=10.0, gt=0)
    mass_cap: float | None = Field(default=None, gt=0)
    noise: Literal["secret", "seed"] = "secret"
    """Of [privacy]: each peer's own secret, or the run's seed, from which all can compute it."""


@dataclass(frozen=True)
class PeerFolder:
    """Everything that is read before a peer starts."""

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
        own = _checked(OwnSettings, _toml(path / PEER), path / PEER)
        tree = _toml(path / RUN)
        peers = _checked(PeersSection, tree.get("peers", {}), path / RUN)
        roster = Roster.read(path / ROSTER)
        roster.member(own.name)
        experiment = {key: value for key, value in tree.items() if key != "peers"}
        return cls(path, own, roster, peers, experiment)

    @property
    def store(self) -> Path:
        return self.path / STORE

    @property
    def number(self) -> int:
        return self.roster.number(self.own.name)

    def identity(self) -> Identity:
        identity = Identity.read(self.path)
        identity.check(self.own.name)
        self.roster.identify(identity.certificate)
        return identity

    def agreement(self, manifest: Manifest) -> Agreement:
        peers = self.peers.model_dump()
        if self.peers.noise == "secret":  # unknown to runs that were begun before it could be set
            del peers["noise"]
        shared = {"experiment": self.experiment, "peers": peers}
        return Agreement(self.roster.run, self.own.name, canonical_hash(shared), manifest)

    def settings(self, rounds: int, evaluate_every: int, trust_store: bool) -> Settings:
        return Settings(
            rounds=rounds,
            mode=self.peers.mode,
            deadline=self.peers.deadline,
            staleness=self.peers.staleness,
            lend=self.peers.lend,
            pause=self.peers.pause,
            linger=self.peers.linger,
            bind=self.own.bind,
            metrics=self.own.metrics,
            trust_store=trust_store,
            evaluate_every=evaluate_every,
        )

    def limits(self) -> Limits:
        members = len(self.roster.members)
        cap = members if self.peers.mass_cap is None else self.peers.mass_cap
        return Limits(
            outlier=self.peers.outlier,
            outlier_factor=self.peers.outlier_factor,
            mass_cap=int(cap * UNIT),
            staged=max(64, members),
        )


def make_folder(path: Path, run: Path, roster: Path, keys: Path, own: OwnSettings) -> PeerFolder:
    """Gather what a peer needs into one folder."""
    if (path / PEER).exists():
        raise QuiverError(f"{path} is a peer's folder already; it is not overwritten.")
    Roster.read(roster).member(own.name)
    pairs = [(run, RUN), (roster, ROSTER)]
    pairs += [(keys / name, name) for name in (AUTHORITY_CERTIFICATE, CERTIFICATE, KEY)]
    for source, name in pairs:
        if not source.exists():
            raise QuiverError(f"{source} does not exist: it is needed as {path / name}.")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for source, name in pairs:
        target = path / name
        if source.resolve() != target.resolve():
            shutil.copyfile(source, target)
        target.chmod(0o600 if name == KEY else 0o644)
    write_durably(path / PEER, _written(own).encode(), 0o600)
    return PeerFolder.read(path)


def _written(own: OwnSettings) -> str:
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


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as problem:
        raise QuiverError(f"cannot read {path}: {problem.strerror}.") from problem
    except tomllib.TOMLDecodeError as problem:
        raise QuiverError(f"{path} is not valid TOML: {problem}.") from problem


def _checked(kind: type[AnySection], values: Any, path: Path) -> AnySection:
    if isinstance(values, dict):
        for key in values:
            if key not in kind.model_fields:
                raise QuiverError(f"{path}: unknown key {key}; {nearest(key, kind.model_fields)}")
    try:
        return kind.model_validate(values)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise QuiverError(f"{path}: {where} = {first['input']!r}: {first['msg']}.") from problem
