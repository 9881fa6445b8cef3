"""How many connections a peer accepts, so that it can always open its own files."""

from __future__ import annotations

import contextlib
import resource

from quiverfl.errors import QuiverError

RESERVE = 96
"""For what the process has open anyway: libraries, the store, a commit, logs."""
OWN = 3
"""For each member: the connection to it, and one that replaces another."""


def acceptable_connections(members: int) -> int:
    """Each member connects once, twice while it reconnects; whoever has no certificate gets the
    rest, but never what this process needs itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        soft = _raised(hard)
    room = soft - RESERVE - OWN * members
    wanted = 64 + 4 * members
    if room < 2 * members + 8:
        raise QuiverError(
            f"this process may open {soft} files, which is too few for a run of {members} peers: "
            f"allow {RESERVE + OWN * members + wanted} (ulimit -n, or LimitNOFILE= of its unit)."
        )
    return min(room, wanted)


def _raised(hard: int) -> int:
    wanted = 65536 if hard == resource.RLIM_INFINITY else hard
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
