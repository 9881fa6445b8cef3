"""A running peer: the life of its process, how it takes in shares, and what can be seen of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from quiverfl.engine.exchange.fixed_point import UNIT, sender_weights, to_units
from quiverfl.errors import QuiverError
from quiverfl.peer.accounts import ledger
from quiverfl.peer.accounts.ledger import Transfer
from quiverfl.peer.changes import RunChanges
from quiverfl.peer.context import PeerContext
from quiverfl.peer.control import Control
from quiverfl.peer.ending import run_end
from quiverfl.peer.folder import Outcome, Settings
from quiverfl.peer.learner import REPORTS, Learner, mutual_neighbours
from quiverfl.peer.link.link import Sender
from quiverfl.peer.link.messages import Leaves
from quiverfl.peer.link.neighbours import Neighbours, SharePuller
from quiverfl.peer.link.receiver import Receiver
from quiverfl.peer.link.service import Server, Service
from quiverfl.peer.link.wire import Terms
from quiverfl.peer.metrics import Sample, serve_metrics
from quiverfl.peer.rounds import Patience, measured_deadline, run_rounds
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import Topology
from quiverfl.transforms.robustness import compute_factors, reweigh_copies

Result = TypeVar("Result")
PUSHED = "pushed/"
"""Key prefix in the rest: the message that was pushed last, for comparison with others'."""
FIRST_QUESTION, LAST_QUESTION = 0.1, 30.0
"""Seconds between two attempts to reach a quorum: the first pause, and the longest."""


class Node:
    """One peer as a process. Its learner works off the event loop, so that calls are answered."""

    def __init__(
        self,
        ctx: PeerContext,
        learner: Learner,
        topology: Topology,
        settings: Settings,
        record: Callable[[dict[str, Any]], None] = lambda line: None,
        grow: Callable[[int], Topology] | None = None,
    ) -> None:
        """`grow` makes the topology of a run with more members than it began with."""
        self.ctx, self.learner, self.topology = ctx, learner, topology
        self.settings, self.record = settings, record
        self.agreement, self.number, self.log = ctx.agreement, ctx.number, ctx.log
        self.store, self.transactions, self.metrics = ctx.store, ctx.transactions, ctx.metrics
        self.names = ctx.roster.current.names
        self.founders = settings.founders or len(self.names)
        self._grow, self._topologies = grow, {0: topology}
        self.sync = settings.mode == "sync"
        self.rounds_end_with_push = self.sync and (
            topology.reports is not None or settings.quorum < 1
        )
        """Whether others count a round as over once this peer has pushed. With an adaptive topology
        or a quorum a neighbour cannot know whether a share comes until this peer says so."""
        self.leaving = ctx.store.meta("leaving") == "yes"
        self.stopping = False
        self.problem: QuiverError | None = None
        self.state = "starting"
        self.scores: dict[str, float] = {}
        self.patience = Patience()
        self.waits_for: Callable[[], set[str]] = set
        self.receiver = Receiver(
            ctx, settings.copies, self._wake_sender, self.patience.note_arrival, self._opening_mass
        )
        self.neighbours = Neighbours(ctx, self)
        self.changes = RunChanges(ctx, settings.rounds, self.neighbours, self.founders)
        self._tasks: list[asyncio.Task[None]] = []
        self.service = Service(ctx, self)
        self.control = Control(self)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="training")
        self._agreed: tuple[int, float | None] = (settings.rounds, None)
        self._mutual: set[str] = set()
        if self.number < self.founders:
            self._mutual = mutual_neighbours(topology, self.names, self.number)

    # The life of the process

    async def run(self) -> Outcome:
        """Run until all rounds are over, the peer has left, or it was asked to stop."""
        server = Server(self.settings.bind, self.ctx, self.service)
        endpoint = None
        if self.settings.metrics:
            endpoint = serve_metrics(self.settings.metrics, self.metrics, self.samples)
        await server.start()
        await self.control.start()
        self.neighbours.lines.attend(server.own_address)
        senders = self.neighbours.senders.values()
        carriers: list[Sender | SharePuller] = [*senders, *self._make_pullers()]
        self._tasks = [self._start(carrier.run()) for carrier in carriers]
        self.log("started", round=self.transactions.accounts.round, port=server.port)
        try:
            await self.neighbours.sign_evictions()
            await self.neighbours.announce(set(self.neighbours.senders))
            await self.neighbours.wait_for_news()
            await self._restore()
            while True:
                await run_rounds(self)
                await run_end(self)
                if self.stopping or self.leaving or self.is_over():
                    break
        finally:
            self.state = "stopping"
            for task in self._tasks:
                task.cancel()
            await self.neighbours.close()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await server.stop(0.5)
            await self.control.stop()
            await self.transactions.wait_until_idle()
            self._thread.shutdown()
            if endpoint is not None:
                endpoint.shutdown()
        if self.problem is not None:
            raise self.problem
        return self._outcome()

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Start a sender or puller; if it fails, the peer stops."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._check_ended)
        return task

    def _check_ended(self, task: asyncio.Task[None]) -> None:
        problem = None if task.cancelled() else task.exception()
        if isinstance(problem, QuiverError):
            self.fail(problem)
        elif problem is not None:
            self.fail(QuiverError(f"a sender failed: {problem!r}"))

    def _make_pullers(self) -> list[SharePuller]:
        """A peer that only dials out fetches its shares from the members it can call."""
        roster = self.ctx.roster.current
        if not roster.member(self.ctx.name).dials_out:
            return []
        return [
            SharePuller(self.ctx, sender.link, self.receiver)
            for peer, sender in self.neighbours.senders.items()
            if not roster.member(peer).dials_out
        ]

    def _wake_sender(self, peer: str) -> None:
        self.neighbours.wake(peer)  # made after the receiver

    def stop(self) -> None:
        """Finish the transaction at hand, then end, as SIGTERM asks."""
        self.stopping = True
        self.ctx.news.set()

    def leave(self) -> None:
        """Push all mass out, then end. A restarted peer goes on leaving."""
        self.store.save_meta("leaving", "yes")
        self.leaving = True
        self.ctx.news.set()

    def fail(self, problem: QuiverError) -> None:
        self.problem = self.problem or problem
        self.log.alarm("failed", reason=str(problem))
        self.stop()

    async def run_in_thread(self, function: Callable[..., Result], *values: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *values)

    async def wait_until(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait for a condition, at most so many seconds (`deadline` if not given).

        It is checked after every commit and greeting. A stop or leave ends the wait.
        """
        leaving, changed = self.leaving, self.ctx.news
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.deadline if seconds is None else seconds):
                while True:
                    changed.clear()
                    if condition() or self.stopping or self.leaving != leaving:
                        return
                    await changed.wait()

    async def ask_quorum(self) -> None:
        """Before this peer spends, ask whether any neighbour remembers a newer store of it."""
        neighbours, pause = self.neighbours, FIRST_QUESTION
        while (lacking := neighbours.count_missing_quorum()) and not self.stopping:
            self.state = "asking"
            self.log("asking", lacking=lacking, remedy="start more peers, or use --trust-store")
            await neighbours.announce(neighbours.list_staying() - neighbours.greeted)
            await self.wait_until(lambda: not neighbours.count_missing_quorum(), pause)
            pause = min(2 * pause, LAST_QUESTION)
        await neighbours.wait_for_news()  # such as a receipt that this store does not know

    # The rounds of the run

    @property
    def finished(self) -> bool:
        """Whether nothing will come from this peer any more."""
        return self.is_over() and not self.transactions.accounts.outbox

    def is_over(self) -> bool:
        return self.transactions.accounts.round >= self.settings.rounds

    async def propose(self, terms: Terms) -> None:
        """Sign a change of the run for this member."""
        accounts = self.transactions.accounts
        is_begun = accounts.pushed or self.state == "training"
        self.check_growth(terms)
        await self.changes.propose(terms, accounts.round, is_begun)

    async def apply_changes(self) -> None:
        """Take over what all members have agreed on, as of this round."""
        t = self.transactions.accounts.round
        await self.changes.apply_decided(t)
        self.admit_members()
        agreed = (self.changes.rounds(t), self.changes.rate(t))
        if agreed != self._agreed:
            self._agreed = agreed
            self.settings = replace(self.settings, rounds=agreed[0])
            await self.run_in_thread(self.learner.change_run, agreed[1], agreed[0])
            self.log("amended", round=t, rounds=agreed[0], lr=agreed[1])

    def graph(self, t: int) -> Graph:
        """The graph of a round as this peer knows it; an adaptive one has its own choice."""
        return self._topology_at(t)(t, self.learner.view)

    def _topology_at(self, t: int) -> Topology:
        """The topology of a round: members may have joined since the run began."""
        return self._topologies[max(since for since in self._topologies if since <= t)]

    def _opening_mass(self, peer: str) -> int:
        return self.changes.opening(peer)

    def is_member(self, peer: str) -> bool:
        """Whether a neighbour takes part in this round, and is not only in the roster."""
        members = self.changes.members(self.transactions.accounts.round)
        return peer in self.names[:members]

    def check_growth(self, terms: Terms) -> None:
        """Refuse members that this run's graph has no place for."""
        if not terms.joins:
            return
        if self._grow is None or self.topology.reports is not None:
            raise QuiverError(
                f"amend: members cannot join on the topology {self.topology.name!r}, on which "
                "clients choose by what others report."
            )
        if self.settings.copies and terms.grant != UNIT:
            raise QuiverError("amend: this run's messages carry no mass: leave out --mass.")
        self._grow(self.changes.members(terms.since) + len(terms.joins))

    def admit_members(self) -> None:
        """Deal with members that the roster has gained, and make the graphs they take part in."""
        names = self.ctx.roster.refresh().names
        self.neighbours.lines.follow_roster()
        for peer in names[len(self.names) :]:
            self._tasks.append(self._start(self.neighbours.add(peer).run()))
        self.names = names
        for since in self.changes.growth():
            members, known = self.changes.members(since), self._topologies.get(since)
            if self._grow is not None and (known is None or known.clients != members):
                self._topologies[since] = self._grow(members)
                self._mutual |= mutual_neighbours(self._topologies[since], names, self.number)
                self.log("members", round=since, members=members)

    def past_last_round(self) -> set[str]:
        """Neighbours that have had their last round and give nothing back: nothing is pushed there.

        In async mode the round that they have told decides: a peer may have finished and wait for a
        slow neighbour's acknowledgement before it says so.
        """
        if self.sync:
            return set(self.neighbours.done)
        rounds = self.receiver.rounds
        return {peer for peer, round in rounds.items() if round >= self.settings.rounds}

    def debtors(self) -> set[str]:
        """Neighbours that hold so much of this peer's mass that they must give some back first.

        At least one of two honest neighbours may always push to the other. In sync mode only those
        count that missed a deadline or sent what was refused.
        """
        accounts, max_debt = self.transactions.accounts, int(self.settings.max_debt * UNIT)
        debtors = {p for p in self._mutual if ledger.is_overdrawn(accounts, p, max_debt)}
        if self.sync:  # the graph says who gets what, but a peer that keeps nothing gets nothing
            return debtors & (self.neighbours.absent | self.receiver.refused_senders())
        return debtors

    # Taking shares in

    async def _restore(self) -> None:
        """Give the learner the committed state, unless nothing has happened yet.

        A peer must not merge its own first message with itself.
        """
        if not await self.run_in_thread(self._is_untouched):
            await self._load_committed()

    def _is_untouched(self) -> bool:
        accounts, first = self.transactions.accounts, self.transactions.memory.message
        fresh = self.learner.message()
        same = all(np.array_equal(leaf, fresh[name]) for name, leaf in first.items())
        return accounts.round == 0 and not accounts.pushed and same

    async def _load_committed(self) -> None:
        """Give the learner the committed state: the rest from before the merge, then the sum."""
        memory, mass = self.transactions.memory, self.transactions.mass
        await self.run_in_thread(self.learner.restore, memory.rest)
        if mass:
            await self.run_in_thread(self.learner.merge, memory.message, mass)

    async def absorb(self, up_to: int | None, finish: bool, refunds: bool = True) -> None:
        """Commit what has come, and let the learner merge it."""
        await self.commit_receipts(up_to, finish, refunds)
        await self._load_committed()

    async def commit_receipts(
        self, up_to: int | None = None, finish: bool = False, refunds: bool = True
    ) -> None:
        """Commit what has come to the account, and let the senders know.

        Without `refunds`, own shares that were refused stay where they are for now.
        """
        receipts = self.receiver.take(up_to)
        reports = self._merge_reports(receipts)
        factors = await self._judge(receipts)
        if not self.settings.copies:
            receipts = [pair for pair in receipts if factors[pair[0].sender]]
        refunding = self.neighbours.refunding() if refunds else []
        returned = [sender.refund for sender in refunding if sender.refund]
        if receipts or returned or reports:
            weigh = partial(self._weigh_copies, factors) if self.settings.copies else None
            await self.transactions.absorb(receipts, returned, finish, weigh, reports)
        elif finish:
            await self.transactions.finish_round()
        transfers = [transfer for transfer, _ in receipts]
        if up_to is not None:  # in step again: waited for from now on
            self.neighbours.absent -= {t.sender for t in transfers if t.round >= up_to}
        self.receiver.conclude(transfers)
        for sender in refunding:
            sender.refund = None

    def _merge_reports(self, receipts: Sequence[tuple[Transfer, Leaves]]) -> Leaves:
        """Add the senders' reports to the remembered reports of other peers."""
        if self.topology.reports is None or not receipts:
            return {}
        rest, numbers = self.transactions.memory.rest, {n: i for i, n in enumerate(self.names)}
        reports, rounds = (rest[f"{REPORTS}{name}"].copy() for name in ("told", "heard"))
        for share, _ in receipts:
            sender = numbers[share.sender]
            if share.round >= rounds[sender]:
                reports[sender] = self.receiver.staged[share.sender].report
                rounds[sender] = share.round
        return {f"{REPORTS}told": reports, f"{REPORTS}heard": rounds}

    async def _judge(self, receipts: Sequence[tuple[Transfer, Leaves]]) -> dict[str, float]:
        """The part of each sender's message that the robust rule takes; at 0 a share goes back."""
        rule, own = self.settings.rule, self._last_pushed()
        if rule is None or not receipts or own is None:
            return {transfer.sender: 1.0 for transfer, _ in receipts}
        others = [(leaves, share.units / UNIT or 1.0) for share, leaves in receipts]
        progress = self.transactions.accounts.round / max(1, self.settings.rounds)
        factors = await asyncio.to_thread(compute_factors, rule, own, others, progress)
        for (share, _), factor in zip(receipts, factors, strict=True):
            if not factor and not self.settings.copies:
                await self.receiver.send_back(share, f"robustness: {rule.name}")
        senders = [share.sender for share, _ in receipts]
        return dict(zip(senders, map(float, factors), strict=True))

    def _last_pushed(self) -> tuple[Leaves, float] | None:
        """The own message and its mass as they were pushed last, for comparison with others'.

        With compression, what stayed here after that push would tell little.
        """
        rest = self.transactions.memory.rest
        if f"{PUSHED}/mass" not in rest:
            return None
        leaves = self.agreement.manifest.leaves
        message = {leaf.name: rest[f"{PUSHED}{leaf.name}"] for leaf in leaves}
        return message, float(rest[f"{PUSHED}/mass"])

    def keep_pushed(self, message: Leaves) -> Leaves:
        """The entries of the rest that keep a pushed message for a robust rule; else none."""
        if self.settings.rule is None:
            return {}
        mass = 1.0 if self.settings.copies else self.transactions.mass
        entries = {f"{PUSHED}{name}": leaf for name, leaf in message.items()}
        return {**entries, f"{PUSHED}/mass": np.array(mass)}

    def _weigh_copies(
        self, factors: dict[str, float], copies: Sequence[Transfer]
    ) -> tuple[int, list[int]]:
        """Weigh the own message by this round's graph, and each copy by its round's graph.

        After the last round the own message is a mean already, and counts as 1.
        """
        accounts, numbers = self.transactions.accounts, {n: i for i, n in enumerate(self.names)}
        own = sender_weights(self.graph(accounts.round), self.number).get(self.number, 0.0)
        others = [
            sender_weights(self.graph(copy.round), self.number).get(numbers[copy.sender], 0.0)
            for copy in copies
        ]
        own_units = to_units(own) if accounts.pushed else UNIT
        accepted = np.array([factors[copy.sender] for copy in copies])
        return reweigh_copies(own_units, [to_units(weight) for weight in others], accepted)

    # What can be seen

    def _outcome(self) -> Outcome:
        accounts = self.transactions.accounts
        empty = self.settings.copies or not accounts.units
        outcome = Outcome(
            finished=self.finished,
            left=self.leaving and empty and not accounts.outbox,
            stopped=self.stopping,
            undelivered=len(accounts.outbox),
            metrics=self.scores,
            problems=self._problems(),
        )
        self.log("stopped", round=accounts.round, **vars(outcome))
        return outcome

    def _problems(self) -> dict[str, str]:
        """The reason why each neighbour's share waits."""
        return {p: s.problem for p, s in self.neighbours.senders.items() if s.problem}

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
        """The samples for the owner's metrics: `gauges`, and values that need the disk."""
        values = {
            **self.gauges(),
            "rounds_planned": self.settings.rounds,
            "absent": len(self.neighbours.absent),
            "overdrawn": len(self.debtors()),
            "certificate_seconds": self.ctx.identity.refresh().seconds_left(),
            "store_bytes": self.store.nbytes(),
        }
        samples = [Sample(name, float(value)) for name, value in values.items()]
        samples.append(Sample("peer_info", 1.0, (self.ctx.name, self.agreement.run)))
        samples.append(Sample("state", 1.0, (self.state,)))
        samples += [Sample("score", value, (name,)) for name, value in self.scores.items()]
        for peer, link in self.transactions.accounts.links.items():
            samples.append(Sample("link_given", link.given / UNIT, (peer,)))
            samples.append(Sample("link_taken", link.taken / UNIT, (peer,)))
            waiting = self.neighbours.senders[peer].waiting_seconds
            samples.append(Sample("link_waiting_seconds", waiting, (peer,)))
        return samples

    def status(self) -> dict[str, Any]:
        """Content of `quiver peer status`."""
        return {
            "name": self.ctx.name,
            "state": self.state,
            "rounds": self.settings.rounds,
            "members": self.changes.members(self.transactions.accounts.round),
            **self.gauges(),
            "metrics": self.scores,
            "counts": dict(self.metrics.counts),
            "refusals": dict(self.metrics.refusals),
            "waiting_for": sorted(self.waits_for()),
            "deadline": measured_deadline(self),
            "absent": sorted(self.neighbours.absent),
            "overdrawn": sorted(self.debtors()),
            "problems": self._problems(),
            "amendments": self.changes.describe(),
            "certificate": self.ctx.identity.refresh().describe_end(),
        }
