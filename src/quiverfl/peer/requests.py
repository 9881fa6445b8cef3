"""What a peer answers when it is called: greetings, shares, its model, its owner's orders."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from quiverfl.errors import QuiverError
from quiverfl.peer.agreement import Agreement
from quiverfl.peer.connection import Line, RestoredBackup
from quiverfl.peer.contact import signed_text
from quiverfl.peer.identity import LiveIdentity
from quiverfl.peer.ledger import UNIT
from quiverfl.peer.metrics import Log, PeerMetrics
from quiverfl.peer.neighbours import Neighbours
from quiverfl.peer.offering import Offering
from quiverfl.peer.receiver import Receiver
from quiverfl.peer.transactions import Transactions
from quiverfl.peer.wire import AmendmentList, Greeting, Hello, Join, NoticeList, Order, Reply, Terms


class RequestHandler:
    """The other end of the service's methods."""

    def __init__(
        self,
        agreement: Agreement,
        identity: LiveIdentity,
        transactions: Transactions,
        receiver: Receiver,
        neighbours: Neighbours,
        offering: Offering,
        metrics: PeerMetrics,
        log: Log,
        *,
        status: Callable[[], dict[str, Any]],
        stop: Callable[[], None],
        leave: Callable[[], None],
        amend: Callable[[Terms], Awaitable[None]],
        fail: Callable[[QuiverError], None],
    ) -> None:
        self.name = agreement.name
        self._agreement, self._identity, self._transactions, self._receiver = (
            agreement,
            identity,
            transactions,
            receiver,
        )
        self._neighbours, self._offering = neighbours, offering
        self._metrics, self._log = metrics, log
        self._status, self._stop, self._leave, self._fail = status, stop, leave, fail
        self._amend = amend

    async def greet(self, sender: str, hello: Hello) -> Greeting:
        refusal = await self._refusal(sender, hello)
        if refusal:
            self._metrics.refused("hello")
            self._log.alarm("hello refused", sender=sender, reason=refusal)
            return Greeting(refusal=refusal[:1000])
        mine = self._neighbours.answer(hello)
        identity = self._identity.refresh()
        return Greeting(
            hello=mine,
            certificate=identity.certificate.decode(),
            signature=identity.sign(signed_text(hello, mine)),
        )

    async def _refusal(self, sender: str, hello: Hello) -> str:
        if (sender, self.name) != (hello.sender, hello.receiver):
            return f"{sender!r} called {self.name!r}, its words are from {hello.sender!r}."
        difference = self._agreement.difference(hello)
        if difference:
            return difference
        try:
            await self._neighbours.met(hello)
        except RestoredBackup as problem:
            self._fail(problem)
            return str(problem)
        except QuiverError as problem:
            return str(problem)
        return ""

    def receive(
        self,
        sender: str,
        frames: AsyncIterator[bytes],
        answer: Callable[[Reply], Awaitable[None]],
    ) -> Awaitable[None]:
        return self._receiver.push(sender, frames, answer)

    def offer(
        self, sender: str, join: Join, send: Callable[[bytes], Awaitable[None]]
    ) -> Awaitable[None]:
        return self._offering.serve(sender, join, self._identity.refresh(), send)

    def notices(self) -> NoticeList:
        return self._neighbours.notices.everything()

    def amendments(self) -> AmendmentList:
        return self._neighbours.amendments.everything()

    async def collect(self, sender: str, line: Line) -> None:
        """A neighbour that cannot be called has opened a line to fetch its shares."""
        if sender not in self._neighbours.senders:
            raise QuiverError(f"{sender!r} was not in the roster when this peer started.")
        await self._neighbours.senders[sender].lend(line)

    async def obey(self, order: Order) -> dict[str, Any]:
        if order.action != "status":
            self._log("order", action=order.action, about=order.peer)
        if order.action == "stop":
            self._stop()
        elif order.action == "leave":
            self._leave()
        elif order.action == "evict":
            return await self._evict(order.peer, order.ban)
        elif order.action == "amend":
            if order.terms is None:
                raise QuiverError("amend: say what is to change, and from which round on.")
            await self._amend(order.terms)
        return self._status()

    async def _evict(self, peer: str | None, ban: bool) -> dict[str, Any]:
        if peer is None or peer not in self._neighbours.senders:
            raise QuiverError(f"evict {peer!r}: name another member of the roster.")
        lost = await self._neighbours.evict(peer, ban)
        return {"evicted": peer, "written_off": lost / UNIT}
