"""Who was evicted, in the hands of those who did it: so that whoever was away hears of it.

A notice says that one member deals no more with one store of another. A majority of the others
decides; one member alone, or a forger, evicts nobody from anybody else's records.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator

from quiverfl.peer import signing
from quiverfl.peer.roster import Roster
from quiverfl.peer.wire import NOTICES, Notice, NoticeList, encode

EACH = 64
"""Notices that are kept of one member."""


class Notices:
    """All that this peer has heard."""

    def __init__(self, agreement: str, known: Iterable[str]) -> None:
        self._agreement = agreement
        self._known = {body: Notice.model_validate_json(body) for body in known}

    @property
    def hash(self) -> str:
        """The same for two peers that have heard the same; empty if nothing."""
        if not self._known:
            return ""
        return hashlib.sha256("\n".join(sorted(self._content())).encode()).hexdigest()

    def _content(self) -> Iterator[str]:
        for notice in self._known.values():
            yield encode(notice.model_copy(update={"proof": ""})).decode()

    def everything(self) -> NoticeList:
        return NoticeList(notices=list(self._known.values())[-NOTICES:])

    def add(self, notice: Notice, roster: Roster) -> str | None:
        """Believe a notice that its author has signed; how it is kept, if it is news."""
        content = encode(notice.model_copy(update={"proof": ""})).decode()
        written = [n for n in self._known.values() if n.by == notice.by]
        if content in self._content() or len(written) >= EACH:
            return None
        if not signing.notice_holds(roster, self._agreement, notice):
            return None
        body = encode(notice).decode()
        self._known[body] = notice
        return body

    def decided(self, members: Iterable[str]) -> Iterator[tuple[str, str, bool]]:
        """(who, which store, for good): what more than half of the others have decided."""
        names = set(members)
        votes: Counter[tuple[str, str, bool]] = Counter()
        for by, about, store, ban in {
            (n.by, n.about, n.store, ban)
            for n in self._known.values()
            for ban in ((False, True) if n.ban else (False,))
        }:
            if by in names and by != about:
                votes[about, store, ban] += 1
        for (about, store, ban), count in sorted(votes.items()):
            if count > (len(names) - 1) // 2:
                yield about, store, ban
