"""Ranks as processes: which one this is, and how `quiver run --ranks N` starts them. Without torch.

Environment variables have the names that torchrun gives them. On several machines torchrun starts
the ranks.
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
from typing import NoReturn

from quiverfl.errors import QuiverError

STORE = "QUIVER_RANK_STORE"
"""The file where processes of `quiver run --ranks` meet; torchrun has its own rendezvous."""
TIED = "QUIVER_RANK_TIED"
"""Set if the starting process holds this rank's standard input: both end together."""
TIMEOUT = "QUIVER_RANK_TIMEOUT"
DEFAULT_TIMEOUT = 1800.0
"""Seconds that a rank waits for another one, unless $QUIVER_RANK_TIMEOUT says otherwise."""
POLL_SECONDS = 0.05
LEAVE_SECONDS = 30.0
"""Time for the other ranks to end by themselves after one has ended with an error."""


def world_size() -> int:
    """Number of ranks; 1 unless torchrun or `--ranks` started this process."""
    return _read_number("WORLD_SIZE", 1)


def own_rank() -> int:
    """The number of this rank; 0 outside of ranks."""
    return _read_number("RANK", 0) if world_size() > 1 else 0


def is_first_on_machine() -> bool:
    """Whether this process reports errors and progress for all ranks of its machine."""
    return world_size() == 1 or _read_number("LOCAL_RANK", 0) == 0


def restart_count() -> int:
    """How often the ranks were started again after one of them died."""
    return _read_number("TORCHELASTIC_RESTART_COUNT", 0)


def end_rank(code: int) -> NoReturn:
    """End this process at once; everything must be written already.

    Threads of torch.distributed that outlive Python's own end may abort a rank that has done all
    its work ("terminate called without an active exception"), and it would count as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def read_timeout() -> float:
    """Seconds that a rank waits for another one."""
    text = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(text) if text else DEFAULT_TIMEOUT
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise QuiverError(f"{TIMEOUT} = {text!r}: it must be a number of seconds above 0.")
    return seconds


def _read_number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default


class RankKilled(QuiverError):
    """A rank was killed, and no attempt is left."""


def launch_ranks(ranks: int, arguments: Sequence[str], restarts: int) -> int:
    """Run `quiver ARGUMENTS` on this many ranks. Returns the exit code that they agree on.

    If a rank is killed, all are started again, at most `restarts` times: the command resumes from
    the last checkpoint.
    """
    for attempt in range(restarts + 1):
        with tempfile.TemporaryDirectory(prefix="quiver-ranks-") as folder:
            processes = [
                _start_rank(rank, ranks, attempt, Path(folder) / "store", arguments)
                for rank in range(ranks)
            ]
            with _forward_signals(processes):
                code = _wait_for_ranks(processes)
        if code >= 0:
            return code
        left = restarts - attempt
        if not left:
            break
        _print_error(
            f"a rank was ended by signal {-code}; starting again from the last checkpoint."
        )
    raise RankKilled(
        f"a rank was ended by signal {-code}; perhaps memory ran out (`quiver run --dry-run` says "
        "what a rank needs). `quiver resume FOLDER --ranks N` continues from the last checkpoint; "
        "--max-restarts does so by itself."
    )


def _start_rank(
    rank: int, ranks: int, attempt: int, store: Path, arguments: Sequence[str]
) -> subprocess.Popen[bytes]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    defaults = {"OMP_NUM_THREADS": str(max(1, (cores or 1) // ranks))}
    if sys.platform == "linux":
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # a host's own name may resolve to another address
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        STORE: store,
        TIED: 1,
    }
    environment = {
        **defaults,
        **os.environ,
        **{name: str(value) for name, value in variables.items()},
    }
    # Its standard input closes when this process ends, however that happens: no rank stays behind.
    return subprocess.Popen(
        [sys.executable, "-m", "quiverfl", *arguments], env=environment, stdin=subprocess.PIPE
    )


def _wait_for_ranks(processes: list[subprocess.Popen[bytes]]) -> int:
    """The code of the first rank that failed; for a signal, its negative number."""
    deadline = float("inf")
    while any(process.poll() is None for process in processes):
        ended = [process.returncode for process in processes if process.returncode]
        if ended and (ended[0] < 0 or time.monotonic() > deadline):
            _kill_ranks(processes)
            return _worst_code(ended)
        if ended:
            deadline = min(deadline, time.monotonic() + LEAVE_SECONDS)
        time.sleep(POLL_SECONDS)
    return _worst_code([process.returncode for process in processes])


def _worst_code(codes: Sequence[int]) -> int:
    """The code of a killed rank, which explains why others failed, or the largest."""
    return min(codes) if min(codes, default=0) < 0 else max(codes, default=0)


def _kill_ranks(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill all ranks. A run folder survives a kill at any moment."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


@contextmanager
def _forward_signals(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Pass Ctrl-C and SIGTERM on to the ranks; kill them when this process ends."""

    def forward(number: int, frame: object) -> None:
        for process in processes:
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
        _kill_ranks(processes)


def _print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
