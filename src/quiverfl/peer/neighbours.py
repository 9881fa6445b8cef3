"""All the others: a sender for each, and who is absent, finished or leaving."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from quiverfl.errors import QuiverError
from quiverfl.peer import signing
from quiverfl.peer.agreement import Agreement, Limits, older_than_remembered
from quiverfl.peer.identity import LiveIdentity
from quiverfl.peer.ledger import free
from quiverfl.peer.metrics import Log, PeerMetrics
from quiverfl.peer.roster import LiveRoster
from quiverfl.peer.sender import RestoredBackup, Sender, Unreachable
from quiverfl.peer.store import Store, Trace
from quiverfl.peer.transactions import Transactions
from quiverfl.peer.wire import CLOCKS, PROTOCOL, Clock, Hello


@dataclass
class Condition:
    """What this peer tells the others of itself."""

    leaving: bool = False
    finished: Callable[[], bool] = lambda: False


class Neighbours:
    """The members of the run except this peer."""

    def __init__(
        self,
        roster: LiveRoster,
        transactions: Transactions,
        store: Store,
        identity: LiveIdentity,
        agreement: Agreement,
        limits: Limits,
        condition: Condition,
        *,
        trust_store: bool,
        metrics: PeerMetrics,
        log: Log,
        trace: Trace,
        hear: Callable[[str, int], None],
    ) -> None:
        self._transactions, self._agreement, self._condition = transactions, agreement, condition
        self._incarnation = store.meta("incarnation")
        self._trust_store, self._hear = trust_store, hear
        self._roster, self._identity = roster, identity
        self.absent: set[str] = set()  # missed a deadline and not in step since: not waited for
        self.clogged: set[str] = set()  # have not acknowledged in time: not waited for either
        self.greeted: set[str] = set()  # since this process has started
        self.done: set[str] = set()  # have finished and delivered everything
        self.senders = {
            peer: Sender(
                peer,
                transactions=transactions,
                agreement=agreement,
                limits=limits,
                roster=roster,
                identity=identity.refresh,
                incarnation=self._incarnation,
                payload=store.payload,
                vouchers=store.vouchers,
                clocks=lambda peer: self.clocks(peer, 8),
                compose=self.hello,
                on_greeting=self.met,
                metrics=metrics,
                log=log,
                trace=trace,
            )
            for peer in roster.current.names
            if peer != agreement.name
        }

    def hello(self, peer: str) -> Hello:
        link = self._transactions.accounts.link(peer)
        return Hello(
            protocol=PROTOCOL,
            run=self._agreement.run,
            configuration=self._agreement.configuration,
            manifest=self._agreement.manifest.hash,
            sender=self._agreement.name,
            receiver=peer,
            incarnation=self._incarnation,
            nonce=secrets.token_hex(32),
            sent=link.sent,
            acknowledged=link.sent - (1 if link.outbox else 0),
            received=link.received,
            round=self._transactions.accounts.round,
            clocks=self.clocks(peer, CLOCKS),
            leaving=self._condition.leaving,
            finished=self._condition.finished(),
        )

    def clocks(self, towards: str, most: int) -> list[Clock]:
        """How far this peer, the one it talks to and some others have come."""
        transactions = self._transactions
        others = [peer for peer in transactions.accounts.links if peer != towards]
        chosen = [towards, *random.sample(others, min(len(others), most - 2))]
        known = [transactions.clock(peer) for peer in chosen]
        mine = signing.clock(
            self._identity.refresh(),
            self._agreement.hash,
            self._agreement.name,
            self._incarnation,
            transactions.accounts.pushes,
        )
        return [mine, *(clock for clock in known if clock is not None)]

    def genuine(self, clock: Clock) -> bool:
        return signing.clock_holds(self._roster.refresh(), self._agreement.hash, clock)

    def _own_pushes(self, hello: Hello) -> int:
        """What the neighbour has in this peer's own hand about this store."""
        mine = (self._agreement.name, self._incarnation)
        shown = [c for c in hello.clocks if (c.peer, c.store) == mine and self.genuine(c)]
        return max((clock.pushes for clock in shown), default=0)

    def quorum(self) -> int:
        """How many more to ask before this peer may spend from a store that has spent before.

        Half of those it deals with: each tells what it remembers and has heard of this peer.
        """
        if self._trust_store or not self._transactions.accounts.pushes:
            return 0
        staying = self.staying()
        return max(0, (len(staying) + 1) // 2 - len(staying & self.greeted))

    async def met(self, hello: Hello) -> None:
        """A neighbour has spoken, as caller or as called."""
        if hello.sender not in self.senders:
            raise QuiverError(f"{hello.sender!r} was not in the roster when this peer started.")
        await self._transactions.meet(hello.sender, hello.incarnation)
        accounts, shown = self._transactions.accounts, self._own_pushes(hello)
        problem = older_than_remembered(self._agreement.name, shown, accounts, hello)
        if problem and not self._trust_store:
            raise RestoredBackup(problem)
        self._transactions.witness(hello.clocks, self.genuine)
        self.greeted.add(hello.sender)
        if hello.leaving:
            await self._transactions.part_from(hello.sender)
        (self.done.add if hello.finished else self.done.discard)(hello.sender)
        self.senders[hello.sender].wake()
        self._hear(hello.sender, hello.round)

    async def tell(self, to: set[str]) -> set[str]:
        """Say hello, with news of oneself; who has heard it."""

        async def one(sender: Sender) -> str | None:
            try:
                await sender.hello(timeout=2.0)
            except Unreachable:
                return None
            return sender.peer

        heard = await asyncio.gather(*(one(self.senders[peer]) for peer in sorted(to)))
        return {peer for peer in heard if peer}

    def outside(self) -> set[str]:
        """Those that no share is expected from, and none is sent to."""
        links = self._transactions.accounts.links
        return {peer for peer, link in links.items() if link.gone or link.closed}

    def free(self, peer: str) -> bool:
        return free(self._transactions.accounts, peer)

    def waited_for(self, peers: set[str]) -> set[str]:
        """Of these, whose acknowledgement a round may wait for.

        Whoever let a deadline pass is waited for again once it has acknowledged: a member that
        never does costs one deadline, not one a round.
        """
        self.clogged = {peer for peer in self.clogged if not self.free(peer)}
        return peers - self.outside() - self.absent - self.clogged

    def staying(self) -> set[str]:
        return set(self.senders) - self.outside()

    def refunding(self) -> list[Sender]:
        return [sender for sender in self.senders.values() if sender.refund is not None]
