"""The accounts: exact integers, whatever the network and the peers do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts import ledger
from quiverfl.peer.accounts.audit import audit
from quiverfl.peer.accounts.ledger import (
    PUSH_FLOOR,
    UNIT,
    Accounts,
    LinkRecord,
    Share,
    Transfer,
    Verdict,
)

from .network import SimulatedNetwork


def test_three_receivers_get_a_quarter_each_and_the_remainder_stays_home() -> None:
    shares = ledger.divide_units(10, {"b": 1, "c": 1, "d": 1}, home=1)
    assert shares == {"b": 2, "c": 2, "d": 2}  # 4 stay


def test_unequal_weights_become_integer_weights() -> None:
    parts = ledger.integer_weights({"home": 0.5, "b": 0.25, "c": 0.25})
    assert parts == {"home": UNIT // 2, "b": UNIT // 4, "c": UNIT // 4}
    home = parts.pop("home")
    assert ledger.divide_units(1000, parts, home) == {"b": 250, "c": 250}


def test_equal_weights_are_one_part_each() -> None:
    assert ledger.integer_weights({"home": 1 / 3, "b": 1 / 3, "c": 1 / 3}) == {
        "home": 1,
        "b": 1,
        "c": 1,
    }


@given(
    units=st.integers(0, 8 * UNIT),
    parts=st.dictionaries(st.text(min_size=1, max_size=3), st.integers(1, UNIT), max_size=12),
    home=st.integers(1, UNIT),
)
def test_portions_never_exceed_what_there_is(units: int, parts: dict[str, int], home: int) -> None:
    shares = ledger.divide_units(units, parts, home)
    assert all(share >= 0 for share in shares.values())
    assert sum(shares.values()) <= units


def _transfer(seq: int, digest: str = "d", units: int = 5) -> Transfer:
    return Transfer("a", "b", seq, 0, units, digest, 0.0)


@pytest.mark.parametrize(
    ("seq", "digest", "verdict"),
    [
        (4, "new", Verdict.PROCEED),
        (3, "d", Verdict.APPLIED),
        (3, "other", Verdict.STALE),
        (2, "d", Verdict.STALE),
        (5, "new", Verdict.GAP),
    ],
)
def test_a_transfer_is_judged_by_its_number(seq: int, digest: str, verdict: Verdict) -> None:
    accounts = Accounts("b", UNIT, links={"a": LinkRecord(received=3, digest="d")})
    assert ledger.judge_transfer(accounts, {}, _transfer(seq, digest)) is verdict


def test_a_staged_transfer_is_not_taken_twice() -> None:
    accounts = Accounts("b", UNIT)
    staged = {"a": _transfer(1)}
    assert ledger.judge_transfer(accounts, staged, _transfer(1)) is Verdict.STAGED
    assert ledger.judge_transfer(accounts, staged, _transfer(1, "other")) is Verdict.STALE
    assert ledger.judge_transfer(accounts, staged, _transfer(2)) is Verdict.GAP


def test_a_refusal_is_remembered() -> None:
    accounts = ledger.refuse(Accounts("b", UNIT), _transfer(1), "not finite")
    assert accounts.units == UNIT
    assert ledger.judge_transfer(accounts, {}, _transfer(1)) is Verdict.REFUSED


def test_a_link_carries_one_unacknowledged_share() -> None:
    accounts = ledger.push(Accounts("a", UNIT), 0, {"b": Share(7, "d", 0.0)})
    assert not ledger.is_free(accounts, "b")
    with pytest.raises(QuiverError, match="not free"):
        ledger.push(accounts, 1, {"b": Share(7, "e", 0.0)})
    outbox = accounts.outbox["b"]
    accounts = ledger.acknowledge(accounts, outbox)
    assert ledger.is_free(accounts, "b")
    assert ledger.acknowledge(accounts, outbox) == accounts  # a second ack changes nothing


def test_a_refund_brings_the_mass_back() -> None:
    accounts = ledger.push(Accounts("a", UNIT), 0, {"b": Share(7, "d", 0.0)})
    assert accounts.units == UNIT - 7
    accounts = ledger.absorb(accounts, [], [accounts.outbox["b"]])
    assert accounts.units == UNIT
    assert ledger.is_free(accounts, "b")
    with pytest.raises(QuiverError, match="outbox"):
        ledger.absorb(accounts, [], [Transfer("a", "b", 1, 0, 7, "d", 0.0)])


def test_a_peer_that_hears_nothing_stops_dividing_its_mass() -> None:
    accounts = Accounts("a", UNIT, arrived=False)
    pushes = 0
    while ledger.may_push(accounts):
        share = ledger.divide_units(accounts.units, {"b": 1}, 1)["b"]
        accounts = ledger.push(accounts, pushes, {"b": Share(share, "d", 0.0)})
        accounts = ledger.acknowledge(accounts, accounts.outbox["b"])
        pushes += 1
    assert pushes == 5  # 1 → 1/2 → … → 1/32 < 1/16
    assert accounts.units == PUSH_FLOOR // 2
    accounts = ledger.absorb(accounts, [Transfer("b", "a", 1, 0, 1, "d", 0.0)])
    assert ledger.may_push(accounts)


def test_eviction_writes_off_and_a_new_store_starts_anew() -> None:
    accounts = ledger.register_store(Accounts("a", UNIT), "b", "first")
    accounts = ledger.push(accounts, 0, {"b": Share(7, "d", 0.0)})
    with pytest.raises(QuiverError, match="another store"):
        ledger.register_store(accounts, "b", "second")
    accounts = ledger.evict(accounts, "b")
    assert accounts.written_off == 7
    assert not accounts.outbox
    transfer = Transfer("b", "a", 1, 0, 3, "d", 0.0)
    assert ledger.judge_transfer(accounts, {}, transfer) is Verdict.GONE
    with pytest.raises(QuiverError, match="evicted"):
        ledger.register_store(accounts, "b", "first")
    accounts = ledger.register_store(accounts, "b", "second")
    assert ledger.is_free(accounts, "b")
    assert ledger.judge_transfer(accounts, {}, transfer) is Verdict.PROCEED


def test_meeting_a_neighbour_keeps_the_share_that_waits_for_it() -> None:
    accounts = ledger.push(Accounts("a", UNIT), 0, {"b": Share(7, "d", 0.0)})
    met = ledger.register_store(accounts, "b", "first")
    assert met.outbox == accounts.outbox
    assert met.link("b").sent == 1


def test_a_leaving_neighbour_gets_nothing_new_but_is_still_heard() -> None:
    accounts = ledger.close_link(Accounts("a", UNIT), "b")
    assert not ledger.is_free(accounts, "b")
    transfer = Transfer("b", "a", 1, 0, 3, "d", 0.0)
    assert ledger.judge_transfer(accounts, {}, transfer) is Verdict.PROCEED


class AnySchedule(RuleBasedStateMachine):
    """Hypothesis picks the schedule: the books balance after every single step."""

    def __init__(self) -> None:
        super().__init__()
        self.network = SimulatedNetwork(seed=1, peers=3)

    @rule(what=st.sampled_from(["push", "send", "deliver", "absorb"]), luck=st.integers(0, 9999))
    def happen(self, what: str, luck: int) -> None:
        self.network.random.seed(luck)
        self.network.step(what)

    @invariant()
    def balanced(self) -> None:
        report = audit(self.network.statements())
        assert report.passed, report.problems
        assert report.units + report.in_flight == 3 * UNIT

    def teardown(self) -> None:
        self.network.drain()
        report = audit(self.network.statements())
        assert report.passed, report.problems
        assert (report.units, report.in_flight) == (3 * UNIT, 0)


AnySchedule.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnySchedule = AnySchedule.TestCase


def _balanced(seed: int, mutant: str = "", steps: int = 250) -> bool:
    network = SimulatedNetwork(seed, peers=5, mutant=mutant)
    network.run(steps)
    flying = audit(network.statements())
    network.drain()
    landed = audit(network.statements())
    return flying.passed and landed.passed and landed.in_flight == 0


def test_two_hundred_schedules_with_crashes_losses_and_duplicates_balance() -> None:
    assert all(_balanced(seed) for seed in range(200))


@pytest.mark.slow
def test_ten_thousand_schedules_balance() -> None:
    assert all(_balanced(seed) for seed in range(10_000))


@pytest.mark.parametrize("mutant", ["ack before commit", "no de-duplication"])
def test_the_audit_catches_the_mutant(mutant: str) -> None:
    caught = sum(not _balanced(seed, mutant, steps=1500) for seed in range(10))
    assert caught == 10, f"{mutant}: caught in {caught} of 10 schedules only"


def test_mutants_lose_and_gain_mass() -> None:
    errors = {}
    for mutant in ("ack before commit", "no de-duplication"):
        network = SimulatedNetwork(3, peers=5, mutant=mutant)
        network.run(1500)
        errors[mutant] = audit(network.statements()).error
    assert errors["ack before commit"] < 0 < errors["no de-duplication"]
