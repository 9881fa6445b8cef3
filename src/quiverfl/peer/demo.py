"""Several peers on one machine, to try things out: their keys, roster and folders."""

from __future__ import annotations

import json
import re
import socket
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quiverfl.errors import QuiverError
from quiverfl.peer.folder import (
    OwnSettings,
    PeerFolder,
    PeersSection,
    make_folder,
    parse_section,
)
from quiverfl.peer.link.identity import create_authority, issue_certificate
from quiverfl.peer.link.roster import ROSTER, Member, Roster
from quiverfl.runs.config import Config, parse_config

SWARM_RUN = """
[data]
name = "digits"
partition = "dirichlet"
alpha = 0.3

[model]
name = "mlp"
hidden = [64, 32]

[method]
name = "dfedpgp"
step = "debiased"    # kills and restarts make some masses small; the paper's step is lr / mass

[topology]
name = "random_push"

[training]
lr = 0.05
momentum = 0.9
batch_size = 16
clip_norm = 10.0
"""


def make_swarm(
    root: Path,
    peers: int,
    rounds: int | None,
    mode: str | None,
    config: Config | None = None,
    section: Mapping[str, Any] | None = None,
) -> dict[str, PeerFolder]:
    """Make certificates, a roster and a folder for each peer of a swarm on this machine.

    It runs a configuration if one is given, with as many clients as there are peers. `section` is
    its [peers]; a mode that is given wins over it.
    """
    if root.exists() and any(root.iterdir()):
        raise QuiverError(f"{root} is not empty: name a new folder with --out.")
    given = config is not None
    if config is None:
        config = parse_config(tomllib.loads(SWARM_RUN), "peer demo")
        config = config.with_values([("topology.neighbors", min(3, peers - 1))])
    values: list[tuple[str, Any]] = [("data.clients", peers)]
    values += [] if rounds is None else [("run.rounds", rounds)]
    wanted = config.topology.options().get("neighbors")
    if isinstance(wanted, int) and wanted >= peers:
        values.append(("topology.neighbors", peers - 1))
    config = config.with_values(values)
    if given:
        check_demo(config)
    section = dict(section or {})
    mode = mode or section.get("mode", "async")
    defaults = {"deadline": 60.0 if mode == "sync" else 10.0, "staleness": 3}
    section = {**defaults, **section, "mode": mode}
    parse_section(PeersSection, section, Path("[peers]"))
    authority = root / "authority"
    create_authority(authority, "demo")
    members = []
    for number, port in enumerate(_find_free_ports(peers)):
        name = f"peer-{number}"
        key = issue_certificate(authority, name, authority / name)
        members.append(Member(name, f"127.0.0.1:{port}", (key,)))
    Roster("demo", tuple(members)).write(authority / ROSTER)
    tree = config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    tree["peers"] = section
    lines = ["# Written by quiver peer demo.", *_format_toml(tree)]
    (root / "run.toml").write_text("\n".join(lines) + "\n")
    return {
        member.name: make_folder(
            root / member.name,
            root / "run.toml",
            authority / ROSTER,
            authority / member.name,
            OwnSettings(name=member.name, bind=member.address),
        )
        for member in members
    }


def check_demo(config: Config) -> None:
    """Refuse what the peers would refuse, each in its own log."""
    from quiverfl.engine.checks.peers import check_peer_method, choose_message_split
    from quiverfl.peer.setup import refuse_simulation_keys
    from quiverfl.runs.experiment import Experiment, make_method

    refuse_simulation_keys(config)
    check_peer_method(make_method(config))
    experiment = Experiment.of(config)
    if experiment.data.clients != config.data.clients:
        raise QuiverError(
            f"the data has {experiment.data.clients} clients, and there are {config.data.clients} "
            f"peers: give --peers {experiment.data.clients}."
        )
    choose_message_split(experiment.method, experiment.topology, config.run.rounds)
    experiment.simulation.check()


def _format_toml(tree: Mapping[str, Any]) -> Iterator[str]:
    """Sections of keys; what lies deeper is written as an inline table."""
    for section, values in tree.items():
        if values:
            yield f"\n[{section}]"
            yield from (f"{_format_key(k)} = {_format_value(v)}" for k, v in values.items())


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = (f"{_format_key(key)} = {_format_value(part)}" for key, part in value.items())
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_format_value, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _format_key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key)


def _find_free_ports(count: int) -> Iterator[int]:
    """Find ports that are free now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        yield from [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
