"""What callers pay for what is refused of theirs: how much, who, and what they are told when it is too much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.actors.serving.access.budget import BASE_S, MIB_S, MOST_HANDLER_S, MOST_PAYERS, Bill, Budget, Payer
from outrider.actors.serving.access.files import Reloading
from outrider.actors.serving.access.guard import (
    GRPC_CALLS,
    NOBODY,
    OPEN,
    Asked,
    Guard,
    Refused,
    http_headers,
    need_of_rpc,
)
from outrider.actors.serving.access.keys import Key, KeyRing, hash_of, new_secret
from tests.clock import Clock

CODE = grpc.StatusCode
GENERATE = GRPC_CALLS["/outrider.v1.GenerationService/Generate"]
STATUS = GRPC_CALLS["/outrider.v1.GenerationService/GetServerStatus"]
ONE = Payer("key", "one")


@pytest.fixture
def clock() -> Clock:
    return Clock(50.0)


def test_a_minutes_worth_at_once_and_then_as_much_as_comes_back(clock):
    budget = Budget(3.0, clock)
    for _ in range(24):
        assert budget.wait_s(ONE) == 0
        budget.charge(ONE, 0.125)
    assert budget.wait_s(ONE) == 0, "nothing is left, and nothing is owed"
    budget.charge(ONE, 0.125)
    assert budget.wait_s(ONE) == pytest.approx(2.5)
    assert budget.wait_s(Payer("key", "other")) == 0
    assert budget.wait_s(Payer("address", "one")) == 0, "an address that is called like a key"
    clock.now += 2.4
    assert budget.wait_s(ONE) == pytest.approx(0.1)
    clock.now += 0.2
    assert budget.wait_s(ONE) == 0
    budget.charge(ONE, 0.1)
    assert budget.wait_s(ONE) > 0
    clock.now += 3600
    assert budget.wait_s(ONE) == 0
    assert len(budget) == 0, "who owes nothing is forgotten"
    budget.charge(ONE, 3.05)
    assert budget.wait_s(ONE) > 0, "idle hours are worth a minute"


def test_nobody_is_locked_out_for_longer_than_a_minute(clock):
    budget = Budget(3.0, clock)
    for _ in range(100):
        budget.charge(ONE, 2.0)
    assert budget.wait_s(ONE) == pytest.approx(60)
    clock.now += 61
    assert budget.wait_s(ONE) == 0


def test_so_many_are_remembered_and_those_who_owe_most_above_all(clock):
    budget = Budget(3.0, clock)
    budget.charge(ONE, 5.0)
    for number in range(2 * MOST_PAYERS):
        budget.charge(Payer("address", str(number)), 0.002)
        assert len(budget) <= MOST_PAYERS
    assert budget.wait_s(ONE) > 0


def test_what_a_call_costs(clock):
    bill = Bill(is_whole=False, clock=clock)
    clock.now += 30  # for its body, and for its turn
    assert bill.cost_s() == BASE_S
    bill.received(3 << 20, is_whole=False)
    assert not bill.is_whole
    bill.received(1 << 20, is_whole=True)
    assert bill.is_whole
    bill.answered()
    assert bill.cost_s() == pytest.approx(BASE_S + 4 * MIB_S)
    bill.handed_on()
    clock.now += 0.25
    bill.answered()
    clock.now += 30
    assert bill.cost_s() == pytest.approx(BASE_S + 4 * MIB_S + 0.25)
    bill.handed_on()
    clock.now += 30
    bill.answered()
    assert bill.cost_s() == pytest.approx(BASE_S + 4 * MIB_S + MOST_HANDLER_S)


OWN_FAULT = {CODE.INVALID_ARGUMENT, CODE.FAILED_PRECONDITION, CODE.OUT_OF_RANGE, CODE.UNAUTHENTICATED,
             CODE.PERMISSION_DENIED, CODE.NOT_FOUND}  # fmt: skip


@pytest.mark.parametrize("code", [None, *CODE], ids=str)
def test_whose_fault_an_end_is_over_grpc(code):
    whole, half = Bill(is_whole=True), Bill(is_whole=False)
    assert whole.is_fault_over_grpc(code) == (code in OWN_FAULT)
    assert half.is_fault_over_grpc(code)
    if code is not None:
        assert whole.is_fault_over_grpc(code.value[0]) == (code in OWN_FAULT), "as the ingress sets it"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 415, 421, 422])
def test_what_is_paid_for_over_http(status):
    assert Bill(is_whole=True).is_fault_over_http(status)


@pytest.mark.parametrize("status", [None, 200, 304, 408, 409, 429, 499, 500, 501, 503])
def test_what_is_not_unless_half_of_it_came(status):
    assert not Bill(is_whole=True).is_fault_over_http(status)
    assert Bill(is_whole=False).is_fault_over_http(status)


class Rig:
    """A proxy's guard. A bucket holds three calls that are refused at once."""

    def __init__(self, clock: Clock, ring: KeyRing | None, *, a_minute_s: float = 3 * BASE_S - 0.001) -> None:
        self.refusals: list[tuple[str, str, str]] = []
        self.guard = Guard(
            None if ring is None else Reloading([Path(__file__)], lambda: ring),
            budget=Budget(a_minute_s, clock),
            on_refusal=lambda *each: self.refusals.append(each),
            clock=clock,
        )

    def ask(
        self, header: str | None = None, peer: str = "ipv4:10.0.0.9:5", need: Any = GENERATE, bad: bool = False
    ) -> str:
        """Empty, or why it was refused. bad: it is let in, and ends as INVALID_ARGUMENT."""
        bill = Bill(is_whole=True)
        try:
            with self.guard.admit(Asked("grpc", "call", header, peer, need), bill):
                if bad:
                    self.guard.charge(bill)
        except Refused as refused:
            return refused.reason
        return ""


SECRETS = {"one": new_secret(), "two": new_secret()}
RING = KeyRing([Key(name=name, hash=hash_of(s.encode()), scopes=("generate",)) for name, s in SECRETS.items()])
KEYED, OTHER_KEYED = (f"Bearer {SECRETS[name]}" for name in ("one", "two"))


@pytest.fixture
def keyed(clock: Clock) -> Rig:
    return Rig(clock, RING)


def test_a_key_pays_for_its_own_calls_wherever_it_is(keyed, clock, caplog):
    for number in range(3):
        assert keyed.ask(KEYED, f"ipv4:10.0.0.{number}:5", bad=True) == ""
    with pytest.raises(Refused) as caught, keyed.guard.admit(Asked("grpc", "call", KEYED, "ipv4:10.0.0.9:5", GENERATE)):
        pass
    refused = caught.value
    assert (refused.code, refused.reason, refused.key) == (CODE.RESOURCE_EXHAUSTED, "REFUSED_TOO_OFTEN", "one")
    assert refused.sentence == (
        "too much of what this key sent was refused (limits.refused_seconds_per_minute); mend what the refusals named, "
        "and retry in 12 s"
    )
    assert http_headers(refused) == {"Retry-After": "12"}
    status = refused.failure().status()
    assert any(detail.type_url.endswith("RetryInfo") and detail.value == b"\n\x02\x08\x0c" for detail in status.details)
    assert keyed.refusals == [("grpc", "one", "REFUSED_TOO_OFTEN")]
    assert "refused: reason=REFUSED_TOO_OFTEN key=one api=grpc call=call peer=ipv4:10.0.0.9:5" in caplog.text
    assert keyed.ask(OTHER_KEYED) == ""
    assert keyed.ask(None) == "NO_KEY"
    for _ in range(100):  # what it costs to be refused for it is not charged
        assert keyed.ask(KEYED) == "REFUSED_TOO_OFTEN"
    clock.now += 12.1
    assert keyed.ask(KEYED) == ""


def test_who_has_overdrawn_can_still_end_what_it_has_begun(keyed):
    for _ in range(3):
        assert keyed.ask(KEYED, bad=True) == ""
    abort = need_of_rpc("AbortRequest")
    assert keyed.ask(KEYED) == "REFUSED_TOO_OFTEN"
    assert keyed.ask(KEYED, need=abort) == ""
    for _ in range(3):
        assert keyed.ask(None, need=abort) == "NO_KEY"
    assert keyed.ask(None, need=abort) == "REFUSED_TOO_OFTEN", "without a key there is nothing that it began"


def test_calls_that_are_answered_cost_nothing(keyed):
    for _ in range(100):
        assert keyed.ask(KEYED) == ""


def test_who_has_a_key_does_not_pay_for_neighbours_without_one(keyed):
    for _ in range(3):
        assert keyed.ask(None) == "NO_KEY"
    assert keyed.ask(None) == "REFUSED_TOO_OFTEN"
    assert keyed.ask("Bearer outrider_guess") == "REFUSED_TOO_OFTEN", "guesses are of the address"
    assert keyed.ask(None, "ipv4:10.0.0.8:5") == "NO_KEY"
    assert keyed.ask(KEYED) == ""
    assert keyed.ask(None, need=OPEN) == "", "nor does a probe"


def test_guesses_are_charged_to_their_address(keyed):
    for _ in range(3):
        assert keyed.ask("Bearer outrider_guess") == "WRONG_KEY"
    assert keyed.ask(None) == "REFUSED_TOO_OFTEN"
    assert keyed.refusals[-1] == ("grpc", NOBODY, "REFUSED_TOO_OFTEN")


def test_a_key_that_lacks_a_scope_pays_itself(keyed):
    for _ in range(3):
        assert keyed.ask(KEYED, need=STATUS) == "SCOPE_MISSING"
    assert keyed.ask(KEYED) == "REFUSED_TOO_OFTEN"
    assert keyed.ask(None) == "NO_KEY"


def test_a_limit_that_is_reached_is_no_fault(clock):
    key = Key(name="slow", hash=hash_of(b"slow"), scopes=("generate",), requests_per_minute=1)
    rig = Rig(clock, KeyRing([key]))
    assert rig.ask("Bearer slow") == ""
    for _ in range(10):
        assert rig.ask("Bearer slow") == "REQUESTS_PER_MINUTE"


def test_probes_pay_for_themselves(keyed):
    for _ in range(3):
        assert keyed.ask(None, need=OPEN, bad=True) == ""
    assert keyed.ask(None, need=OPEN) == "REFUSED_TOO_OFTEN"
    assert keyed.ask(None, "ipv4:10.0.0.8:5", need=OPEN) == ""
    assert keyed.ask(None) == "NO_KEY"


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("ipv4:10.0.0.9:5", "10.0.0.9:70", True),  # as HTTP has it
        ("ipv4:10.0.0.9:5", "ipv6:%5B::ffff:10.0.0.9%5D:9", True),
        ("ipv6:%5B2001:db8::1%5D:5", "2001:db8::ffff:7", True),
        ("ipv6:%5B2001:db8::1%5D:5", "ipv6:%5B2001:db8:0:1::1%5D:5", False),
        ("ipv4:10.0.0.9:5", "ipv4:10.0.0.8:5", False),
        ("", "", True),
    ],
)
def test_without_keys_the_address_pays(clock, first, second, same):
    rig = Rig(clock, None)
    for _ in range(3):
        assert rig.ask(None, first, bad=True) == ""
    assert (rig.ask("Bearer of-no-use", second) == "REFUSED_TOO_OFTEN") == same
    assert rig.ask(None, first, need=OPEN) == ""
    clock.now += 61
    assert rig.ask(None, first) == ""
