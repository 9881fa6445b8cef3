"""Check the peers' records against each other: no mass was lost or counted twice. Pure.

Every commit leaves an entry, every share a line at its sender and a line at its receiver. The audit
reads these statements and nothing else. So it runs on live stores, on stopped ones and on the
records of a simulated network alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.ledger import PAST, UNIT, Received, Sent, Statement, Transfer


@dataclass
class AuditReport:
    """The result of an audit. `problems` is empty when everything adds up."""

    peers: int = 0
    units: int = 0  # in the accounts
    in_flight: int = 0  # in outboxes and not applied by their receivers
    expected: int = 0
    drift: float = 0.0  # of the float64 sums, relative
    transfers: int = 0
    refunded: int = 0
    written_off: int = 0
    skewed: int = 0  # applied by the receiver, not in the sender's (older) statement
    evicted: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # in the records, but without a store here
    signatures: int | None = None  # checked; None: no roster was given to check them with
    problems: list[str] = field(default_factory=list)
    culprits: list[str] = field(default_factory=list)  # peers whose records are wrong, if known

    def blame(self, peer: str | None, problem: str) -> None:
        self.problems.append(problem)
        if peer is not None and peer not in self.culprits:
            self.culprits.append(peer)

    @property
    def error(self) -> int:
        """Mass that should not be there (positive) or is missing (negative), in units of 2^-48."""
        return self.units + self.in_flight - self.expected

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def complete(self) -> bool:
        """Every link was seen from both ends."""
        return not self.missing

    def values(self) -> dict[str, Any]:
        """All fields, for machines."""
        derived = {"error": self.error, "passed": self.passed, "complete": self.complete}
        return {**vars(self), **derived}

    def lines(self) -> Iterator[str]:
        yield f"peers            {self.peers}"
        yield f"mass in accounts {self.units / UNIT:.6f}"
        yield f"mass in flight   {self.in_flight / UNIT:.6f}"
        yield f"mass expected    {self.expected / UNIT:.6f}"
        yield f"error            {self.error} units of 2^-48"
        yield f"drift of u       {self.drift:.1e} (relative)"
        yield f"transfers        {self.transfers} ({self.refunded} refunded)"
        if self.written_off:
            yield f"written off      {self.written_off / UNIT:.6f}"
        if self.evicted:
            yield f"evicted          {', '.join(self.evicted)}"
        if self.skewed:
            yield f"skewed           {self.skewed} transfers between stores read at two moments"
        if self.signatures is None:
            yield "signatures       not checked: name the roster with --roster"
        else:
            yield f"signatures       {self.signatures} checked"
        yield from self.problems
        if self.culprits:
            yield f"wrong records    {', '.join(self.culprits)}"
        yield self.verdict

    @property
    def verdict(self) -> str:
        if not self.passed:
            return "FAILED"
        if self.complete:
            return "passed"
        return (
            f"INCOMPLETE: nothing wrong in the stores given, but none is of "
            f"{', '.join(self.missing)}: what was exchanged with them was seen from one end only. "
            "Give the store of every peer."
        )


ROUNDING = 2.0**-20
"""Bound on a recorded float32 rounding, relative to the sum of magnitudes it happened in."""
OPENING = ("start", "join")
RECEIPTS = {"acknowledged": "applied", "refunded": "refused"}
"""The receipt that the receiver has signed, by the state of a share."""
DRIFT = 1e-12
"""Bound on the difference between the records' float64 sums, relative to the magnitudes in them."""

SignatureCheck = Callable[[str, Transfer, str, str], bool]
"""(word, transfer, agreement, the sender's store or nothing) → the transfer's proof holds."""


def audit(
    statements: Iterable[Statement], *, live: bool = False, is_genuine: SignatureCheck | None = None
) -> AuditReport:
    """Check every statement by itself, every link from both ends, and the sums over all.

    With `live`, statements were taken one after the other from running peers: a receiver may then
    know a transfer that its sender's older statement does not. For stopped stores this is an error.
    With `is_genuine`, which knows the keys of the roster, signatures tell whose records are wrong.
    """
    statements = list(statements)
    by_name = {statement.name: statement for statement in statements}
    if len({statement.agreement for statement in statements}) > 1:
        raise QuiverError(
            "these stores are not of the same run: their peers had different configurations or "
            "models."
        )
    if len(by_name) < len(statements):
        raise QuiverError("a peer's store was given twice: give that of every peer once.")
    evicted = {peer for statement in statements for peer in statement.gone}
    inside = {name: statement for name, statement in by_name.items() if name not in evicted}
    report = AuditReport(peers=len(inside), signatures=None if is_genuine is None else 0)
    for statement in inside.values():
        _check_records(statement, report, _find_grant(statement, inside.values()))
        if is_genuine is not None:
            _check_proofs(statement, report, is_genuine)
    _check_links(inside, report, live, is_genuine)
    named = {s.transfer.receiver for one in inside.values() for s in one.sent}
    named |= {r.transfer.sender for one in inside.values() for r in one.received}
    evicted |= {name for name in named if PAST in name}
    report.evicted = sorted(evicted)
    report.missing = sorted(named - evicted - set(inside))
    if report.error:
        report.problems.append(
            f"Σμ is off by {report.error} units ({report.error / UNIT:+.6f}): mass was "
            f"{'counted twice' if report.error > 0 else 'lost'}."
        )
    return report


def find_damage(statement: Statement, is_genuine: SignatureCheck | None, newest: int) -> list[str]:
    """Recompute one peer's records; the signatures of the newest shares at either end are checked.

    A training that has diverged is no damage.
    """
    report = AuditReport()
    _check_records(statement, report, _find_grant(statement, [statement]))
    if is_genuine is not None:
        sent, received = statement.sent[-newest:], statement.received[-newest:]
        _check_proofs(replace(statement, sent=sent, received=received), report, is_genuine)
    return [problem for problem in report.problems if "is not finite" not in problem]


def _find_grant(statement: Statement, witnesses: Iterable[Statement]) -> int:
    """The mass that a member brings: 1, or the amount granted to it in most records.

    A peer that has left, and holds nothing, need not have heard of it.
    """
    name = statement.name
    heard = [one for one in witnesses if one.units or name in one.grants]
    reported = Counter(one.grants.get(name, UNIT) for one in heard)
    return reported.most_common(1)[0][0] if reported else UNIT


def _check_records(statement: Statement, report: AuditReport, grant: int) -> None:
    """Check that each entry continues the one before it, and that the last matches the account."""
    units, total = 0, 0.0
    for number, entry in enumerate(statement.entries):
        if units + entry.units_in - entry.units_out != entry.units:
            report.blame(
                statement.name, f"{statement.name}: entry {number} does not add up in mass."
            )
        if not entry.finite:
            report.blame(
                statement.name,
                f"{statement.name}: entry {number} is not finite: its training diverged, or it "
                "sent what is no number.",
            )
            break
        if number and abs(entry.rounding(total)) > ROUNDING * max(entry.scale, 1e-30):
            report.blame(statement.name, f"{statement.name}: entry {number} does not add up in u.")
        units, total = entry.units, entry.total
    else:
        _check_last_entry(statement, units, total, report)
    units_in = sum(r.transfer.units for r in statement.received if not r.refusal)
    units_out = sum(s.transfer.units for s in statement.sent if s.status != "refunded")
    started = sum(e.units_in for e in statement.entries if e.kind in OPENING)
    if started + units_in - units_out != statement.units:
        report.blame(statement.name, f"{statement.name}: its transfers do not explain its account.")
    openings = [
        (number, e.units_in) for number, e in enumerate(statement.entries) if e.kind in OPENING
    ]
    if openings != [(0, grant)]:
        report.blame(
            statement.name,
            f"{statement.name}: minted: its account was opened with {started / UNIT:g}; it "
            f"brings {grant / UNIT:g}.",
        )
    report.units += statement.units
    report.written_off += statement.written_off
    report.expected += grant - statement.written_off  # whatever its own first entry says


def _check_last_entry(statement: Statement, units: int, total: float, report: AuditReport) -> None:
    if units != statement.units:
        report.blame(
            statement.name, f"{statement.name}: its account does not match its last entry."
        )
    if total != statement.total:
        report.blame(
            statement.name, f"{statement.name}: its stored state is not the one it last committed."
        )


def _check_proofs(statement: Statement, report: AuditReport, is_genuine: SignatureCheck) -> None:
    """Check that senders signed the shares taken here, and receivers the shares given away."""
    for received in statement.received:
        _count_signature(report)
        if not is_genuine("share", received.transfer, statement.agreement, ""):
            t = received.transfer
            report.blame(
                statement.name,
                f"{t.sender} → {statement.name} number {t.seq}: not signed by its sender.",
            )
    for sent in statement.sent:
        word = RECEIPTS.get(sent.status)
        if word is not None:
            _count_signature(report)
            if not is_genuine(word, sent.transfer, statement.agreement, statement.incarnation):
                t = sent.transfer
                report.blame(
                    statement.name,
                    f"{statement.name} → {t.receiver} number {t.seq}: no receipt for it.",
                )


def _count_signature(report: AuditReport) -> None:
    report.signatures = (report.signatures or 0) + 1


def _check_links(
    inside: dict[str, Statement], report: AuditReport, live: bool, is_genuine: SignatureCheck | None
) -> None:
    sums: list[float] = []
    for name, statement in inside.items():
        for sent in statement.sent:
            report.transfers += 1
            report.refunded += sent.status == "refunded"
            if sent.transfer.receiver not in inside:
                _count_outside(sent, report)
        for received in statement.received:
            if received.transfer.sender not in inside and not received.refusal:
                report.expected += received.transfer.units
        for sender in inside:
            if sender != name:
                _check_link(inside[sender], statement, report, live, sums, is_genuine)
    scale = math.fsum(e.scale for b in inside.values() for e in b.entries[-1:] if e.finite)
    report.drift = abs(math.fsum(sums)) / max(scale, 1e-30)
    if report.drift > DRIFT:
        report.problems.append(f"u changed on the way: drift {report.drift:.1e} > {DRIFT:.0e}.")


def _count_outside(sent: Sent, report: AuditReport) -> None:
    """Count a share to a peer whose records are not here."""
    if sent.status == "outbox":
        report.in_flight += sent.transfer.units
    elif sent.status == "acknowledged":
        report.expected -= sent.transfer.units


def _check_link(
    sender: Statement,
    receiver: Statement,
    report: AuditReport,
    live: bool,
    sums: list[float],
    is_genuine: SignatureCheck | None,
) -> None:
    def find_culprit(word: str, transfer: Transfer, accused: str, otherwise: str) -> str | None:
        """Name who is wrong: the signer if the signature holds, else the peer that shows it."""
        if is_genuine is None:
            return None
        return accused if is_genuine(word, transfer, sender.agreement, "") else otherwise

    sent = {s.transfer.seq: s for s in sender.sent if s.transfer.receiver == receiver.name}
    taken: dict[int, Received] = {}
    name = f"{sender.name} → {receiver.name}"
    for received in receiver.received:
        if received.transfer.sender != sender.name:
            continue
        seq = received.transfer.seq
        if seq in taken:
            report.blame(receiver.name, f"{name} number {seq} was taken twice.")
        taken[seq] = received
        if seq not in sent:
            culprit = find_culprit("share", received.transfer, sender.name, receiver.name)
            _report_unsent(received, name, report, live, culprit)
            continue
        if not _is_same(sent[seq].transfer, received.transfer):
            culprit = find_culprit("share", received.transfer, sender.name, receiver.name)
            report.blame(culprit, f"{name} number {seq} is not what was sent.")
        numbers = (received.transfer.total, sent[seq].transfer.total)
        if not received.refusal and all(map(math.isfinite, numbers)):
            sums += [received.transfer.total, -sent[seq].transfer.total]
    for seq, line in sent.items():
        applied = seq in taken and not taken[seq].refusal
        if line.status == "outbox" and not applied:
            report.in_flight += line.transfer.units
        if line.status == "acknowledged" and not applied and not live:
            culprit = find_culprit("applied", line.transfer, receiver.name, sender.name)
            report.blame(culprit, f"{name} number {seq} was acknowledged, but never applied.")
        if line.status == "acknowledged" and not applied and live:
            report.skewed += 1
            report.in_flight += line.transfer.units
        if line.status == "refunded" and applied:
            culprit = find_culprit("refused", line.transfer, receiver.name, sender.name)
            report.blame(culprit, f"{name} number {seq} was taken back, and applied as well.")


def _report_unsent(
    received: Received, name: str, report: AuditReport, live: bool, culprit: str | None
) -> None:
    if not live:
        report.blame(
            culprit,
            f"{name} number {received.transfer.seq} was taken, but its sender never sent it: "
            "a backup was restored, or it was forged.",
        )
    elif not received.refusal:
        report.skewed += 1
        report.expected += received.transfer.units


def _is_same(sent: Transfer, taken: Transfer) -> bool:
    """Whether both sides mean the same share; `drift` compares the sums that each side made."""
    return replace(taken, total=sent.total) == sent
