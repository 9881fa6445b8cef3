"""What all peers of a run must have in common, and the limits each keeps to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quiverfl.peer.ledger import UNIT, Accounts
from quiverfl.peer.manifest import Manifest, canonical_hash
from quiverfl.peer.wire import OLDEST, PROTOCOL, Hello, other_protocol

BOOKS = 2
"""The version of what is written and signed in the books."""


@dataclass(frozen=True)
class Limits:
    """Caps that keep a neighbour from filling this peer's memory, and patience with the network."""

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


@dataclass(frozen=True)
class Agreement:
    """The agreement: run, configuration and manifest. Peers that differ do not talk."""

    run: str
    name: str
    configuration: str
    manifest: Manifest
    newest: int = PROTOCOL  # that this peer speaks

    @property
    def hash(self) -> str:
        """What books and signatures are about: it outlives newer versions of the protocol."""
        return canonical_hash([BOOKS, self.run, self.configuration, self.manifest.hash])

    def difference(self, hello: Hello) -> str:
        """Why we cannot talk, or nothing."""
        if not OLDEST <= hello.protocol <= self.newest:
            return other_protocol(hello.protocol, self.newest)
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
                    "run.toml, and inputs of the same shape."
                )
        return ""


def older_than_remembered(name: str, pushes: int, accounts: Accounts, hello: Hello) -> str:
    """Whether a neighbour remembers, or has heard of, more than this peer's own store knows.

    `pushes` is how often this store has pushed by its own signature that the neighbour shows.
    Compares the neighbour's past with our present, so that messages on their way do no harm.
    """
    link = accounts.link(hello.sender)
    if pushes > accounts.pushes or hello.received > link.sent or hello.acknowledged > link.received:
        return (
            f"the store of {name!r} is older than what {hello.sender!r} remembers of it: it was "
            "restored from a backup, and mass it holds has moved on since. Evict it on the others "
            "and let it join with a new store; or start with --trust-store if you know better."
        )
    return ""
