"""A running peer: the life of its process, and what can be seen of it."""

from __future__ import annotations

import asyncio
from typing import Any

from quiverfl.errors import QuiverError
from quiverfl.peer import ledger
from quiverfl.peer.collector import Collector
from quiverfl.peer.descriptors import acceptable_connections
from quiverfl.peer.ending import end
from quiverfl.peer.metrics import Sample, serve_metrics
from quiverfl.peer.participant import Participant
from quiverfl.peer.peer_rounds import run_rounds
from quiverfl.peer.peer_settings import Outcome
from quiverfl.peer.requests import RequestHandler
from quiverfl.peer.sender import Sender
from quiverfl.peer.service import PeerService, Server
from quiverfl.peer.wire import Terms


class Node(Participant):
    """One peer as a process. `run` returns when it has finished, left, or was asked to stop."""

    async def run(self) -> Outcome:
        server = Server(
            self.settings.bind,
            self.keys,
            self._service(),
            self.limits.keepalive_seconds,
            acceptable_connections(len(self.names)),
        )
        endpoint = None
        if self.settings.metrics:
            endpoint = serve_metrics(self.settings.metrics, self.metrics, self.samples)
        await server.start()
        senders = self.neighbours.senders.values()
        couriers: list[Sender | Collector] = [*senders, *self._collectors()]
        tasks = [asyncio.create_task(courier.run()) for courier in couriers]
        for task in tasks:
            task.add_done_callback(self._sender_ended)
        self.log("started", round=self.transactions.accounts.round, port=server.port)
        try:
            await self.neighbours.sign_evictions()
            await self.neighbours.tell(set(self.neighbours.senders))
            await self.neighbours.settled()
            await self.restore()
            while True:
                await run_rounds(self)
                await end(self)
                if self.stopping or self.condition.leaving or self.over():
                    break
        finally:
            self.state = "stopping"
            await self.neighbours.settled()
            await asyncio.gather(*(sender.close() for sender in senders))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.stop(0.5)
            await self.transactions.settle()
            self.thread.shutdown()
            if endpoint is not None:
                endpoint.shutdown()
        if self.broken is not None:
            raise self.broken
        return self._outcome()

    def _collectors(self) -> list[Collector]:
        """A peer that only dials out fetches what those have for it whom it can call."""
        members = self._roster.current
        if not members.member(self.agreement.name).dials_out:
            return []
        return [
            Collector(sender.contact, self.receiver, self.limits, self.metrics, self.log)
            for peer, sender in self.neighbours.senders.items()
            if not members.member(peer).dials_out
        ]

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
            fail=self.fail,
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

    def _sender_ended(self, task: asyncio.Task[None]) -> None:
        problem = None if task.cancelled() else task.exception()
        if isinstance(problem, QuiverError):
            self.fail(problem)
        elif problem is not None:
            self.fail(QuiverError(f"a courier failed: {problem!r}"))

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
            "overdrawn": len(self.overdrawn()),
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
            "overdrawn": sorted(self.overdrawn()),
            "problems": self._problems(),
            "amendments": self.course.told(),
        }
