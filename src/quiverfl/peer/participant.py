"""A peer at work: what it has, and the steps that its rounds and its end are made of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from quiverfl.engine.shares import UNIT, in_units, row
from quiverfl.errors import QuiverError
from quiverfl.peer import ledger
from quiverfl.peer.agreement import Agreement, Limits
from quiverfl.peer.course import Course
from quiverfl.peer.identity import LiveIdentity
from quiverfl.peer.learner import SIGHT, Learner, mutual_neighbours
from quiverfl.peer.manifest import Leaves
from quiverfl.peer.metrics import Log, PeerMetrics
from quiverfl.peer.neighbours import Condition, Neighbours
from quiverfl.peer.offering import Offering
from quiverfl.peer.peer_settings import Settings
from quiverfl.peer.receiver import Receiver
from quiverfl.peer.roster import ROSTER, LiveRoster
from quiverfl.peer.store import Store, Trace
from quiverfl.peer.transactions import Transactions
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import Topology
from quiverfl.transforms.judging import factors_of, judged_weights

Result = TypeVar("Result")
PUSHED = "pushed/"
"""In the rest: the message that was pushed last, where others' are compared with it."""
Factors = dict[str, float]
"""By sender, the part of its message that is taken."""


class Participant:
    """One member of a run. Its learner works off the event loop: calls are answered meanwhile."""

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
        self.learner, self.topology, self.store, self.keys = learner, topology, store, keys
        self.settings, self.agreement, self.limits = settings, agreement, limits
        self.record, self.log, self.metrics = record, Log(agreement.name), PeerMetrics()
        self._roster, self._identity = LiveRoster(keys / ROSTER), LiveIdentity(keys)
        self.names = self._roster.current.names
        self.number = self._roster.current.number(agreement.name)
        self.transactions = Transactions(store, agreement.manifest, self.number)
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
            fail=self.fail,
        )
        self.neighbours.ahead = topology.looks is not None and self.sync()
        self.course = Course(agreement.name, settings.rounds, self.neighbours, store, self.log)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="training")
        self._stopped = asyncio.Event()
        self.broken: QuiverError | None = None
        self.state = "starting"
        self.scores: dict[str, float] = {}
        self._amended: tuple[int, float | None] = (settings.rounds, None)
        self._mutual = mutual_neighbours(topology, self.names, self.number)

    def stop(self) -> None:
        """Finish the transaction at hand, then end: what SIGTERM asks for."""
        self._stopped.set()
        self.receiver.changed.set()

    def leave(self) -> None:
        """Push all mass out, then end; remembered over restarts."""
        self.store.note("leaving", "yes")
        self.condition.leaving = True
        self.receiver.changed.set()

    def fail(self, problem: QuiverError) -> None:
        self.broken = self.broken or problem
        self.log.alarm("failed", reason=str(problem))
        self.stop()

    @property
    def stopping(self) -> bool:
        return self._stopped.is_set()

    @property
    def finished(self) -> bool:
        """Nothing will come from this peer any more."""
        accounts = self.transactions.accounts
        return accounts.round >= self.settings.rounds and not accounts.outbox

    def over(self) -> bool:
        return self.transactions.accounts.round >= self.settings.rounds

    def sync(self) -> bool:
        return self.settings.mode == "sync"

    async def off_loop(self, function: Callable[..., Result], *values: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *values)

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

    async def ask(self) -> None:
        """Before it spends: does anybody remember a newer store of this peer's?"""
        pause = 0.1
        while (lacking := self.neighbours.quorum()) and not self.stopping:
            self.state = "asking"
            self.log("asking", lacking=lacking, remedy="start more peers, or use --trust-store")
            await self.neighbours.tell(self.neighbours.staying() - self.neighbours.greeted)
            await self.until(lambda: not self.neighbours.quorum(), pause)
            pause = min(2 * pause, 30.0)

    async def follow(self) -> None:
        """Take over what was agreed, from this round on."""
        t = self.transactions.accounts.round
        await self.course.heed(t)
        agreed = (self.course.rounds(t), self.course.rate(t))
        if agreed != self._amended:
            self._amended = agreed
            self.settings = replace(self.settings, rounds=agreed[0])
            await self.off_loop(self.learner.amend, agreed[1], agreed[0])
            self.log("amended", round=t, rounds=agreed[0], lr=agreed[1])

    async def restore(self) -> None:
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

    async def absorb(self, up_to: int | None, finish: bool, returned: bool = True) -> None:
        """Merge what has come, and become that."""
        await self.take_in(up_to, finish, returned)
        await self._become()

    async def take_in(
        self, up_to: int | None = None, finish: bool = False, returned: bool = True
    ) -> None:
        """Commit what has come to the account, and let the senders know.

        Without `returned`, own shares that were refused stay where they are for now.
        """
        receipts = self.receiver.take(up_to)
        noted = self._noted(receipts)
        factors = await self._judged(receipts)
        if not self.settings.copies:
            receipts = [pair for pair in receipts if factors[pair[0].sender]]
        refunding = self.neighbours.refunding() if returned else []
        refunds = [sender.refund for sender in refunding if sender.refund]
        if receipts or refunds or noted:
            weigh = partial(self._weigh, factors) if self.settings.copies else None
            await self.transactions.absorb(receipts, refunds, finish, weigh, noted)
        elif finish:
            await self.transactions.finish_round()
        transfers = [transfer for transfer, _ in receipts]
        if up_to is not None:  # in step again: waited for from now on
            self.neighbours.absent -= {t.sender for t in transfers if t.round >= up_to}
        self.receiver.committed(transfers)
        for sender in refunding:
            sender.refund = None

    def graph(self, t: int) -> Graph:
        """Of a round, as far as this peer knows it: where the topology looks, its own choice."""
        return self.topology(t, self.learner.view)

    def _noted(self, receipts: Sequence[tuple[ledger.Transfer, Leaves]]) -> Leaves:
        """What their senders have told, beside what is remembered of others."""
        if self.topology.looks is None or not receipts:
            return {}
        rest, numbers = self.transactions.memory.rest, {n: i for i, n in enumerate(self.names)}
        told, heard = (rest[f"{SIGHT}{name}"].copy() for name in ("told", "heard"))
        for share, _ in receipts:
            sender = numbers[share.sender]
            if share.round >= heard[sender]:
                told[sender] = self.receiver.staged[share.sender].told
                heard[sender] = share.round
        return {f"{SIGHT}told": told, f"{SIGHT}heard": heard}

    async def _judged(self, receipts: Sequence[tuple[ledger.Transfer, Leaves]]) -> Factors:
        """What the run's rule takes of each sender's; shares of which it takes nothing go back."""
        rule, own = self.settings.rule, self._pushed()
        if rule is None or not receipts or own is None:
            return {transfer.sender: 1.0 for transfer, _ in receipts}
        others = [(leaves, share.units / UNIT or 1.0) for share, leaves in receipts]
        progress = self.transactions.accounts.round / max(1, self.settings.rounds)
        found = await asyncio.to_thread(factors_of, rule, own, others, progress)
        for (share, _), factor in zip(receipts, found, strict=True):
            if not factor and not self.settings.copies:
                await self.receiver.send_back(share, f"robustness: {rule.name}")
        senders = [share.sender for share, _ in receipts]
        return dict(zip(senders, map(float, found), strict=True))

    def _pushed(self) -> tuple[Leaves, float] | None:
        """The own message and its mass as they were pushed last: what others' are compared with.

        Of what stayed here after that little can be seen where the run compresses.
        """
        rest = self.transactions.memory.rest
        if f"{PUSHED}/mass" not in rest:
            return None
        manifest = self.agreement.manifest
        message = {leaf.name: rest[f"{PUSHED}{leaf.name}"] for leaf in manifest.leaves}
        return message, float(rest[f"{PUSHED}/mass"])

    def remembered(self, message: Leaves) -> Leaves:
        """What goes into the rest of a message that is pushed, if others' are compared with it."""
        if self.settings.rule is None:
            return {}
        mass = 1.0 if self.settings.copies else self.transactions.mass
        kept = {f"{PUSHED}{name}": leaf for name, leaf in message.items()}
        return {**kept, f"{PUSHED}/mass": np.array(mass)}

    def _weigh(self, factors: Factors, copies: Sequence[ledger.Transfer]) -> tuple[int, list[int]]:
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
        taken = np.array([factors[copy.sender] for copy in copies])
        return judged_weights(mine, [in_units(weight) for weight in others], taken)

    def overdrawn(self) -> set[str]:
        """Who has so much of this peer's mass that it must give some back first.

        Of two honest neighbours one at least may always push to the other. In sync mode only those
        that missed a deadline, or sent what was refused.
        """
        accounts, lend = self.transactions.accounts, int(self.settings.lend * ledger.UNIT)
        found = {peer for peer in self._mutual if ledger.overdrawn(accounts, peer, lend)}
        if self.sync():  # what the graph says holds, but not for whoever keeps nothing of it
            return found & (self.neighbours.absent | self.receiver.refused_senders())
        return found
