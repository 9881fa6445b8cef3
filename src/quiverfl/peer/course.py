"""The course of a run: how long it goes on and how fast it learns, as agreed so far."""

from __future__ import annotations

import asyncio
from pathlib import Path

from quiverfl.errors import QuiverError
from quiverfl.peer import signing
from quiverfl.peer.amendments import Amendments, sentence
from quiverfl.peer.identity import Identity
from quiverfl.peer.metrics import Log
from quiverfl.peer.neighbours import Neighbours
from quiverfl.peer.roster import Roster
from quiverfl.peer.store import Store
from quiverfl.peer.wire import Amendment, Terms, encode


def check_terms(terms: Terms, round: int, begun: bool, rounds: int) -> None:
    """Refuse what cannot be kept to any more. `begun`: the round has trained and pushed."""
    if terms.rounds is None and terms.lr is None:
        raise QuiverError("amend: nothing is to change; give --rounds or --lr.")
    if terms.since < round + begun:
        raise QuiverError(
            f"amend: round {terms.since} has begun here (it is {round} now): let the change "
            f"begin later, so that all can agree before, such as --since {round + 10}."
        )
    if terms.rounds is not None and terms.rounds < terms.since:
        raise QuiverError(f"amend: {terms.rounds} rounds would be over before round {terms.since}.")
    if terms.since > rounds:
        raise QuiverError(
            f"amend: the run ends after {rounds} rounds; --since {rounds} is the latest that can "
            "be agreed on."
        )


def amend_at_rest(path: Path, roster: Roster, papers: Identity, terms: Terms, rounds: int) -> None:
    """The same in the store of a peer that is not running."""
    store = Store.open(path)
    try:
        accounts, agreement = store.accounts(), store.meta("agreement")
        longer = [t.rounds for t in store.terms() if t.rounds is not None]
        last = longer[-1] if longer else rounds
        check_terms(terms, accounts.round, accounts.pushed, last)
        known = Amendments(agreement, store.amendments())
        mine = Amendment(by=accounts.name, terms=terms)
        body = known.add(signing.amendment(papers, agreement, mine), roster)
        if body is not None:
            store.note_amendment(body)
    finally:
        store.close()


class Course:
    """What run.toml says, and the amendments that every member has signed since."""

    def __init__(
        self, me: str, rounds: int, neighbours: Neighbours, store: Store, log: Log
    ) -> None:
        self._me, self._founded = me, rounds
        self._neighbours, self._store, self._log = neighbours, store, log
        self._terms = store.terms()
        self._given_up: set[bytes] = set()

    def _members(self) -> set[str]:
        return self._neighbours.staying() | {self._me}

    def rounds(self, round: int) -> int:
        """How many there are in all, as of this one."""
        found = [t.rounds for t in self._terms if t.since <= round and t.rounds is not None]
        return found[-1] if found else self._founded

    def rate(self, round: int) -> float | None:
        """The learning rate from now on; None while it is as it was founded."""
        found = [t.lr for t in self._terms if t.since <= round and t.lr is not None]
        return found[-1] if found else None

    def awaited(self, round: int) -> set[str]:
        """Who has not agreed yet to what this peer has agreed to, from this round on."""
        return {
            peer
            for terms, missing in self._neighbours.amendments.lacking(self._members())
            if terms.since <= round and self._me not in missing
            if encode(terms) not in self._given_up
            for peer in missing
        }

    def give_up(self, round: int) -> None:
        """Go on without those who have not agreed; should they do so later, it holds from then."""
        for terms, missing in self._neighbours.amendments.lacking(self._members()):
            if missing and terms.since <= round and encode(terms) not in self._given_up:
                self._given_up.add(encode(terms))
                lacking = sorted(missing)
                self._log.alarm("not agreed in time", terms=sentence(terms), lacking=lacking)

    async def heed(self, round: int) -> None:
        """Keep what everybody has agreed to by now: it stays so, whoever comes or goes."""
        decided = self._neighbours.amendments.decided(self._members())
        news = [terms for terms in decided if terms not in self._terms]
        if not news:
            return
        self._terms = sorted([*self._terms, *news], key=lambda t: (t.since, encode(t)))
        await asyncio.to_thread(self._store.note_terms, self._terms)
        for terms in news:
            late = {"late": round - terms.since} if terms.since < round else {}
            self._log("agreed", terms=sentence(terms), **late)

    async def propose(self, terms: Terms, round: int, begun: bool = True) -> None:
        """Sign these terms for this member, if they can still be kept to."""
        check_terms(terms, round, begun, self.rounds(round))
        await self._neighbours.agree(terms)

    def told(self) -> list[str]:
        """For `status`: what was changed, and who has yet to agree to what."""
        lines = [f"{sentence(terms)} (agreed)" for terms in self._terms]
        for terms, missing in self._neighbours.amendments.lacking(self._members()):
            if missing and terms not in self._terms:
                lines.append(f"{sentence(terms)} (not yet by {', '.join(sorted(missing))})")
        return lines
