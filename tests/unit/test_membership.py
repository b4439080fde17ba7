"""Who may link to whom, under which epoch, and when a replica counts as gone."""

import asyncio

import pytest

from outrider.cluster.registry import Homing, LinkReport, Membership, Registry


@pytest.fixture
def two():
    members = Membership()
    members.renew("r1", "D1", 10, now=0)
    members.renew("r2", "D2", 10, now=0)
    return members


def test_a_verifier_gets_its_own_drafter(two):
    assert two.grant("r1", set()).drafter == "D1"
    assert two.grant("r2", set()).drafter == "D2"


def test_every_grant_has_a_higher_epoch_whoever_asks(two):
    epochs = [two.grant(verifier, set()).epoch for verifier in ("r1", "r2", "r1", "r1")]
    assert epochs == sorted(set(epochs))
    assert epochs[0] >= 1


def test_a_registry_that_was_made_anew_goes_on_behind_the_epochs_it_has_forgotten(two):
    assert two.grant("r1", set(), last_epoch=7).epoch == 8
    assert two.grant("r2", set(), last_epoch=3).epoch == 9
    assert asyncio.run(Registry().grant("r1", set(), 41)) is None, "no drafter has come back yet"

    async def come_back():
        registry = Registry()
        registry._members.renew("r1", "D1", 10, now=0)
        return (await registry.grant("r1", set(), 41)).epoch

    assert asyncio.run(come_back()) == 42


def test_no_drafter_no_grant_and_no_epoch_spent():
    members = Membership()
    members.renew("r1", None, 10, now=0)
    assert members.grant("r1", set()) is None
    assert members.epoch == 0


def test_another_s_drafter_steps_in_for_an_unreachable_one(two):
    assert two.grant("r1", {"D1"}).drafter == "D2"


def test_the_least_used_of_the_others_is_asked():
    members = Membership()
    for replica, drafter in (("r1", None), ("r2", "D2"), ("r3", "D3")):
        members.renew(replica, drafter, 10, now=0)
    members.links["r2"] = LinkReport("up", 1, "D2")
    assert members.grant("r1", set()).drafter == "D3"
    members.links["r3"] = LinkReport("up", 2, "D3")
    members.links["r4"] = LinkReport("up", 3, "D3")
    assert members.grant("r1", set()).drafter == "D2"
    members.links["r2"].state = "down"
    members.links["r3"].state = "down"
    members.links["r4"].state = "down"
    members.links["r5"] = LinkReport("up", 4, "D2")
    assert members.grant("r1", set()).drafter == "D3", "links that are down are no load"


def test_when_all_are_unreachable_its_own_is_tried_again(two):
    assert two.grant("r1", {"D1", "D2"}).drafter == "D1"


def test_all_of_the_others_unreachable_and_none_of_its_own():
    members = Membership()
    members.renew("r1", None, 10, now=0)
    members.renew("r2", "D2", 10, now=0)
    assert members.grant("r1", {"D2"}) is None


def test_a_replica_that_does_not_renew_is_gone_with_drafter_and_link(two):
    two.links["r1"] = LinkReport("up", 1, "D1")
    two.renew("r2", "D2", 10, now=9)
    two.expire(now=10)
    assert two.leases.keys() == {"r2"}
    assert two.drafters == {"D2": "r2"}
    assert two.links == {}
    two.expire(now=18.9)
    assert two.leases.keys() == {"r2"}


def test_renewing_extends_and_leaving_is_at_once(two):
    two.renew("r1", "D1", 10, now=5)
    two.expire(now=12)
    assert two.leases.keys() == {"r1"}
    two.leave("r1")
    two.leave("r1")
    assert (two.leases, two.drafters) == ({}, {})


def test_home_is_the_verifier_s_own_drafter(two):
    assert (two.home("r1"), two.home("r2")) == ("D1", "D2")
    two.leave("r1")
    assert two.home("r1") is None


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def looks_until_due(homing, clock):
    """Looks once a second at a drafter that always answers. Returns how long it took."""
    start = clock.now
    while not homing.look(True):
        clock.now += 1
    return clock.now - start


def test_a_borrower_goes_home_when_its_own_has_been_ready_for_a_while(clock):
    homing = Homing(clock)
    assert not homing.look(False)
    assert not homing.look(True)
    clock.now += Homing.FIRST_S / 2
    assert not homing.look(False), "gone again: the while begins anew"
    assert looks_until_due(homing, clock) == Homing.FIRST_S


def test_a_home_that_is_left_soon_is_gone_to_less_and_less_often(clock):
    homing = Homing(clock)
    waits = []
    for _ in range(12):
        waits.append(looks_until_due(homing, clock))
        homing.went_home()
        clock.now += Homing.SETTLED_S / 2
        homing.link_ended()
    assert waits[:4] == [Homing.FIRST_S * 2**n for n in range(4)]
    assert waits[-1] == Homing.LONGEST_S
    homing.went_home()
    clock.now += Homing.SETTLED_S
    homing.link_ended()
    assert looks_until_due(homing, clock) == Homing.FIRST_S, "that one lasted"


def test_a_home_that_cannot_be_linked_to_is_tried_less_often_and_borrowed_links_say_nothing(clock):
    homing = Homing(clock)
    homing.link_ended()
    assert looks_until_due(homing, clock) == Homing.FIRST_S
    homing.failed()
    homing.link_ended()
    assert looks_until_due(homing, clock) == 2 * Homing.FIRST_S
