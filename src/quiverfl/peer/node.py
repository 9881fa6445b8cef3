"""A running peer: the life of its process, its rounds and its end.

    train → split → commit → send        (push)
    wait or not → merge → commit → ack   (absorb)

Training runs off the event loop: calls are answered meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors.numpy

from quiverfl.engine.accounting import Clock
from quiverfl.engine.history import evaluates
from quiverfl.engine.shares import UNIT, in_units, row
from quiverfl.engine.splitting import check_split
from quiverfl.errors import QuiverError
from quiverfl.peer import ledger
from quiverfl.peer.agreement import Agreement, Limits
from quiverfl.peer.collector import Collector
from quiverfl.peer.course import Course
from quiverfl.peer.descriptors import acceptable_connections
from quiverfl.peer.files import write_durably
from quiverfl.peer.identity import LiveIdentity
from quiverfl.peer.learner import Learner, expected_senders, mutual_neighbours, receivers
from quiverfl.peer.metrics import Log, PeerMetrics, Sample, serve_metrics
from quiverfl.peer.neighbours import Condition, Neighbours
from quiverfl.peer.offering import Offering
from quiverfl.peer.peer_settings import Outcome, Settings
from quiverfl.peer.receiver import Receiver
from quiverfl.peer.requests import RequestHandler
from quiverfl.peer.roster import ROSTER, LiveRoster
from quiverfl.peer.sender import Sender
from quiverfl.peer.service import PeerService, Server
from quiverfl.peer.store import Store, Trace
from quiverfl.peer.transactions import Transactions
from quiverfl.peer.wire import Terms
from quiverfl.topologies.topology import Topology

Result = TypeVar("Result")

PERSONAL = "personal.safetensors"
HEIRS = 4
"""Over how many neighbours a leaving peer spreads what it has."""


class Node:
    """One peer as a process. `run` returns when it has finished, left, or was asked to stop."""

    def __init__(
        self,
        learner: Learner,
        topology: Topology,
        store: Store,
        keys: Path,
        agreement: Agreement,
        settings: Settings,
        limits: Limits | None = None,
        *,
        record: Callable[[dict[str, Any]], None] = lambda line: None,
        trace: Trace = lambda point: None,
    ) -> None:
        limits = limits or Limits()
        self.learner, self.topology, self.store, self._keys = learner, topology, store, keys
        self.settings, self.agreement, self._keepalive = (
            settings,
            agreement,
            limits.keepalive_seconds,
        )
        self.record, self.log, self.metrics = record, Log(agreement.name), PeerMetrics()
        self._roster, self._identity = LiveRoster(keys / ROSTER), LiveIdentity(keys)
        self.names = self._roster.current.names
        self.number = self._roster.current.number(agreement.name)
        self.transactions = Transactions(store, agreement.manifest)
        self.receiver = Receiver(
            self.transactions,
            agreement,
            limits,
            self.metrics,
            self.log,
            trace,
            roster=self._roster,
            identity=self._identity,
            store=store,
            copies=settings.copies,
        )
        self.offering = Offering(self.transactions, agreement, limits, store.folder)
        self.condition = Condition(store.meta("leaving") == "yes", lambda: self.finished)
        self.neighbours = Neighbours(
            self._roster,
            self.transactions,
            store,
            self._identity,
            agreement,
            limits,
            self.condition,
            trust_store=settings.trust_store,
            metrics=self.metrics,
            log=self.log,
            trace=trace,
            hear=self.receiver.hear,
            forget=self.receiver.forget,
            fail=self._fail,
        )
        self.course = Course(agreement.name, settings.rounds, self.neighbours, store, self.log)
        self._collectors = [
            Collector(sender, self.receiver, limits, self.metrics, self.log)
            for peer, sender in self.neighbours.senders.items()
            if self._roster.current.member(agreement.name).dials_out
            and not self._roster.current.member(peer).dials_out
        ]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="training")
        self._stopped = asyncio.Event()
        self._broken: QuiverError | None = None
        self.state = "starting"
        self.scores: dict[str, float] = {}
        self._amended: tuple[int, float | None] = (settings.rounds, None)
        self._counted: dict[str, int] = {}
        self._mutual = mutual_neighbours(topology, self.names, self.number)

    # The life of the process

    async def run(self) -> Outcome:
        server = Server(
            self.settings.bind,
            self._keys,
            self._service(),
            self._keepalive,
            acceptable_connections(len(self.names)),
        )
        endpoint = None
        if self.settings.metrics:
            endpoint = serve_metrics(self.settings.metrics, self.metrics, self.samples)
        await server.start()
        couriers: list[Sender | Collector] = [*self.neighbours.senders.values(), *self._collectors]
        tasks = [asyncio.create_task(courier.run()) for courier in couriers]
        for task in tasks:
            task.add_done_callback(self._sender_ended)
        self.log("started", round=self.transactions.accounts.round, port=server.port)
        try:
            await self.neighbours.sign_evictions()
            await self.neighbours.tell(set(self.neighbours.senders))
            await self.neighbours.settled()
            await self._restore()
            while True:
                await self._rounds()
                await self._end()
                if self.stopping or self.condition.leaving or self._over():
                    break
        finally:
            self.state = "stopping"
            await self.neighbours.settled()
            await asyncio.gather(*(c.close() for c in self.neighbours.senders.values()))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.stop(0.5)
            await self.transactions.settle()
            self._thread.shutdown()
            if endpoint is not None:
                endpoint.shutdown()
        if self._broken is not None:
            raise self._broken
        return self._outcome()

    def _service(self) -> PeerService:
        handler = RequestHandler(
            self.agreement,
            self._identity,
            self.transactions,
            self.receiver,
            self.neighbours,
            self.offering,
            self.metrics,
            self.log,
            status=self.status,
            stop=self.stop,
            leave=self.leave,
            amend=self._amend,
            fail=self._fail,
        )
        return PeerService(handler, self._roster, self.metrics, self.log)

    async def _amend(self, terms: Terms) -> None:
        accounts = self.transactions.accounts
        begun = accounts.pushed or self.state == "training"
        await self.course.propose(terms, accounts.round, begun)

    def _outcome(self) -> Outcome:
        accounts = self.transactions.accounts
        gone = self.settings.copies or not accounts.units
        left = self.condition.leaving and gone and not accounts.outbox
        waiting = len(accounts.outbox)
        outcome = Outcome(
            self.finished, left, self.stopping, waiting, self.scores, self._problems()
        )
        self.log("stopped", round=accounts.round, **vars(outcome))
        return outcome

    def stop(self) -> None:
        """Finish the transaction at hand, then end: what SIGTERM asks for."""
        self._stopped.set()
        self.receiver.changed.set()

    def leave(self) -> None:
        """Push all mass out, then end; remembered over restarts."""
        self.store.note("leaving", "yes")
        self.condition.leaving = True
        self.receiver.changed.set()

    def _fail(self, problem: QuiverError) -> None:
        self._broken = self._broken or problem
        self.log.alarm("failed", reason=str(problem))
        self.stop()

    def _sender_ended(self, task: asyncio.Task[None]) -> None:
        problem = None if task.cancelled() else task.exception()
        if isinstance(problem, QuiverError):
            self._fail(problem)
        elif problem is not None:
            self._fail(QuiverError(f"a courier failed: {problem!r}"))

    async def off_loop(self, function: Callable[..., Result], *values: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *values)

    async def _restore(self) -> None:
        if not await self.off_loop(self._untouched):
            await self._become()

    def _untouched(self) -> bool:
        """Whether nothing has happened yet: one's own first message is not merged with itself."""
        accounts, first = self.transactions.accounts, self.transactions.memory.message
        made = self.learner.message()
        same = all(np.array_equal(leaf, made[name]) for name, leaf in first.items())
        return accounts.round == 0 and not accounts.pushed and same

    async def _become(self) -> None:
        """The state of what is committed: the rest from before the merge, and what to merge."""
        memory, mass = self.transactions.memory, self.transactions.mass
        await self.off_loop(self.learner.restore, memory.rest)
        if mass:
            await self.off_loop(self.learner.merge, memory.message, mass)

    @property
    def stopping(self) -> bool:
        return self._stopped.is_set()

    @property
    def finished(self) -> bool:
        """Nothing will come from this peer any more."""
        accounts = self.transactions.accounts
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
            self.receiver.changed.clear()
            try:
                # A link becomes free without an event of its own: look again now and then.
                async with asyncio.timeout(min(left, 0.02)):
                    await self.receiver.changed.wait()
            except TimeoutError:
                continue

    async def absorb(self, up_to: int | None, finish: bool) -> None:
        """Merge what has come, commit, and let the senders know."""
        receipts = self.receiver.take(up_to)
        refunding = self.neighbours.refunding()
        refunds = [sender.refund for sender in refunding if sender.refund]
        if receipts or refunds:
            weigh = self._weigh if self.settings.copies else None
            await self.transactions.absorb(receipts, refunds, finish, weigh)
        elif finish:
            await self.transactions.finish_round()
        transfers = [transfer for transfer, _ in receipts]
        if up_to is not None:  # in step again: waited for from now on
            self.neighbours.absent -= {t.sender for t in transfers if t.round >= up_to}
        self.receiver.committed(transfers)
        for sender in refunding:
            sender.refund = None
        await self._become()

    def _weigh(self, copies: Sequence[ledger.Transfer]) -> tuple[int, list[int]]:
        """What the graph of its round says of each copy, and of the own message in this round.

        After the last round the own one is a mean already, and counts as 1.
        """
        accounts, numbers = self.transactions.accounts, {n: i for i, n in enumerate(self.names)}
        own = row(self.topology(accounts.round), self.number).get(self.number, 0.0)
        others = [
            row(self.topology(copy.round), self.number).get(numbers[copy.sender], 0.0)
            for copy in copies
        ]
        mine = in_units(own) if accounts.pushed else UNIT
        return mine, [in_units(weight) for weight in others]

    # Its rounds: train, split and commit, wait or not, merge.
    #
    # In sync mode a round waits for the shares its graph promises, or for a deadline; in async mode
    # it takes what has come.

    async def _ask(self) -> None:
        """Before it spends: does anybody remember a newer store of this peer's?"""
        pause = 0.1
        while (lacking := self.neighbours.quorum()) and not self.stopping:
            self.state = "asking"
            self.log("asking", lacking=lacking, remedy="start more peers, or use --trust-store")
            await self.neighbours.tell(self.neighbours.staying() - self.neighbours.greeted)
            await self.until(lambda: not self.neighbours.quorum(), pause)
            pause = min(2 * pause, 30.0)

    async def _rounds(self) -> None:
        await self._follow()
        if not self._over():
            await self._ask()
        while not self.stopping and not self.condition.leaving:
            await self._agreed()
            await self._follow()
            if self._over():
                return
            await self._round(self.transactions.accounts.round)

    def _over(self) -> bool:
        return self.transactions.accounts.round >= self.settings.rounds

    async def _agreed(self) -> None:
        """Before a round from which something is to change: until the others have agreed as well.

        So all change in the same round. Whoever lets the deadline pass has not agreed in time.
        """
        end, pause = time.monotonic() + self.settings.deadline, 0.05
        while awaited := self.course.awaited(self.transactions.accounts.round):
            if self.stopping or self.condition.leaving:
                return
            if time.monotonic() > end:
                self.course.give_up(self.transactions.accounts.round)
                return
            self.state = "agreeing"
            await self.neighbours.tell(awaited)
            await self.neighbours.settled()
            await self.until(lambda: False, pause)
            pause = min(2 * pause, 1.0)

    async def _follow(self) -> None:
        """Take over what was agreed, from this round on."""
        t = self.transactions.accounts.round
        await self.course.heed(t)
        agreed = (self.course.rounds(t), self.course.rate(t))
        if agreed != self._amended:
            self._amended = agreed
            self.settings = replace(self.settings, rounds=agreed[0])
            await self.off_loop(self.learner.amend, agreed[1], agreed[0])
            self.log("amended", round=t, rounds=agreed[0], lr=agreed[1])

    async def _round(self, t: int) -> None:
        graph, sync, clock = self.topology(t), self._sync(), Clock()
        check_split("copies" if self.settings.copies else "shares", graph, t)
        active, share = bool(graph.active[self.number]), float(graph.active.mean())
        line: dict[str, Any] = {"round": t, "active": int(active)}
        if not self.transactions.accounts.pushed:
            self.state = "training"
            keep = t + 1 < self.settings.rounds and not self.topology(t + 1).active[self.number]
            await self.off_loop(self.learner.train, t, active, share, active and bool(keep))
            clock.lap("train_seconds")
            line |= {"local": await self._evaluated(t, "local"), **self.learner.record()}
            clock.lap("evaluate_seconds")
            self.state = "pushing"
            if self.stopping or not await self._push(t, receivers(graph, self.names, self.number)):
                return
        self.state = "waiting"
        if sync:
            await self._gather(t, set(expected_senders(graph, self.names, self.number)))
        else:
            await self._breathe(t)
        if self.stopping:
            return
        await self.absorb(t if sync else None, finish=True)
        clock.lap("mix_seconds")
        line["mixed"] = await self._evaluated(t, "mixed")
        clock.lap("evaluate_seconds")
        self.scores = line["mixed"] or self.scores
        line |= {"mass": self.transactions.mass, **self._bytes(), **clock.record()}
        self.metrics.add("rounds")
        self.record(line)
        self.log("round", **line)

    def _bytes(self) -> dict[str, int]:
        """What this peer has put on the network and taken from it since the last round."""
        counts = {name: self.metrics.counts[name] for name in ("sent_bytes", "received_bytes")}
        moved = {name: count - self._counted.get(name, 0) for name, count in counts.items()}
        self._counted = counts
        return moved

    def _sync(self) -> bool:
        return self.settings.mode == "sync"

    async def _evaluated(self, t: int, stage: str) -> dict[str, float]:
        if not evaluates(t, self.settings.evaluate_every, self.settings.rounds):
            return {}
        return await self.off_loop(self.learner.evaluate, t, stage)

    async def _push(self, t: int, weights: dict[str, float]) -> bool:
        """Split and commit; False if there was no time for it before the end."""
        neighbours, others = self.neighbours, set(weights) - {self.agreement.name}
        if self._sync():
            await self.until(
                lambda: all(neighbours.free(peer) for peer in neighbours.waited_for(others)), None
            )
            late = {peer for peer in neighbours.waited_for(others) if not neighbours.free(peer)}
            neighbours.clogged |= late
            if self.stopping:
                return False
        cautious = not self._sync() or bool(neighbours.absent | neighbours.clogged)
        may = not cautious or ledger.may_push(self.transactions.accounts)
        barred = self._overdrawn()
        chosen = {
            p: w
            for p, w in weights.items()
            if p not in others or (may and neighbours.free(p) and p not in barred)
        }
        message = await self.off_loop(self.learner.message)
        rest = await self.off_loop(self.learner.rest)
        if self.settings.copies:
            to = set(chosen) & others
            transfers = await self.transactions.push_copies(t, message, rest, sorted(to))
        else:
            parts = ledger.as_parts(chosen)
            home = parts.pop(self.agreement.name, 0)
            transfers = await self.transactions.push(t, message, rest, parts, home)
        for transfer in transfers:
            neighbours.senders[transfer.receiver].wake()
        return True

    def _overdrawn(self) -> set[str]:
        """Who has so much of this peer's mass that it must give some back first.

        Of two honest neighbours one at least may always push to the other. In sync mode only those
        that missed a deadline, or sent what was refused.
        """
        accounts, lend = self.transactions.accounts, int(self.settings.lend * ledger.UNIT)
        found = {peer for peer in self._mutual if ledger.overdrawn(accounts, peer, lend)}
        if self._sync():  # what the graph says holds, but not for whoever keeps nothing of it
            return found & (self.neighbours.absent | self.receiver.refused_senders())
        return found

    async def _gather(self, t: int, expected: set[str]) -> None:
        """Until every promised share is here, or the deadline: late ones merge in a later round."""
        neighbours = self.neighbours

        def missing() -> set[str]:
            here = {p for p, s in self.receiver.staged.items() if s.transfer.round >= t}
            return expected - here - neighbours.outside() - neighbours.absent - neighbours.done

        await self.until(lambda: not missing(), None)
        late = missing()
        if late and not self.stopping:
            self.log("deadline", round=t, missing=sorted(late))
            neighbours.absent |= late

    async def _breathe(self, t: int) -> None:
        """Async: continue at once, unless asked to pause or too far ahead of the slowest heard."""
        if self.settings.pause:
            await self.until(lambda: False, self.settings.pause)
        if self.settings.staleness is not None:
            await self._stay_close(t - self.settings.staleness)

    async def _stay_close(self, least: int) -> None:
        """Until nobody is in an earlier round than this, or the deadline.

        They are asked: a share from each may be long in coming, as the graph or its back-pressure
        has it. Who lets the deadline pass is waited for again once it has caught up.
        """
        neighbours, heard = self.neighbours, self.receiver.heard
        neighbours.absent -= {peer for peer, round in heard.items() if round >= least}

        def behind() -> set[str]:
            late = {peer for peer, round in heard.items() if round < least}
            return late - neighbours.done - neighbours.outside() - neighbours.absent

        end, pause = time.monotonic() + self.settings.deadline, 0.02
        while behind() and time.monotonic() < end:
            await neighbours.tell(behind())
            await self.until(lambda: not behind(), min(pause, end - time.monotonic()))
            if self.stopping or self.condition.leaving:
                return
            pause = min(1.5 * pause, 1.0)
        neighbours.absent |= behind()

    # Its end: it stays until the others have finished, or it gives all its mass away.

    async def _end(self) -> None:
        if not self.stopping and not self.condition.leaving:
            await self._linger()
        if not self.stopping and self.condition.leaving:
            await self._give_everything_away()

    async def _linger(self) -> None:
        """Take in what is late and answer, until all have finished or nothing is heard any more."""
        self.state = "finished"
        told: set[str] = set()
        news, last_news = self._news(), time.monotonic()
        while not self.stopping and not self.condition.leaving:
            await self._follow()
            if not self._over():  # it was agreed to go on
                return
            if self.receiver.staged or self.neighbours.refunding():
                await self.absorb(None, finish=False)
                last = self.settings.rounds - 1
                self.scores = await self.off_loop(self.learner.evaluate, last, "mixed")
            others = self.neighbours.staying()
            if self.finished:
                told |= await self.neighbours.tell(others - told)
            over = self.finished and not self.receiver.staged
            if over and others <= self.neighbours.done:
                # Whoever was not reached just now had finished, and may have ended before us.
                return
            if self._news() != news:
                news, last_news = self._news(), time.monotonic()
            if time.monotonic() - last_news > self._patience(others - self.neighbours.done):
                return
            await self.until(lambda: bool(self.receiver.staged), 0.25)

    def _patience(self, behind: set[str]) -> float:
        """How long to stay without news of those behind: a round may wait for two deadlines."""
        waits = 2 * self.settings.deadline if self._sync() and behind else 0.0
        return self.settings.linger + waits

    def _news(self) -> tuple[int, int]:
        """It changes when others come on; shares alone would keep a peer up for ever."""
        rounds = (min(round, self.settings.rounds) for round in self.receiver.heard.values())
        return len(self.neighbours.done), sum(rounds)

    async def _give_everything_away(self) -> None:
        """Tell everybody, then push everything out until nothing is left here or on its way."""
        if not self.settings.copies:
            await self._ask()
        self.state = "leaving"
        if self.transactions.accounts.units:
            model = await self.off_loop(self.learner.model)
            write_durably(self.store.folder / PERSONAL, safetensors.numpy.save(model))
        told: set[str] = set()
        last_news = time.monotonic()
        while not self.stopping and time.monotonic() - last_news < self.settings.linger:
            told |= await self.neighbours.tell(self.neighbours.staying() - told)
            before = self.transactions.accounts
            if self.receiver.staged or self.neighbours.refunding():
                await self._take_in()
            heirs = [p for p in sorted(told) if self.neighbours.free(p)][:HEIRS]
            if not self.settings.copies and self.transactions.accounts.units and heirs:
                await self._give_away(heirs)
            accounts = self.transactions.accounts
            everybody = self.neighbours.staying() <= told
            left = self.settings.copies or not accounts.units
            if everybody and left and not accounts.outbox and not self.receiver.staged:
                return
            if accounts != before:
                last_news = time.monotonic()
            await self.until(lambda: bool(self.receiver.staged), 0.1)

    async def _take_in(self) -> None:
        receipts = self.receiver.take()
        refunding = self.neighbours.refunding()
        refunds = [sender.refund for sender in refunding if sender.refund]
        weigh = self._weigh if self.settings.copies else None
        await self.transactions.absorb(receipts, refunds, finish=False, weigh=weigh)
        self.receiver.committed([transfer for transfer, _ in receipts])
        for sender in refunding:
            sender.refund = None

    async def _give_away(self, heirs: list[str]) -> None:
        memory, accounts = self.transactions.memory, self.transactions.accounts
        parts = dict.fromkeys(heirs, 1)
        for transfer in await self.transactions.push(
            accounts.round, memory.message, memory.rest, parts, 0
        ):
            self.neighbours.senders[transfer.receiver].wake()

    # What can be seen of it

    def gauges(self) -> dict[str, float]:
        accounts = self.transactions.accounts
        ages = (sender.waiting_seconds for sender in self.neighbours.senders.values())
        return {
            "round": accounts.round,
            "mass": self.transactions.mass,
            "outbox": len(accounts.outbox),
            "outbox_age_seconds": max(ages, default=0.0),
            "staged": len(self.receiver.staged),
            "commit_seconds": self.transactions.commit_seconds,
        }

    def samples(self) -> list[Sample]:
        """For its owner's metrics: what is in `gauges`, and more that takes a look at the disk."""
        more = {
            **self.gauges(),
            "rounds_planned": self.settings.rounds,
            "absent": len(self.neighbours.absent),
            "overdrawn": len(self._overdrawn()),
            "certificate_seconds": self._identity.refresh().seconds_left(),
            "store_bytes": self.store.nbytes(),
        }
        found = [Sample(name, float(value)) for name, value in more.items()]
        found.append(Sample("peer_info", 1.0, (self.agreement.name, self.agreement.run)))
        found.append(Sample("state", 1.0, (self.state,)))
        found += [Sample("score", value, (name,)) for name, value in self.scores.items()]
        for peer, link in self.transactions.accounts.links.items():
            found.append(Sample("link_given", link.given / ledger.UNIT, (peer,)))
            found.append(Sample("link_taken", link.taken / ledger.UNIT, (peer,)))
            waiting = self.neighbours.senders[peer].waiting_seconds
            found.append(Sample("link_waiting_seconds", waiting, (peer,)))
        return found

    def _problems(self) -> dict[str, str]:
        return {p: c.problem for p, c in self.neighbours.senders.items() if c.problem}

    def status(self) -> dict[str, Any]:
        return {
            "name": self.agreement.name,
            "state": self.state,
            "rounds": self.settings.rounds,
            **self.gauges(),
            "metrics": self.scores,
            "counts": dict(self.metrics.counts),
            "refusals": dict(self.metrics.refusals),
            "absent": sorted(self.neighbours.absent),
            "overdrawn": sorted(self._overdrawn()),
            "problems": self._problems(),
            "amendments": self.course.told(),
        }
