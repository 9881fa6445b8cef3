"""Recorded async peers, played again in the simulation: all pushes and all shares taken.

A peer's store has every push with its shares, and every share that it took, in order. That is the
schedule of the run. Played on the clients of a simulation it gives the models that the peers have,
to the bit, and whatever was strange in the field can be looked at again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from quiverfl.clock.devices import NEVER
from quiverfl.clock.player import Player
from quiverfl.clock.schedule import Job, Jobs, Schedule
from quiverfl.engine.exchange.fixed_point import (
    UNIT,
    Leaves,
    debias_message,
    integer_weights,
    receiver_weights,
    split_mass,
)
from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.accounts.ledger import Statement, Transfer
from quiverfl.peer.accounts.store import Store
from quiverfl.peer.folder import PeerFolder
from quiverfl.peer.setup import load_peer_config
from quiverfl.runs.experiment import Experiment
from quiverfl.topologies.topology import Topology
from quiverfl.types import Metrics

Key = tuple[int, int]
"""A client and its round."""


@dataclass(frozen=True)
class Replay:
    """Result of a replay."""

    names: tuple[str, ...]
    rounds: tuple[int, ...]
    """Number of rounds of each peer."""
    same: tuple[bool, ...]
    """Whether the message that a peer has stored is that of the replay, bit for bit."""
    metrics: Metrics


class _Recorded(Schedule):
    """The jobs of recorded peers, each after all that it takes."""

    def __init__(self, jobs: Jobs, running: Jobs) -> None:
        self._recorded, self._running = jobs, running

    @property
    def running(self) -> Jobs:
        return self._running

    def jobs_until(self, t: int) -> Jobs:
        jobs, self._recorded = self._recorded, Jobs.of([])
        return jobs


def replay(folders: Sequence[Path]) -> Replay:
    """Play the records of all peers of a run on the clients of a simulation."""
    read = [PeerFolder.read(path) for path in folders]
    first = read[0]
    names = tuple(first.roster.names)
    statements = {folder.own.name: read_statement(folder.store) for folder in read}
    _check(read, names, statements)
    experiment = Experiment.of(load_peer_config(first).with_values([("run.arithmetic", "peers")]))
    jobs, running = _order_jobs([statements[name] for name in names], names, experiment.topology)
    with experiment.simulation.compute_settings():
        shard = experiment.simulation.shard()
        player = Player(shard, _Recorded(jobs, running))
        player.train_until(NEVER)
        player.merge_running(0)
        message, metrics = shard.outbox(), shard.evaluate(0, "mixed")
    mass = experiment.method.mass
    same = []
    places = {folder.own.name: folder.store for folder in read}
    for number, name in enumerate(names):
        stored = _read_message(places[name])
        if mass is None:
            stored = debias_message(stored, statements[name].units / UNIT)
        leaves = {k: leaf[number].cpu().numpy() for k, leaf in message.items() if k != mass}
        same.append(all(np.array_equal(stored[k], leaf) for k, leaf in leaves.items()))
    return Replay(names, tuple(running.round.tolist()), tuple(same), metrics)


def _read_message(folder: Path) -> Leaves:
    """The message stored by a peer: its own part, and all that it has taken."""
    store = Store.open(folder)
    try:
        return store.memory().message
    finally:
        store.close()


def _check(
    folders: Sequence[PeerFolder], names: Sequence[str], statements: Mapping[str, Statement]
) -> None:
    missing = [name for name in names if name not in statements]
    if missing:
        raise QuiverError(
            f"the folder of {missing[0]!r} is missing: a replay needs those of all "
            f"{len(names)} members."
        )
    first = folders[0]
    if first.peers.mode != "async":
        raise QuiverError(
            'the peers ran in sync mode: `quiver run` with run.arithmetic = "peers" replays them.'
        )
    for folder in folders:
        if folder.agreed_experiment != first.agreed_experiment:
            raise QuiverError(f"{folder.path} and {first.path} are not peers of one run.")
        if folder.own.data is not None:
            raise QuiverError(
                f"{folder.path} has data of its own, which no other place has: only peers that "
                "share a data set by its name can be replayed."
            )


def _order_jobs(
    statements: Sequence[Statement], names: Sequence[str], topology: Topology
) -> tuple[Jobs, Jobs]:
    """All jobs, numbered in an order in which each follows what it takes; and the last of each."""
    made: dict[Key, Job] = {}
    takes: dict[Key, list[Key]] = {}
    parts: dict[tuple[Key, int], float] = {}
    for client, statement in enumerate(statements):
        _read_jobs(client, statement, names, topology, made, takes, parts)
    waiting = {key: _needs(key, takes) for key in made}
    after: dict[Key, list[Key]] = {key: [] for key in made}
    for key, needed in waiting.items():
        for other in needed:
            if other not in made:
                raise QuiverError(
                    f"{names[key[0]]} took a share of round {other[1]} of {names[other[0]]}, whose "
                    "store has no such round: the stores are not of one run."
                )
            after[other].append(key)
    ready = deque(sorted(key for key, needed in waiting.items() if not needed))
    order: list[Key] = []
    left = {key: len(needed) for key, needed in waiting.items()}
    while ready:
        key = ready.popleft()
        order.append(key)
        for other in after[key]:
            left[other] -= 1
            if not left[other]:
                ready.append(other)
    numbers = {key: number for number, key in enumerate(order)}
    for key in order:
        job = made[key]
        job.number = numbers[key]
        job.takes = [(numbers[other], parts[other, key[0]]) for other in takes[key]]
    last = {client: max(k for k in made if k[0] == client) for client in range(len(names))}
    ended = [made[key] for key in order if key != last[key[0]]]
    return Jobs.of(ended), Jobs.of([made[key] for _, key in sorted(last.items())])


def _needs(key: Key, takes: Mapping[Key, list[Key]]) -> set[Key]:
    client, round = key
    return {*takes[key], *([(client, round - 1)] if round else [])}


def _read_jobs(
    client: int,
    statement: Statement,
    names: Sequence[str],
    topology: Topology,
    made: dict[Key, Job],
    takes: dict[Key, list[Key]],
    parts: dict[tuple[Key, int], float],
) -> None:
    """The rounds of one peer: what it pushed, and what it took before each."""
    number = {name: place for place, name in enumerate(names)}
    arriving = [one.transfer for one in statement.received if not one.refusal]
    returned = [one.transfer for one in statement.sent if one.status == "refunded"]
    pushed: dict[int, list[Transfer]] = {}
    for one in statement.sent:
        pushed.setdefault(one.transfer.round, []).append(one.transfer)
    taken: list[Key] = []
    round = 0
    for entry in statement.entries:
        if entry.kind == "push":
            job = Job(0, client, round, 0, 0, entry.units + entry.units_out, [])
            shares = {number[t.receiver]: t.units for t in pushed.get(round, [])}
            job.own, job.gives = 1.0, len(shares)
            if shares:
                weights = receiver_weights(topology(round), client)
                chosen = {r: w for r, w in weights.items() if r in shares or r == client}
                split = integer_weights(chosen)
                home = split.pop(client, 0)
                again, whole = split_mass(job.units, split, home)
                if again != shares or entry.round != round:
                    raise _unknown(statement.name, round)
                job.own = home / whole
                parts |= {((client, round), r): split[r] / whole for r in shares}
                for t in returned:  # what comes back is the same part
                    if t.round == round:
                        parts[(client, round), client] = split[number[t.receiver]] / whole
            made[client, round], takes[client, round] = job, taken
            taken, round = [], round + 1
        elif entry.kind == "absorb":
            for transfer in _match(entry.units_in, arriving, returned, statement.name, round):
                taken.append((number[transfer.sender], transfer.round))
        elif entry.kind != "start":
            raise _unknown(statement.name, round)
    made[client, round] = Job(0, client, round, 0, NEVER, statement.units, [])
    takes[client, round] = taken


def _match(
    units: int, arriving: list[Transfer], returned: list[Transfer], name: str, round: int
) -> list[Transfer]:
    """The shares of one merge, in order: the next that were taken, then those that came back."""
    most = [t for t in returned if t.round < round]
    for back in range(len(most) + 1):
        for some in combinations(most, back):
            rest, count = units - sum(t.units for t in some), 0
            while rest > 0 and count < len(arriving):
                rest -= arriving[count].units
                count += 1
            if rest == 0:
                order = [*arriving[:count], *some]
                del arriving[:count]
                for transfer in some:
                    returned.remove(transfer)
                return order
    raise _unknown(name, round)


def _unknown(name: str, round: int) -> QuiverError:
    return QuiverError(
        f"the store of {name} has something in round {round + 1} that cannot be replayed: a member "
        "that left or was evicted, a new store, or another graph than run.toml says."
    )
