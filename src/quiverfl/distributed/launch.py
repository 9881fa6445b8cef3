"""`quiver run --ranks N`: the ranks as processes of this machine, started again if one is killed.

On several machines, and wherever torchrun is at home, torchrun does this.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from quiverfl.distributed.rank_environment import STORE, TIED
from quiverfl.errors import QuiverError

SECONDS_BETWEEN_LOOKS = 0.05
SECONDS_TO_LEAVE = 30.0
"""After one rank has ended by itself, the others are about to."""


class RankKilled(QuiverError):
    """A rank was ended from outside, and no attempt is left."""


def launch(ranks: int, arguments: Sequence[str], restarts: int) -> int:
    """Run `quiver ARGUMENTS` on this many ranks; the exit code that they agree on.

    Where a rank is killed all are started again, at most `restarts` times: the command resumes
    from the last checkpoint.
    """
    for attempt in range(restarts + 1):
        with tempfile.TemporaryDirectory(prefix="quiver-ranks-") as place:
            crew = [
                _start(rank, ranks, attempt, Path(place) / "store", arguments)
                for rank in range(ranks)
            ]
            with _forwarding(crew):
                code = _outcome(crew)
        if code >= 0:
            return code
        left = restarts - attempt
        if not left:
            break
        _say(f"a rank was ended by signal {-code}; starting again from the last checkpoint.")
    raise RankKilled(
        f"a rank was ended by signal {-code}; perhaps memory ran out (`quiver run --dry-run` says "
        "what a rank needs). `quiver resume FOLDER --ranks N` continues from the last checkpoint; "
        "--max-restarts does so by itself."
    )


def _start(
    rank: int, ranks: int, attempt: int, store: Path, arguments: Sequence[str]
) -> subprocess.Popen[bytes]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    defaults = {"OMP_NUM_THREADS": str(max(1, (cores or 1) // ranks))}
    if sys.platform == "linux":
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # a host's own name may lead elsewhere, or nowhere
    told = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        STORE: store,
        TIED: 1,
    }
    environment = {**defaults, **os.environ, **{name: str(value) for name, value in told.items()}}
    # Its standard input ends when this process does, however: no rank is left behind.
    return subprocess.Popen(
        [sys.executable, "-m", "quiverfl", *arguments], env=environment, stdin=subprocess.PIPE
    )


def _outcome(crew: list[subprocess.Popen[bytes]]) -> int:
    """The code of the first rank that did not end well; of a signal, its negative number."""
    deadline = float("inf")
    while any(process.poll() is None for process in crew):
        ended = [process.returncode for process in crew if process.returncode]
        if ended and (ended[0] < 0 or time.monotonic() > deadline):
            _end(crew)
            return _worst(ended)
        if ended:
            deadline = min(deadline, time.monotonic() + SECONDS_TO_LEAVE)
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return _worst([process.returncode for process in crew])


def _worst(codes: Sequence[int]) -> int:
    """A killed rank explains why the others failed."""
    return min(codes) if min(codes, default=0) < 0 else max(codes, default=0)


def _end(crew: list[subprocess.Popen[bytes]]) -> None:
    """A run folder survives a kill at any moment."""
    for process in crew:
        process.kill()
    for process in crew:
        process.wait()


@contextmanager
def _forwarding(crew: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Ctrl-C and SIGTERM are for the ranks; whatever else ends this process ends them."""

    def forward(number: int, frame: object) -> None:
        for process in crew:
            if process.poll() is None:
                process.send_signal(number)

    def ignore(number: int, frame: object) -> None:
        pass

    # A terminal sends Ctrl-C to the ranks itself.
    on_interrupt = ignore if sys.stdin is not None and sys.stdin.isatty() else forward
    terminate, interrupt = signal.SIGTERM, signal.SIGINT
    before = signal.signal(terminate, forward), signal.signal(interrupt, on_interrupt)
    try:
        yield
    finally:
        signal.signal(terminate, before[0])
        signal.signal(interrupt, before[1])
        _end(crew)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
