"""A run that goes on longer, or at another learning rate, because all members agree to it.

Each member signs the same terms; they are told on with every greeting, as evictions are. Once
everybody has signed they hold from their round on. One member alone changes nothing for anybody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from quiverfl.peer import signing
from quiverfl.peer.roster import Roster
from quiverfl.peer.wire import NOTICES, Amendment, AmendmentList, Terms, encode

EACH = 64
"""Amendments that are kept of one member."""


class Amendments:
    """All that this peer has heard, and its own."""

    def __init__(self, agreement: str, known: Iterable[str]) -> None:
        self._agreement = agreement
        self._known = {body: Amendment.model_validate_json(body) for body in known}

    @property
    def hash(self) -> str:
        """The same for two peers that have heard the same; empty if nothing."""
        if not self._known:
            return ""
        content = sorted(f"{a.by} {encode(a.terms).decode()}" for a in self._known.values())
        return hashlib.sha256("\n".join(content).encode()).hexdigest()

    def everything(self) -> AmendmentList:
        return AmendmentList(amendments=list(self._known.values())[-NOTICES:])

    def add(self, amendment: Amendment, roster: Roster) -> str | None:
        """Believe what its author has signed; how it is kept, if it is news."""
        theirs = [a.terms for a in self._known.values() if a.by == amendment.by]
        if amendment.terms in theirs or len(theirs) >= EACH:
            return None
        if not signing.amendment_holds(roster, self._agreement, amendment):
            return None
        body = encode(amendment).decode()
        self._known[body] = amendment
        return body

    def lacking(self, members: set[str]) -> Iterator[tuple[Terms, set[str]]]:
        """All terms that somebody has signed, in order, and who of these has not."""
        terms = {encode(a.terms): a.terms for a in self._known.values()}
        for body, found in sorted(terms.items(), key=lambda item: (item[1].since, item[0])):
            agreed = {a.by for a in self._known.values() if encode(a.terms) == body}
            yield found, members - agreed

    def decided(self, members: set[str]) -> list[Terms]:
        return [terms for terms, missing in self.lacking(members) if not missing]


def sentence(terms: Terms) -> str:
    """The terms for people."""
    parts = [f"rounds = {terms.rounds}"] if terms.rounds is not None else []
    parts += [f"lr = {terms.lr:g}"] if terms.lr is not None else []
    return f"from round {terms.since}: {', '.join(parts)}"
