"""A running peer: what its rounds (rounds.py) and its end (ending.py) are made of.

    train → split → commit → send        (push)
    wait or not → merge → commit → ack   (absorb)

Training runs off the event loop: calls are answered meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from quiverfl.errors import QuiverError
from quiverfl.peer import ending
from quiverfl.peer.books import Books
from quiverfl.peer.desk import FrontDesk
from quiverfl.peer.learner import Learner
from quiverfl.peer.neighbours import Condition, Neighbours
from quiverfl.peer.reception import Reception
from quiverfl.peer.roster import ROSTER, LiveRoster
from quiverfl.peer.rounds import rounds
from quiverfl.peer.server import PeerService, Server
from quiverfl.peer.settings import Outcome, Settings
from quiverfl.peer.store import Store, Trace
from quiverfl.peer.tally import Log, Tally, serve_metrics
from quiverfl.peer.terms import Limits, Terms
from quiverfl.topologies.graph import Topology

Result = TypeVar("Result")


class Node:
    """One peer as a process. `run` returns when it has finished, left, or was asked to stop."""

    def __init__(
        self,
        learner: Learner,
        topology: Topology,
        store: Store,
        keys: Path,
        terms: Terms,
        settings: Settings,
        limits: Limits | None = None,
        *,
        record: Callable[[dict[str, Any]], None] = lambda line: None,
        trace: Trace = lambda point: None,
    ) -> None:
        limits = limits or Limits()
        self.learner, self.topology, self.store, self._keys = learner, topology, store, keys
        self.settings, self.terms, self._keepalive = settings, terms, limits.keepalive_seconds
        self.record, self.log, self.tally = record, Log(terms.name), Tally()
        self._roster = LiveRoster(keys / ROSTER)
        self.names = self._roster.current.names
        self.number = self._roster.current.number(terms.name)
        self.books = Books(store, terms.manifest)
        self.reception = Reception(self.books, terms, limits, self.tally, self.log, trace)
        self.condition = Condition(store.meta("leaving") == "yes", lambda: self.finished)
        self.neighbours = Neighbours(
            self._roster,
            self.books,
            store,
            keys,
            terms,
            limits,
            self.condition,
            trust_store=settings.trust_store,
            tally=self.tally,
            log=self.log,
            trace=trace,
            changed=self.reception.changed.set,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="training")
        self._stopped = asyncio.Event()
        self._broken: QuiverError | None = None
        self.state = "starting"
        self.metrics: dict[str, float] = {}
        self._outbox_since = time.monotonic()

    # The life of the process

    async def run(self) -> Outcome:
        server = Server(self.settings.bind, self._keys, self._service(), self._keepalive)
        endpoint = None
        if self.settings.metrics:
            endpoint = serve_metrics(self.settings.metrics, self.tally, self.gauges)
        await server.start()
        tasks = [asyncio.create_task(c.run()) for c in self.neighbours.couriers.values()]
        for task in tasks:
            task.add_done_callback(self._courier_ended)
        self.log("started", round=self.books.accounts.round, port=server.port)
        try:
            await self.neighbours.tell(set(self.neighbours.couriers))
            await self._restore()
            await rounds(self)
            await ending.end(self)
        finally:
            self.state = "stopping"
            await asyncio.gather(*(c.close() for c in self.neighbours.couriers.values()))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.stop(0.5)
            await self.books.settle()
            self._thread.shutdown()
            if endpoint is not None:
                endpoint.shutdown()
        if self._broken is not None:
            raise self._broken
        return self._outcome()

    def _service(self) -> PeerService:
        desk = FrontDesk(
            self.terms,
            self._keys,
            self.books,
            self.reception,
            self.neighbours,
            self.tally,
            self.log,
            status=self.status,
            stop=self.stop,
            leave=self.leave,
            fail=self._fail,
        )
        return PeerService(desk, self._roster, self.tally, self.log)

    def _outcome(self) -> Outcome:
        accounts = self.books.accounts
        left = self.condition.leaving and not accounts.units and not accounts.outbox
        waiting = len(accounts.outbox)
        outcome = Outcome(
            self.finished, left, self.stopping, waiting, self.metrics, self._problems()
        )
        self.log("stopped", round=accounts.round, **vars(outcome))
        return outcome

    def stop(self) -> None:
        """Finish the transaction at hand, then end: what SIGTERM asks for."""
        self._stopped.set()
        self.reception.changed.set()

    def leave(self) -> None:
        """Push all mass out, then end; remembered over restarts."""
        self.store.note("leaving", "yes")
        self.condition.leaving = True
        self.reception.changed.set()

    def _fail(self, problem: QuiverError) -> None:
        self._broken = self._broken or problem
        self.log.alarm("failed", reason=str(problem))
        self.stop()

    def _courier_ended(self, task: asyncio.Task[None]) -> None:
        problem = None if task.cancelled() else task.exception()
        if isinstance(problem, QuiverError):
            self._fail(problem)
        elif problem is not None:
            self._fail(QuiverError(f"a courier failed: {problem!r}"))

    async def off_loop(self, function: Callable[..., Result], *values: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *values)

    async def _restore(self) -> None:
        memory = self.books.memory
        await self.off_loop(self.learner.restore, memory.rest)
        if self.books.accounts.units:
            await self.off_loop(self.learner.merge, memory.message, self.books.mass)

    @property
    def stopping(self) -> bool:
        return self._stopped.is_set()

    @property
    def finished(self) -> bool:
        """Nothing will come from this peer any more."""
        accounts = self.books.accounts
        return accounts.round >= self.settings.rounds and not accounts.outbox

    # What rounds and the end are made of

    async def until(self, condition: Callable[[], bool], seconds: float | None) -> None:
        """Wait for a condition, the deadline, or the order to stop or leave."""
        end = time.monotonic() + (self.settings.deadline if seconds is None else seconds)
        leaving = self.condition.leaving
        while not condition() and not self.stopping and self.condition.leaving == leaving:
            left = end - time.monotonic()
            if left <= 0:
                return
            self.reception.changed.clear()
            try:
                # A link becomes free without an event of its own: look again now and then.
                async with asyncio.timeout(min(left, 0.02)):
                    await self.reception.changed.wait()
            except TimeoutError:
                continue

    async def absorb(self, up_to: int | None, finish: bool) -> None:
        """Merge what has come, commit, and let the senders know."""
        receipts = self.reception.take(up_to)
        refunding = self.neighbours.refunding()
        refunds = [courier.refund for courier in refunding if courier.refund]
        if receipts or refunds:
            rest = await self.off_loop(self.learner.rest)
            await self.books.absorb(receipts, refunds, rest, finish)
        elif finish:
            await self.books.finish_round()
        transfers = [transfer for transfer, _ in receipts]
        self.neighbours.absent -= {transfer.sender for transfer in transfers}
        self.reception.committed(transfers)
        for courier in refunding:
            courier.refund = None
        if self.books.accounts.units:
            memory = self.books.memory
            await self.off_loop(self.learner.merge, memory.message, self.books.mass)

    # What can be seen of it

    def gauges(self) -> dict[str, float]:
        accounts = self.books.accounts
        if not accounts.outbox:
            self._outbox_since = time.monotonic()
        return {
            "round": accounts.round,
            "mass": self.books.mass,
            "outbox": len(accounts.outbox),
            "outbox_age_seconds": time.monotonic() - self._outbox_since,
            "staged": len(self.reception.staged),
            "commit_seconds": self.books.commit_seconds,
        }

    def _problems(self) -> dict[str, str]:
        return {p: c.problem for p, c in self.neighbours.couriers.items() if c.problem}

    def status(self) -> dict[str, Any]:
        return {
            "name": self.terms.name,
            "state": self.state,
            "rounds": self.settings.rounds,
            **self.gauges(),
            "metrics": self.metrics,
            "counts": dict(self.tally.counts),
            "refusals": dict(self.tally.refusals),
            "absent": sorted(self.neighbours.absent),
            "problems": self._problems(),
        }
