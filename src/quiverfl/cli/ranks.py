"""What `quiver run` and `quiver resume` do where there are several ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from quiverfl.callbacks.progress import progress
from quiverfl.config import Config, parse
from quiverfl.distributed.rank_environment import own_rank, world_size
from quiverfl.errors import QuiverError
from quiverfl.methods import method_title
from quiverfl.results.numbers import size


def start(ranks: int, arguments: Sequence[str], restarts: int) -> None:
    """Run a command as this many processes of this machine; ends as they do."""
    from quiverfl.distributed.launch import launch

    if world_size() > 1:
        raise QuiverError(
            f"--ranks {ranks}: this process is one of {world_size()} ranks already: leave it out."
        )
    if restarts < 0:
        raise QuiverError(f"--max-restarts {restarts}: it must be 0 or more.")
    raise typer.Exit(launch(ranks, arguments, restarts))


def check_count(ranks: int | None, clients: int | None = None) -> None:
    if ranks is None:
        return
    if ranks < 1:
        raise QuiverError(f"--ranks {ranks}: it must be at least 1.")
    if clients is not None and ranks > clients:
        raise QuiverError(
            f"--ranks {ranks}: there are {clients} clients, and a rank holds at least one. Start "
            f"at most {clients} ranks."
        )


def run_here(
    settings: Config | None, folder: Path, quiet: bool, stop: Callable[[], bool], continues: bool
) -> dict[str, Any]:
    """This rank's part of a run; the summary. A rank without settings takes those of rank 0."""
    from quiverfl.distributed.rank_run import run_on_ranks
    from quiverfl.distributed.ranks import Ranks

    device = "cpu" if settings is None else settings.run.device
    with Ranks.joined(device) as ranks:
        told = ranks.from_first(settings and settings.model_dump(mode="json"))
        config = parse(told) if settings is None else settings
        with contextlib.ExitStack() as shown:
            watcher = None
            if own_rank() == 0:
                title = method_title(config.method.name)
                watcher = shown.enter_context(progress(title, config.run.rounds, quiet))
            return run_on_ranks(ranks, config, folder, watcher, stop, continues)


def say_needs(settings: Config, ranks: int) -> None:
    """`--dry-run`: what the configuration would need on this many ranks."""
    from quiverfl.distributed.needs import available_memory, needs_of

    needs = needs_of(settings)
    check_count(ranks, needs.clients)
    where = f"each of {ranks} ranks" if ranks > 1 else "one process"
    print(
        f"{needs.clients} clients with {size(needs.state)} of state each, "
        f"{size(needs.examples.sum())} of examples, {settings.run.rounds} rounds"
    )
    print(
        f"{where}: about {size(needs.memory(ranks))} of memory, {size(needs.training)} for each of "
        f"{needs.chunk} clients in training at a time"
    )
    if ranks > 1:
        print(
            f"between ranks: each sends {size(needs.traffic(ranks))} in a round, and "
            f"{size(needs.measuring(ranks))} more in an evaluated one"
        )
    available = available_memory()
    if available is not None:
        fewest = needs.ranks_for(available)
        fit = f"at least {fewest} ranks are needed, each on a machine like this one"
        if fewest in (None, 1):
            fit = "one process fits" if fewest else "even one client to a rank does not fit"
        print(f"this machine has {size(available)} to give: {fit}")
