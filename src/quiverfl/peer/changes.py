"""Joint decisions of members: evictions, and changes of a run under way.

A member signs what it wants, and peers pass signed statements on with every greeting, so that an
absent member learns of them. A majority of the other members evicts a store; a change of the run
needs all members. One member alone, or a forger, changes nothing in the records of other members.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.accounts.signing import check_statement, sign_statement
from quiverfl.peer.accounts.store import Store
from quiverfl.peer.link.identity import Identity
from quiverfl.peer.link.roster import Roster
from quiverfl.peer.link.wire import Amendment, Eviction, EvictionNotice, Statement, Terms, encode

if TYPE_CHECKING:
    from quiverfl.peer.context import PeerContext
    from quiverfl.peer.link.neighbours import Neighbours

MAX_STATEMENTS = 64
"""The most statements of one member that a log accepts."""

Rule = Callable[[Any, set[str], set[str]], bool]
"""(decision, who has signed it, members) → whether it holds."""


def majority_of_others(eviction: Eviction, signers: set[str], members: set[str]) -> bool:
    """More than half of the members apart from the one that is evicted."""
    return len(signers & (members - {eviction.about})) > (len(members) - 1) // 2


def unanimity(terms: Terms, signers: set[str], members: set[str]) -> bool:
    return members <= signers


class SignedLog(Generic[Statement]):
    """All statements of one kind that this peer knows, its own included."""

    def __init__(
        self, kind: type[Statement], rule: Rule, agreement: str, bodies: Iterable[str] = ()
    ) -> None:
        self.kind: type[Statement] = kind
        self._rule, self._agreement = rule, agreement
        self._statements: list[Statement] = []
        self._contents: dict[str, set[str]] = {}  # by author
        self.hash = ""
        """A hash that two peers share if they know the same statements; empty without any."""
        for body in bodies:
            self._append(kind.model_validate_json(body))
        self._refresh_hash()

    def _append(self, statement: Statement) -> None:
        self._statements.append(statement)
        self._contents.setdefault(statement.by, set()).add(statement.content)

    def _refresh_hash(self) -> None:
        contents = sorted(text for author in self._contents.values() for text in author)
        if contents:
            self.hash = hashlib.sha256("\n".join(contents).encode()).hexdigest()

    def statements(self) -> list[Statement]:
        """All of them, in the order in which they came."""
        return list(self._statements)

    def pick_news(self, statements: Iterable[Statement], roster: Roster) -> list[Statement]:
        """Pick those that `add` would accept. Changes nothing, so it may run in any thread."""
        return [one for one in statements if self._is_acceptable(one, roster)]

    def _is_acceptable(self, statement: Statement, roster: Roster) -> bool:
        known = self._contents.get(statement.by, set())
        if statement.content in known or len(known) >= MAX_STATEMENTS:
            return False
        return check_statement(roster, self._agreement, statement)

    def add(self, statement: Statement, roster: Roster) -> str:
        """Accept a statement that its author has signed. Returns its text if it is news."""
        if not self._is_acceptable(statement, roster):
            return ""
        self._append(statement)
        self._refresh_hash()
        return encode(statement).decode()

    def votes(self) -> dict[Any, set[str]]:
        """Every decision with at least one signature, in order, and its signers."""
        votes: dict[Any, set[str]] = {}
        for statement in self._statements:
            for decision in statement.decisions:
                votes.setdefault(decision, set()).add(statement.by)
        return {decision: votes[decision] for decision in sorted(votes)}

    def decisions(self, members: Iterable[str]) -> list[Any]:
        """The decisions that hold by the rule of this log."""
        present = set(members)
        return [d for d, signers in self.votes().items() if self._rule(d, signers, present)]


def open_eviction_log(agreement: str, bodies: Iterable[str] = ()) -> SignedLog[EvictionNotice]:
    return SignedLog(EvictionNotice, majority_of_others, agreement, bodies)


def open_amendment_log(agreement: str, bodies: Iterable[str] = ()) -> SignedLog[Amendment]:
    return SignedLog(Amendment, unanimity, agreement, bodies)


def check_terms(terms: Terms, round: int, is_begun: bool, rounds: int) -> None:
    """Refuse terms that come too late. `begun`: this peer has trained in the round and pushed."""
    if terms.rounds is None and terms.lr is None and not terms.joins:
        raise QuiverError("amend: nothing is to change; give --rounds, --lr or --join.")
    if terms.since < round + is_begun:
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


def check_joins(terms: Terms, decided: list[Terms], names: list[str], founders: int) -> None:
    """Refuse members that are not the next ones of the roster."""
    if not terms.joins:
        return
    known = {name for one in decided for name in one.joins}
    first = founders + len(known - set(terms.joins))
    following = tuple(names[first : first + len(terms.joins)])
    if terms.joins != following:
        raise QuiverError(
            f"amend: {', '.join(terms.joins)} cannot join: the next of the roster after its first "
            f"{first} is {', '.join(names[first:]) or 'nobody'}; copy the newest roster.toml here, "
            "and name them in its order."
        )
    latest = max((one.since for one in decided if one.joins), default=0)
    if terms.since < latest:
        raise QuiverError(
            f"amend: others join in round {latest}: let --since be {latest} or later."
        )


def granted_terms(
    amendments: Iterable[Amendment], name: str, agreement: str, roster: Roster, founders: int
) -> list[Terms]:
    """The changes that a newcomer finds agreed: most of the members of their time have signed them.

    It cannot know who has left since, so it asks for no more. Whoever joined after a change has not
    signed it.
    """
    log = open_amendment_log(agreement)
    for amendment in amendments:
        log.add(amendment, roster)
    names, last = roster.names, max(founders, roster.number(name))

    def is_agreed(terms: Terms, signers: set[str]) -> bool:
        sizes = list(range(founders, last + 1))  # that the run may have had then
        if terms.joins and terms.joins[0] in names:
            sizes = [max(founders, names.index(terms.joins[0]))]
        return any(2 * len(signers & set(names[:size])) > size for size in sizes)

    agreed = sorted(terms for terms, by in log.votes().items() if is_agreed(terms, by))
    if not any(name in terms.joins for terms in agreed):
        raise QuiverError(
            f"the others have not agreed yet that {name!r} joins: each runs quiver peer amend "
            f"FOLDER --since ROUND --join {name}, with the newest roster.toml in its folder."
        )
    return agreed


def amend_offline(
    store_folder: Path, roster: Roster, identity: Identity, terms: Terms, rounds: int, founders: int
) -> None:
    """Sign a change in the store of a peer that is not running."""
    store = Store.open(store_folder)
    try:
        accounts, agreement = store.accounts(), store.meta("agreement")
        agreed_rounds = [t.rounds for t in store.terms() if t.rounds is not None]
        last = agreed_rounds[-1] if agreed_rounds else rounds
        check_terms(terms, accounts.round, accounts.pushed, last)
        check_joins(terms, store.terms(), roster.names, founders)
        log = open_amendment_log(agreement, store.statements(Amendment.table))
        amendment = Amendment(by=accounts.name, terms=terms)
        if body := log.add(sign_statement(identity, agreement, amendment), roster):
            store.add_statement(Amendment.table, body)
    finally:
        store.close()


class RunChanges:
    """The run as run.toml begins it, and the changes that every member has signed since."""

    def __init__(
        self, ctx: PeerContext, rounds: int, neighbours: Neighbours, founders: int
    ) -> None:
        self._ctx, self._first_rounds, self._neighbours = ctx, rounds, neighbours
        self._founders = founders
        self._terms = ctx.store.terms()
        self._expired: set[Terms] = set()

    def rounds(self, round: int) -> int:
        """The number of rounds in all, as of this one."""
        changes = [t.rounds for t in self._terms if t.since <= round and t.rounds is not None]
        return changes[-1] if changes else self._first_rounds

    def rate(self, round: int) -> float | None:
        """The learning rate as of this round; None if it never changed."""
        changes = [t.lr for t in self._terms if t.since <= round and t.lr is not None]
        return changes[-1] if changes else None

    def members(self, round: int) -> int:
        """Number of members, from the beginning of the roster, that take part in a round."""
        joined = {name for t in self._terms if t.since <= round for name in t.joins}
        return self._founders + len(joined)

    def growth(self) -> list[int]:
        """The rounds from which on there are more members."""
        return sorted({terms.since for terms in self._terms if terms.joins})

    def opening(self, peer: str) -> int:
        """The units of mass that a member has begun with; 0 until all agree that it joins."""
        grants = [terms.grant for terms in self._terms if peer in terms.joins]
        if grants:
            return grants[0]
        return UNIT if self._ctx.roster.current.number(peer) < self._founders else 0

    def _missing(self) -> dict[Terms, set[str]]:
        """Terms that are not agreed yet, in order, and the members that have not signed them.

        Members that join later never sign what was agreed before.
        """
        members = self._members()
        votes = self._neighbours.amendments.votes()
        return {t: members - signers for t, signers in votes.items() if t not in self._terms}

    def _members(self) -> set[str]:
        round = self._ctx.transactions.accounts.round
        number = self._ctx.roster.current.number(self._ctx.name)
        own = {self._ctx.name} if number < self.members(round) else set()
        return self._neighbours.list_staying() | own

    def list_missing_signers(self, round: int) -> set[str]:
        """Members that have not signed yet what this peer has signed for this round or before."""
        return {
            peer
            for terms, missing in self._missing().items()
            if terms.since <= round and self._ctx.name not in missing
            if terms not in self._expired
            for peer in missing
        }

    def stop_waiting(self, round: int) -> None:
        """Go on without the missing signatures. Should they come, the change holds from then on."""
        for terms, missing in self._missing().items():
            if missing and terms.since <= round and terms not in self._expired:
                self._expired.add(terms)
                lacking = sorted(missing)
                self._ctx.log.alarm("not agreed in time", terms=str(terms), lacking=lacking)

    async def apply_decided(self, round: int) -> None:
        """Save the changes that all members have signed. Later members do not undo them."""
        decided = self._neighbours.amendments.decisions(self._members())
        news = [terms for terms in decided if terms not in self._terms]
        if not news:
            return
        self._terms = sorted([*self._terms, *news])
        await asyncio.to_thread(self._ctx.store.save_terms, self._terms)
        for terms in news:
            late = {"late": round - terms.since} if terms.since < round else {}
            self._ctx.log("agreed", terms=str(terms), **late)

    async def propose(self, terms: Terms, round: int, is_begun: bool = True) -> None:
        """Sign these terms for this member, unless they come too late."""
        check_terms(terms, round, is_begun, self.rounds(round))
        check_joins(terms, self._terms, self._ctx.roster.refresh().names, self._founders)
        await self._neighbours.sign(
            self._neighbours.amendments, Amendment(by=self._ctx.name, terms=terms)
        )

    def describe(self) -> list[str]:
        """Say for `status` what was changed, and whose signatures are missing for what."""
        lines = [f"{terms} (agreed)" for terms in self._terms]
        for terms, missing in self._missing().items():
            if missing:
                lines.append(f"{terms} (not yet by {', '.join(sorted(missing))})")
        return lines
