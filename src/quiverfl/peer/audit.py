"""Proof that no mass was lost or counted twice: the peers' records against each other. Pure.

Every commit leaves an entry, every share a line at its sender and a line at its receiver. The audit
reads these statements and nothing else, so it runs on live stores, on stopped ones and on the
records of a simulated network alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from quiverfl.errors import QuiverError
from quiverfl.peer.audit_report import Report
from quiverfl.peer.ledger import PAST, UNIT, Transfer
from quiverfl.peer.statement import Received, Sent, Statement

ROUNDING = 2.0**-20
"""Bound on a recorded float32 rounding, relative to the sum of magnitudes it happened in."""
OPENING = ("start", "join")
RECEIPTS = {"acknowledged": "applied", "refunded": "refused"}
"""What the receiver has signed of a share in this state."""
DRIFT = 1e-12
"""Bound on the difference between the records' float64 sums, relative to the magnitudes in them."""

Genuine = Callable[[str, Transfer, str, str], bool]
"""(word, transfer, agreement, the sender's store or nothing) → the transfer's proof holds."""


def audit(
    statements: Iterable[Statement], *, live: bool = False, genuine: Genuine | None = None
) -> Report:
    """Check every statement by itself, every link from both ends, and the sums over all.

    With `live`, statements were taken one after the other from running peers: a receiver may then
    know a transfer that its sender's older statement does not. For stopped stores this is an error.
    With `genuine`, which knows the keys of the roster, signatures tell whose records are wrong.
    """
    given = list(statements)
    by_name = {statement.name: statement for statement in given}
    if len({statement.agreement for statement in given}) > 1:
        raise QuiverError(
            "these stores are not of the same run: their peers had different configurations or "
            "models."
        )
    if len(by_name) < len(given):
        raise QuiverError("a peer's store was given twice: give that of every peer once.")
    evicted = {peer for statement in given for peer in statement.gone}
    inside = {name: statement for name, statement in by_name.items() if name not in evicted}
    report = Report(peers=len(inside), signatures=None if genuine is None else 0)
    for statement in inside.values():
        _own_records(statement, report)
        if genuine is not None:
            _proofs(statement, report, genuine)
    _links(inside, report, live, genuine)
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


def _own_records(statement: Statement, report: Report) -> None:
    """Each entry continues the one before it, and the last is what the account says."""
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
        _last_entry(statement, units, total, report)
    moved_in = sum(r.transfer.units for r in statement.received if not r.refusal)
    moved_out = sum(s.transfer.units for s in statement.sent if s.status != "refunded")
    started = sum(e.units_in for e in statement.entries if e.kind in OPENING)
    if started + moved_in - moved_out != statement.units:
        report.blame(statement.name, f"{statement.name}: its transfers do not explain its account.")
    openings = [
        (number, e.units_in) for number, e in enumerate(statement.entries) if e.kind in OPENING
    ]
    if openings != [(0, UNIT)]:
        report.blame(
            statement.name,
            f"{statement.name}: minted: its account was opened with {started / UNIT:g}; the "
            "roster, and whoever joins, brings 1.",
        )
    report.units += statement.units
    report.written_off += statement.written_off
    report.expected += UNIT - statement.written_off  # whatever its own first entry says


def _last_entry(statement: Statement, units: int, total: float, report: Report) -> None:
    if units != statement.units:
        report.blame(
            statement.name, f"{statement.name}: its account does not match its last entry."
        )
    if total != statement.total:
        report.blame(
            statement.name, f"{statement.name}: its stored state is not the one it last committed."
        )


def _proofs(statement: Statement, report: Report, genuine: Genuine) -> None:
    """Every share taken is signed by its sender, every one given away by its receiver."""
    for received in statement.received:
        _count(report)
        if not genuine("share", received.transfer, statement.agreement, ""):
            t = received.transfer
            report.blame(
                statement.name,
                f"{t.sender} → {statement.name} number {t.seq}: not signed by its sender.",
            )
    for sent in statement.sent:
        word = RECEIPTS.get(sent.status)
        if word is not None:
            _count(report)
            if not genuine(word, sent.transfer, statement.agreement, statement.incarnation):
                t = sent.transfer
                report.blame(
                    statement.name,
                    f"{statement.name} → {t.receiver} number {t.seq}: no receipt for it.",
                )


def _count(report: Report) -> None:
    report.signatures = (report.signatures or 0) + 1


def _links(
    inside: dict[str, Statement], report: Report, live: bool, genuine: Genuine | None
) -> None:
    sums: list[float] = []
    for name, statement in inside.items():
        for sent in statement.sent:
            report.transfers += 1
            report.refunded += sent.status == "refunded"
            if sent.transfer.receiver not in inside:
                _across(sent, report)
        for received in statement.received:
            if received.transfer.sender not in inside and not received.refusal:
                report.expected += received.transfer.units
        for sender in inside:
            if sender != name:
                _link(inside[sender], statement, report, live, sums, genuine)
    scale = math.fsum(e.scale for b in inside.values() for e in b.entries[-1:] if e.finite)
    report.drift = abs(math.fsum(sums)) / max(scale, 1e-30)
    if report.drift > DRIFT:
        report.problems.append(f"u changed on the way: drift {report.drift:.1e} > {DRIFT:.0e}.")


def _across(sent: Sent, report: Report) -> None:
    """A share to a peer whose records are not here."""
    if sent.status == "outbox":
        report.in_flight += sent.transfer.units
    elif sent.status == "acknowledged":
        report.expected -= sent.transfer.units


def _link(
    sender: Statement,
    receiver: Statement,
    report: Report,
    live: bool,
    sums: list[float],
    genuine: Genuine | None,
) -> None:
    def signer(word: str, transfer: Transfer, accused: str, otherwise: str) -> str | None:
        """Whose records are wrong: whoever signed, if the signature holds; else who shows it."""
        if genuine is None:
            return None
        return accused if genuine(word, transfer, sender.agreement, "") else otherwise

    sent = {s.transfer.seq: s for s in sender.sent if s.transfer.receiver == receiver.name}
    got: dict[int, Received] = {}
    name = f"{sender.name} → {receiver.name}"
    for received in receiver.received:
        if received.transfer.sender != sender.name:
            continue
        seq = received.transfer.seq
        if seq in got:
            report.blame(receiver.name, f"{name} number {seq} was taken twice.")
        got[seq] = received
        if seq not in sent:
            culprit = signer("share", received.transfer, sender.name, receiver.name)
            _unsent(received, name, report, live, culprit)
            continue
        if not _same(sent[seq].transfer, received.transfer):
            culprit = signer("share", received.transfer, sender.name, receiver.name)
            report.blame(culprit, f"{name} number {seq} is not what was sent.")
        numbers = (received.transfer.total, sent[seq].transfer.total)
        if not received.refusal and all(map(math.isfinite, numbers)):
            sums += [received.transfer.total, -sent[seq].transfer.total]
    for seq, line in sent.items():
        applied = seq in got and not got[seq].refusal
        if line.status == "outbox" and not applied:
            report.in_flight += line.transfer.units
        if line.status == "acknowledged" and not applied and not live:
            culprit = signer("applied", line.transfer, receiver.name, sender.name)
            report.blame(culprit, f"{name} number {seq} was acknowledged, but never applied.")
        if line.status == "acknowledged" and not applied and live:
            report.skewed += 1
            report.in_flight += line.transfer.units
        if line.status == "refunded" and applied:
            culprit = signer("refused", line.transfer, receiver.name, sender.name)
            report.blame(culprit, f"{name} number {seq} was taken back, and applied as well.")


def _unsent(received: Received, name: str, report: Report, live: bool, culprit: str | None) -> None:
    if not live:
        report.blame(
            culprit,
            f"{name} number {received.transfer.seq} was taken, but its sender never sent it: "
            "a backup was restored, or it was forged.",
        )
    elif not received.refusal:
        report.skewed += 1
        report.expected += received.transfer.units


def _same(sent: Transfer, taken: Transfer) -> bool:
    """The same share; each side adds its numbers up by itself, and `drift` compares the sums."""
    return replace(taken, total=sent.total) == sent
