"""All the others: a sender for each, and who is absent, finished or leaving."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from quiverfl.errors import QuiverError
from quiverfl.peer import signing
from quiverfl.peer.agreement import Agreement, Limits, older_than_remembered
from quiverfl.peer.amendments import Amendments, sentence
from quiverfl.peer.connection import RestoredBackup, Unreachable
from quiverfl.peer.contact import Contact
from quiverfl.peer.identity import LiveIdentity
from quiverfl.peer.ledger import UNIT, Link, free
from quiverfl.peer.metrics import Log, PeerMetrics
from quiverfl.peer.notices import Notices
from quiverfl.peer.roster import LiveRoster
from quiverfl.peer.sender import Sender
from quiverfl.peer.store import Store, Trace
from quiverfl.peer.transactions import Transactions
from quiverfl.peer.wire import CLOCKS, Amendment, Clock, Hello, Notice, Terms

AMENDED = 3
"""The version of the protocol that knows of amendments."""


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
        forget: Callable[[str], None],
        fail: Callable[[QuiverError], None],
    ) -> None:
        self._transactions, self._agreement, self._condition = transactions, agreement, condition
        self._incarnation = store.meta("incarnation")
        self._trust_store, self._hear = trust_store, hear
        self._roster, self._identity, self._log = roster, identity, log
        self.absent: set[str] = set()  # missed a deadline and not in step since: not waited for
        self.clogged: set[str] = set()  # have not acknowledged in time: not waited for either
        self.notices = Notices(agreement.hash, store.notices())
        self.amendments = Amendments(agreement.hash, store.amendments())
        self._informed: dict[str, tuple[bool, bool]] = {}  # who called, and what it was told of us
        self._store, self._forget, self._fail = store, forget, fail
        self._learning: set[asyncio.Task[None]] = set()
        self.greeted: set[str] = set()  # since this process has started
        self.done: set[str] = set()  # have finished and delivered everything
        self.ahead = False
        """Whether a round counts as over for the others once this peer has pushed: where a
        neighbour cannot know whether anything comes from it, until it says so."""
        self._promised: dict[str, int] = {}  # seq of the last share that each says it has for us
        self.senders = {
            peer: Sender(
                Contact(
                    peer,
                    agreement=agreement,
                    limits=limits,
                    roster=roster,
                    identity=identity.refresh,
                    compose=self.hello,
                    on_greeting=self.met,
                    on_refusal=lambda peer: self._later(self._learn(peer)),
                    metrics=metrics,
                    log=log,
                ),
                transactions=transactions,
                agreement=agreement,
                limits=limits,
                roster=roster,
                identity=identity.refresh,
                incarnation=self._incarnation,
                payload=store.payload,
                size=store.payload_size,
                vouchers=store.vouchers,
                clocks=lambda peer: self.clocks(peer, 8),
                metrics=metrics,
                log=log,
                trace=trace,
            )
            for peer in roster.current.names
            if peer != agreement.name
        }

    def hello(self, peer: str, protocol: int) -> Hello:
        accounts = self._transactions.accounts
        link = accounts.link(peer)
        link = Link() if link.gone else link  # whoever comes back there has another store
        return Hello(
            protocol=protocol,
            run=self._agreement.run,
            configuration=self._agreement.configuration,
            manifest=self._agreement.manifest.hash,
            sender=self._agreement.name,
            receiver=peer,
            incarnation=self._incarnation,
            towards=link.incarnation,
            nonce=secrets.token_hex(32),
            sent=link.sent,
            acknowledged=link.sent - (1 if link.outbox else 0),
            received=link.received,
            round=accounts.round + int(self.ahead and accounts.pushed),
            clocks=self.clocks(peer, CLOCKS),
            notices=self.notices.hash,
            leaving=self._condition.leaving,
            finished=self._condition.finished(),
            amendments=self.amendments.hash,
        )

    def answer(self, hello: Hello) -> Hello:
        """What a caller is told in turn: it may be one that cannot be called itself."""
        mine = self.hello(hello.sender, hello.protocol)
        self._informed[hello.sender] = (mine.leaving, mine.finished)
        return mine

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
        if hello.protocol < AMENDED and (terms := self._store.terms()):
            raise QuiverError(
                f"the run was changed ({'; '.join(sentence(t) for t in terms)}), of which protocol "
                f"{hello.protocol} knows nothing: install the newest quiverfl on {hello.sender!r} "
                f"and {self._agreement.name!r}."
            )
        if hello.towards not in ("", self._incarnation):
            raise QuiverError(
                f"{hello.sender!r} remembers another store of {self._agreement.name!r}: it has not "
                "heard yet that that one was evicted."
            )
        await self._transactions.meet(hello.sender, hello.incarnation)
        accounts, shown = self._transactions.accounts, self._own_pushes(hello)
        problem = older_than_remembered(self._agreement.name, shown, accounts, hello)
        if problem and not self._trust_store:
            raise RestoredBackup(problem)
        self._transactions.witness(hello.clocks, self.genuine)
        if hello.notices and hello.notices != self.notices.hash:
            self._later(self._learn(hello.sender))
        if hello.amendments and hello.amendments != self.amendments.hash:
            self._later(self._learn_amendments(hello.sender))
        self.greeted.add(hello.sender)
        if hello.leaving:
            await self._transactions.part_from(hello.sender)
        (self.done.add if hello.finished else self.done.discard)(hello.sender)
        self.senders[hello.sender].wake()
        self._promised[hello.sender] = hello.sent
        self._hear(hello.sender, hello.round)

    def delivered(self, peer: str, staged: int) -> bool:
        """Whether all that a neighbour has spoken of is here; `staged` is the last that came."""
        received = self._transactions.accounts.link(peer).received
        return self._promised.get(peer, 0) <= max(received, staged)

    # Changes of the run: each member signs the same terms, and all tell each other

    async def _learn_amendments(self, peer: str) -> None:
        for amendment in await self.senders[peer].contact.amendments():
            await self._keep(amendment)

    async def _keep(self, amendment: Amendment) -> bool:
        body = self.amendments.add(amendment, self._roster.refresh())
        if body is not None:
            await asyncio.to_thread(self._store.note_amendment, body)
            self._log("amendment", by=amendment.by, terms=sentence(amendment.terms))
        return body is not None

    async def agree(self, terms: Terms) -> None:
        """This member's word on a change, for the others to hear."""
        mine = Amendment(by=self._agreement.name, terms=terms)
        papers = self._identity.refresh()
        if await self._keep(signing.amendment(papers, self._agreement.hash, mine)):
            self._later(self._spread())

    # Evictions: each member signs its own, and all tell each other

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._learning.add(task)
        task.add_done_callback(self._learning.discard)

    async def settled(self) -> None:
        """Until everything that greetings have promised was heard."""
        while self._learning:
            await asyncio.gather(*self._learning)

    async def _learn(self, peer: str) -> None:
        for notice in await self.senders[peer].contact.notices():
            body = self.notices.add(notice, self._roster.refresh())
            if body is not None:
                await asyncio.to_thread(self._store.note_notice, body)
                self._log("notice", by=notice.by, about=notice.about, store=notice.store)
        await self._heed()

    async def _heed(self) -> None:
        """Do here what most others have done."""
        for about, store, ban in self.notices.decided(self._roster.refresh().names):
            if (about, store) == (self._agreement.name, self._incarnation):
                self._fail(
                    QuiverError(
                        f"most others have evicted this store of {about!r}: "
                        + ("it was banned." if ban else "let it join again with a new one.")
                    )
                )
                continue
            link = self._transactions.accounts.link(about)
            if link.incarnation == store and (not link.gone or (ban and not link.banned)):
                await self.evict(about, ban)

    async def evict(self, peer: str, ban: bool) -> int:
        """Stop dealing with a peer, and tell the others in this peer's own hand."""
        store = self._transactions.accounts.link(peer).incarnation
        lost = await self._transactions.evict(peer, ban)
        self._forget(peer)
        self.senders[peer].refund = None
        self._log.alarm("evicted", about=peer, written_off=lost / UNIT)
        if store:
            await self._announce(Notice(by=self._agreement.name, about=peer, store=store, ban=ban))
        return lost

    async def sign_evictions(self) -> None:
        """Of what was evicted here while the peer did not run."""
        for peer, link in self._transactions.accounts.links.items():
            if link.gone and link.incarnation:
                me = self._agreement.name
                notice = Notice(by=me, about=peer, store=link.incarnation, ban=link.banned)
                await self._announce(notice)

    async def _announce(self, notice: Notice) -> None:
        signed = signing.notice(self._identity.refresh(), self._agreement.hash, notice)
        body = self.notices.add(signed, self._roster.refresh())
        if body is not None:
            await asyncio.to_thread(self._store.note_notice, body)
            self._later(self._spread())

    async def _spread(self) -> None:
        await self.tell(self.staying())

    async def tell(self, to: set[str]) -> set[str]:
        """Say hello, with news of oneself; who has heard it."""

        current = (self._condition.leaving, self._condition.finished())

        async def one(sender: Sender) -> str | None:
            if self._dials_out(sender.peer):  # it has heard if it has called since
                return sender.peer if self._informed.get(sender.peer) == current else None
            try:
                await sender.contact.hello(timeout=2.0)
            except Unreachable:
                return None
            return sender.peer

        heard = await asyncio.gather(*(one(self.senders[peer]) for peer in sorted(to)))
        return {peer for peer in heard if peer}

    def outside(self) -> set[str]:
        """Those that no share is expected from, and none is sent to."""
        links = self._transactions.accounts.links
        gone = {peer for peer, link in links.items() if link.gone or link.closed}
        return gone | {peer for peer in self.senders if self._severed(peer)}

    def _dials_out(self, peer: str) -> bool:
        return self._roster.current.member(peer).dials_out

    def _severed(self, peer: str) -> bool:
        """Of two that only dial out, neither can reach the other: their mass goes by the rest."""
        return self._dials_out(peer) and self._dials_out(self._agreement.name)

    def free(self, peer: str) -> bool:
        return not self._severed(peer) and free(self._transactions.accounts, peer)

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
