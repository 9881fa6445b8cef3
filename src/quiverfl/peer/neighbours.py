"""All the others: a courier for each, and who is absent, finished or leaving."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quiverfl.errors import QuiverError
from quiverfl.peer.books import Books
from quiverfl.peer.courier import Courier, RestoredBackup, Unreachable
from quiverfl.peer.identity import Identity
from quiverfl.peer.ledger import free
from quiverfl.peer.roster import LiveRoster
from quiverfl.peer.store import Store, Trace
from quiverfl.peer.tally import Log, Tally
from quiverfl.peer.terms import Limits, Terms, older_than_remembered
from quiverfl.peer.wire import PROTOCOL, Hello


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
        books: Books,
        store: Store,
        keys: Path,
        terms: Terms,
        limits: Limits,
        condition: Condition,
        *,
        trust_store: bool,
        tally: Tally,
        log: Log,
        trace: Trace,
        changed: Callable[[], None],
    ) -> None:
        self._books, self._terms, self._condition = books, terms, condition
        self._incarnation = store.meta("incarnation")
        self._trust_store, self._changed = trust_store, changed
        self.absent: set[str] = set()  # missed a deadline and not heard since: not waited for
        self.done: set[str] = set()  # have finished and delivered everything
        self.couriers = {
            peer: Courier(
                peer,
                books=books,
                terms=terms,
                limits=limits,
                roster=roster,
                identity=lambda: Identity.read(keys),
                incarnation=self._incarnation,
                payload=store.payload,
                compose=self.hello,
                on_greeting=self.met,
                tally=tally,
                log=log,
                trace=trace,
            )
            for peer in roster.current.names
            if peer != terms.name
        }

    def hello(self, peer: str) -> Hello:
        link = self._books.accounts.link(peer)
        return Hello(
            protocol=PROTOCOL,
            run=self._terms.run,
            configuration=self._terms.configuration,
            manifest=self._terms.manifest.hash,
            sender=self._terms.name,
            receiver=peer,
            incarnation=self._incarnation,
            nonce=secrets.token_hex(32),
            sent=link.sent,
            acknowledged=link.sent - (1 if link.outbox else 0),
            received=link.received,
            leaving=self._condition.leaving,
            finished=self._condition.finished(),
        )

    async def met(self, hello: Hello) -> None:
        """A neighbour has spoken, as caller or as called."""
        if hello.sender not in self.couriers:
            raise QuiverError(f"{hello.sender!r} was not in the roster when this peer started.")
        await self._books.meet(hello.sender, hello.incarnation)
        link = self._books.accounts.link(hello.sender)
        problem = older_than_remembered(self._terms.name, link, hello)
        if problem and not self._trust_store:
            raise RestoredBackup(problem)
        self.absent.discard(hello.sender)
        if hello.leaving:
            await self._books.part_from(hello.sender)
        (self.done.add if hello.finished else self.done.discard)(hello.sender)
        self.couriers[hello.sender].wake()
        self._changed()

    async def tell(self, to: set[str]) -> set[str]:
        """Say hello, with news of oneself; who has heard it."""

        async def one(courier: Courier) -> str | None:
            try:
                await courier.hello(timeout=2.0)
            except Unreachable:
                return None
            return courier.peer

        heard = await asyncio.gather(*(one(self.couriers[peer]) for peer in sorted(to)))
        return {peer for peer in heard if peer}

    def outside(self) -> set[str]:
        """Those that no share is expected from, and none is sent to."""
        links = self._books.accounts.links
        return {peer for peer, link in links.items() if link.gone or link.closed}

    def free(self, peer: str) -> bool:
        return free(self._books.accounts, peer)

    def staying(self) -> set[str]:
        return set(self.couriers) - self.outside()

    def refunding(self) -> list[Courier]:
        return [courier for courier in self.couriers.values() if courier.refund is not None]
