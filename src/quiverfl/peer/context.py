"""Shared by all parts of a running peer: the agreement, the limits, and the context."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.accounts.store import Store, Trace
from quiverfl.peer.accounts.transactions import Transactions
from quiverfl.peer.link.identity import LiveIdentity
from quiverfl.peer.link.messages import Manifest, canonical_hash
from quiverfl.peer.link.roster import ROSTER, LiveRoster
from quiverfl.peer.link.wire import OLDEST, PROTOCOL, Hello, other_protocol
from quiverfl.peer.metrics import Log, PeerMetrics

OTHER_STEP = (
    "async peers take the debiased step unless run.toml says otherwise, and earlier versions of "
    "quiverfl took the paper's. Install the newest on all peers; to continue a run that was begun "
    'with the paper\'s step, write step = "paper" under [method] in the run.toml of every peer.'
)
RECORDS_VERSION = 2
"""The version of what is written and signed in the records."""


@dataclass(frozen=True)
class Limits:
    """Caps on what a neighbour can take of this peer's memory, and patience with the network."""

    outlier: Literal["off", "warn", "refuse"] = "off"
    outlier_factor: float = 10.0
    mass_cap: int = 1000 * UNIT
    bodies: int = 4  # received at the same time
    pulls: int = 2  # models sent to newcomers at the same time
    staged: int = 256  # waiting for the next commit
    streams: int = 8  # of one sender, whatever they say
    idle_seconds: float = 60.0  # without a byte, then the stream is dropped
    patience: float = 5.0  # with a slow body while another waits for its place
    slowest: int = 1 << 14  # bytes a second that a body must keep up in the long run
    hello_seconds: float = 15.0  # to connect and greet, on a bad network too
    retry_first: float = 0.2
    retry_cap: float = 30.0
    keepalive_seconds: float = 20.0
    relay_rate: int = 8 << 20  # bytes a second that one member may send through this relay


@dataclass(frozen=True)
class Agreement:
    """Settings that all peers of a run have in common. Peers that differ do not talk."""

    run: str
    name: str
    configuration: str
    manifest: Manifest
    newest: int = PROTOCOL  # that this peer speaks
    earlier: str = ""
    """The configuration as editions wrote it in which async peers took the paper's step."""

    @property
    def hash(self) -> str:
        """The subject of records and signatures. It does not change with the protocol."""
        return canonical_hash([RECORDS_VERSION, self.run, self.configuration, self.manifest.hash])

    @property
    def earlier_hash(self) -> str:
        """The hash of a run that such an edition began, or nothing."""
        if not self.earlier:
            return ""
        return canonical_hash([RECORDS_VERSION, self.run, self.earlier, self.manifest.hash])

    def difference(self, hello: Hello) -> str:
        """Say why this peer and the one that says hello cannot talk; empty if they can."""
        if not OLDEST <= hello.protocol <= self.newest:
            return other_protocol(hello.protocol, self.newest)
        if self.earlier and hello.configuration == self.earlier:
            return (
                f"{hello.sender!r} takes the paper's step η/μ, {self.name!r} the debiased one: "
                f"{OTHER_STEP}"
            )
        pairs = [
            ("run", self.run, hello.run),
            ("configuration", self.configuration, hello.configuration),
            ("manifest", self.manifest.hash, hello.manifest),
        ]
        for what, mine, theirs in pairs:
            if mine != theirs:
                return (
                    f"{what} of {hello.sender!r} is {str(theirs)[:16]}, of {self.name!r} it is "
                    f"{str(mine)[:16]}: all peers of a run need the same "
                    "run.toml, inputs of the same shape and, where the head is sent, the same "
                    "class names."
                )
        return ""


def describe_rollback(name: str, witness: str) -> str:
    """Say what to do with a store that is older than what it has itself signed to a neighbour."""
    return (
        f"the store of {name!r} is older than what it has signed to {witness!r}: it was restored "
        "from a backup, and mass it holds has moved on since. Evict it on the others and let it "
        "join with a new store; or start with --trust-store if you know better."
    )


@dataclass(frozen=True)
class PeerContext:
    """Objects shared by all parts of a running peer."""

    number: int
    agreement: Agreement
    limits: Limits
    roster: LiveRoster
    identity: LiveIdentity
    store: Store
    transactions: Transactions
    metrics: PeerMetrics
    log: Log
    trace: Trace

    @classmethod
    def open(
        cls,
        folder: Path,
        store: Store,
        agreement: Agreement,
        limits: Limits,
        trace: Trace = lambda point: None,
    ) -> PeerContext:
        """Read roster and keys from a peer's folder, and the accounts from its store."""
        roster = LiveRoster(folder / ROSTER)
        number = roster.current.number(agreement.name)
        return cls(
            number=number,
            agreement=agreement,
            limits=limits,
            roster=roster,
            identity=LiveIdentity(folder),
            store=store,
            transactions=Transactions(store, agreement.manifest, number),
            metrics=PeerMetrics(),
            log=Log(agreement.name),
            trace=trace,
        )

    @property
    def name(self) -> str:
        return self.agreement.name

    @cached_property
    def incarnation(self) -> str:
        """The token of this peer's store; a new store has another one."""
        return self.store.meta("incarnation")

    @property
    def news(self) -> asyncio.Event:
        """Set after every commit, and whenever a neighbour said something new."""
        return self.transactions.changed
