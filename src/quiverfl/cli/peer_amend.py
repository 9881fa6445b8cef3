"""`quiver peer amend`: this member's word on a change of the run."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from quiverfl.errors import QuiverError
from quiverfl.peer.amendments import sentence
from quiverfl.peer.control import NotRunning, ask
from quiverfl.peer.course import amend_at_rest
from quiverfl.peer.peer_folder import PeerFolder
from quiverfl.peer.setup import configuration
from quiverfl.peer.wire import Order, Terms


def agree(folder: PeerFolder, since: int, rounds: int | None, lr: float | None) -> Iterator[str]:
    try:
        terms = Terms(since=since, rounds=rounds, lr=lr)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        raise QuiverError(f"--{first['loc'][0]} {first['input']!r}: {first['msg']}.") from problem
    try:
        status = ask(folder, Order(action="amend", terms=terms))
        yield from status["amendments"]
    except NotRunning:
        founded = configuration(folder).run.rounds
        amend_at_rest(folder.store, folder.roster, folder.identity(), terms, founded)
        yield f"{sentence(terms)} (signed for {folder.own.name}, which is not running)"
    yield "It holds once every member has signed the same: each runs this command on its own peer."
