"""A running peer: its rounds and its end.

    train → split → commit → send        (push)
    wait or not → merge → commit → ack   (absorb)

In sync mode a round waits for the shares its graph promises, or for a deadline; in async mode it
takes what has come. Training runs off the event loop: calls are answered meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from quiverfl.errors import QuiverError
from quiverfl.peer import ending, ledger
from quiverfl.peer.books import Books
from quiverfl.peer.desk import FrontDesk
from quiverfl.peer.learner import Learner, column, expected_senders
from quiverfl.peer.neighbours import Condition, Neighbours
from quiverfl.peer.reception import Reception
from quiverfl.peer.roster import ROSTER, LiveRoster
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
        self.learner, self._topology, self.store, self._keys = learner, topology, store, keys
        self.settings, self._terms, self._keepalive = settings, terms, limits.keepalive_seconds
        self._record, self._log, self.tally = record, Log(terms.name), Tally()
        self._roster = LiveRoster(keys / ROSTER)
        self._names = self._roster.current.names
        self._me = self._roster.current.number(terms.name)
        self.books = Books(store, terms.manifest)
        self.reception = Reception(self.books, terms, limits, self.tally, self._log, trace)
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
            log=self._log,
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
        self._log("started", round=self.books.accounts.round, port=server.port)
        try:
            await self.neighbours.tell(set(self.neighbours.couriers))
            await self._restore()
            await self._rounds()
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
            self._terms,
            self._keys,
            self.books,
            self.reception,
            self.neighbours,
            self.tally,
            self._log,
            status=self.status,
            stop=self.stop,
            leave=self.leave,
            fail=self._fail,
        )
        return PeerService(desk, self._roster, self.tally, self._log)

    def _outcome(self) -> Outcome:
        accounts = self.books.accounts
        left = self.condition.leaving and not accounts.units and not accounts.outbox
        waiting = len(accounts.outbox)
        outcome = Outcome(
            self.finished, left, self.stopping, waiting, self.metrics, self._problems()
        )
        self._log("stopped", round=accounts.round, **vars(outcome))
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
        self._log.alarm("failed", reason=str(problem))
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

    # Rounds

    async def _rounds(self) -> None:
        while self.books.accounts.round < self.settings.rounds:
            if self.stopping or self.condition.leaving:
                return
            await self._round(self.books.accounts.round)

    async def _round(self, t: int) -> None:
        graph = self._topology(t)
        line: dict[str, Any] = {"round": t}
        if not self.books.accounts.pushed:
            self.state = "training"
            await self.off_loop(self.learner.train, t, bool(graph.active[self._me]))
            line["local"] = await self._evaluated(t, "local")
            self.state = "pushing"
            if self.stopping or not await self._push(t, column(graph, self._names, self._me)):
                return
        self.state = "waiting"
        if self._sync:
            await self._gather(t, expected_senders(graph, self._names, self._me))
        else:
            await self._breathe(t)
        if self.stopping:
            return
        await self.absorb(t if self._sync else None, finish=True)
        line["mixed"] = await self._evaluated(t, "mixed")
        self.metrics = line["mixed"] or self.metrics
        line |= {"mass": self.books.mass, "sent_bytes": self.tally.counts["sent_bytes"]}
        self.tally.add("rounds")
        self._record(line)
        self._log("round", **line)

    @property
    def _sync(self) -> bool:
        return self.settings.mode == "sync"

    async def _evaluated(self, t: int, stage: str) -> dict[str, float]:
        last = t + 1 >= self.settings.rounds
        if (t + 1) % self.settings.evaluate_every and not last:
            return {}
        return await self.off_loop(self.learner.evaluate, t, stage)

    async def _push(self, t: int, weights: dict[str, float]) -> bool:
        """Split and commit; False if there was no time for it before the end."""
        neighbours, others = self.neighbours, set(weights) - {self._terms.name}
        if self._sync:
            ready = others - neighbours.outside()
            await self.until(
                lambda: all(neighbours.free(p) for p in ready - neighbours.absent), None
            )
            neighbours.absent |= {peer for peer in ready if not neighbours.free(peer)}
            if self.stopping:
                return False
        cautious = not self._sync or bool(neighbours.absent)
        may = not cautious or ledger.may_push(self.books.accounts)
        chosen = {
            p: w for p, w in weights.items() if p not in others or (may and neighbours.free(p))
        }
        parts = ledger.as_parts(chosen)
        home = parts.pop(self._terms.name, 0)
        message = await self.off_loop(self.learner.message)
        rest = await self.off_loop(self.learner.rest)
        for transfer in await self.books.push(t, message, rest, parts, home):
            neighbours.couriers[transfer.receiver].wake()
        return True

    async def _gather(self, t: int, expected: set[str]) -> None:
        """Until every promised share is here, or the deadline: late ones merge in a later round."""
        neighbours = self.neighbours

        def missing() -> set[str]:
            here = {p for p, s in self.reception.staged.items() if s.transfer.round >= t}
            return expected - here - neighbours.outside() - neighbours.absent - neighbours.done

        await self.until(lambda: not missing(), None)
        late = missing()
        if late and not self.stopping:
            self._log("deadline", round=t, missing=sorted(late))
            neighbours.absent |= late

    async def _breathe(self, t: int) -> None:
        """Async: go on at once, unless asked to pause or too far ahead of the slowest heard."""
        if self.settings.pause:
            await self.until(lambda: False, self.settings.pause)
        bound, heard = self.settings.staleness, self.reception.heard
        if bound is not None:
            away = self.neighbours.done | self.neighbours.outside()
            await self.until(
                lambda: all(heard[peer] >= t - bound for peer in set(heard) - away), None
            )

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
            "name": self._terms.name,
            "state": self.state,
            "rounds": self.settings.rounds,
            **self.gauges(),
            "metrics": self.metrics,
            "counts": dict(self.tally.counts),
            "refusals": dict(self.tally.refusals),
            "absent": sorted(self.neighbours.absent),
            "problems": self._problems(),
        }
