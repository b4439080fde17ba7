"""How a pool's drafters are shared out by load, place and round trip, and that targets do not run to and fro."""

import random
from itertools import combinations_with_replacement

import pytest

from outrider.cluster import membership
from outrider.cluster.membership import (
    HYSTERESIS,
    LOOK_S,
    MOVE_PAUSE_S,
    RTT_GAIN_US,
    SMOOTHING_S,
    TOLERANCE,
    LinkReport,
    Member,
    Membership,
    Place,
    RoundTrips,
    Verifier,
    Work,
    fair_share,
)

NOWHERE = Place()
NODES = [Place(f"n{n}", f"k{n // 2}", f"z{n // 4}", "e") for n in range(8)]


def drafter(name, place=NOWHERE, fingerprint=""):
    return Member(f"p-{name}", name, pooled=True, fingerprint=fingerprint, place=place)


def pool(*drafters):
    """drafters: names, or Members."""
    members = Membership()
    for each in drafters:
        members.renew(drafter(each) if isinstance(each, str) else each, 1e9, now=0)
    return members


def target(name, rows=0.0, place=NOWHERE, linked_to="", fingerprint=""):
    return Verifier(name, fingerprint, place, linked_to, Work(rows))


def ask(members, verifiers, now):
    """All of them. Returns who was moved: (verifier, from, to)."""
    moved = []
    for verifier in verifiers:
        before = dict(members.assigned)
        members.assigned_to(verifier, now)
        moved += [(name, old, new) for name, old in before.items() if (new := members.assigned[name]) != old]
    return moved


def settle(members, verifiers, moves=100):
    """Asks until nobody moves. Returns the moves."""
    made = []
    for number in range(1, moves + 2):
        moved = ask(members, verifiers, number * MOVE_PAUSE_S)
        if number > 1 and not moved:
            return made
        made += moved
    raise AssertionError(f"still moving: {made[-10:]}")


def loads_of(members, fingerprint=""):
    loads = {each.drafter: 0.0 for each in members.members.values() if each.fingerprint == fingerprint}
    for verifier in members.verifiers.values():
        if verifier.fingerprint == fingerprint:
            loads[members.assigned[verifier.name]] += members.weight(verifier.name)
    return loads


def fair_of(members, fingerprint=""):
    peers = [each for each in members.verifiers.values() if each.fingerprint == fingerprint]
    return fair_share([members.weight(each.name) for each in peers], len(loads_of(members, fingerprint)))


# By load.


@pytest.mark.parametrize(
    ("weights", "num_drafters", "expected"),
    [
        ([1, 1, 1, 1], 2, 2.0),
        ([1, 1, 1], 2, 1.5),
        ([20, 1, 1], 3, 1.0),
        ([20, 6, 1, 1], 3, 2.0),
        ([5], 1, 5.0),
        ([], 2, 0.0),
        ([5], 0, 0.0),
    ],
)
def test_a_fair_share_is_one_of_what_can_be_shared(weights, num_drafters, expected):
    assert fair_share(weights, num_drafters) == expected


def test_a_busy_target_counts_for_what_it_runs():
    members = pool("D1", "D2")
    verifiers = [target("busy", 12.0), *(target(f"r{n}", 3.0) for n in range(3))]
    ask(members, verifiers, 0.0)
    settle(members, verifiers)
    assert sorted(loads_of(members).values()) == [12.0, 13.0]


def test_targets_share_no_drafter_while_another_has_none():
    members = pool("D1", "D2", "D3")
    verifiers = [target("busy", 40.0, linked_to="D1"), *(target(f"r{n}", linked_to="D2") for n in range(2))]
    settle(members, verifiers)
    assert sorted(loads_of(members).values()) == [1.0, 1.0, 41.0]


def test_of_those_that_have_lost_their_drafter_the_heaviest_is_assigned_one_first():
    members = pool("D1", "D2", "D3")
    verifiers = [target(f"r{n}", rows, linked_to="D3") for n, rows in enumerate((2.0, 2.0, 5.0))]
    ask(members, verifiers, 0.0)
    members.leave("p-D3")
    members.assign(0.1)
    assert loads_of(members) == {"D1": 6.0, "D2": 6.0}


@pytest.mark.parametrize("num_drafters", range(1, 6))
@pytest.mark.parametrize(
    "num_targets", [*range(1, 9), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (9, 10))]
)
def test_targets_that_do_as_much_are_shared_out_by_number(num_targets, num_drafters):
    """Wherever they began."""
    names = [f"D{n}" for n in range(num_drafters)]
    for begun in combinations_with_replacement(names, num_targets):
        members = pool(*names)
        settle(members, [target(f"r{n}", linked_to=name) for n, name in enumerate(begun)])
        loads = loads_of(members).values()
        assert max(loads) - min(loads) <= 1 or sorted(loads)[-2:] == [4, 6], (begun, loads)
        assert max(loads) <= HYSTERESIS * (min(loads) + 1) or max(loads) == num_targets / num_drafters


def test_six_and_four_stay_and_seven_and_four_do_not():
    for most, moves in ((6, 0), (7, 1)):
        members = pool("D1", "D2")
        verifiers = [target(f"r{n:02}", linked_to="D1" if n < most else "D2") for n in range(most + 4)]
        assert len(settle(members, verifiers)) == moves


@pytest.mark.parametrize("num_drafters", [2, 7, 12])
def test_a_drafter_that_is_added_gets_its_share(num_drafters):
    members = pool(*(f"D{n}" for n in range(num_drafters - 1)))
    verifiers = [target(f"r{n}") for n in range(5 * (num_drafters - 1))]
    ask(members, verifiers, 0.0)
    members.renew(drafter("new"), 1e9, now=0)
    settle(members, verifiers)
    assert loads_of(members)["new"] >= 2
    assert max(loads_of(members).values()) <= HYSTERESIS * (min(loads_of(members).values()) + 1)


def test_rows_are_smoothed_over_half_a_minute():
    members = pool("D1")
    members.assigned_to(target("r1", 0.0), 0.0)
    for now in range(1, 5):
        members.assigned_to(target("r1", 10.0), float(now))
    assert members.weight("r1") < 2.5, "a few seconds are no load"
    for now in range(5, int(3 * SMOOTHING_S)):
        members.assigned_to(target("r1", 10.0), float(now))
    assert members.weight("r1") == pytest.approx(11.0, rel=0.06)
    members.leave("r1")
    assert members.weight("r1") == 1.0


def test_a_move_is_looked_for_once_a_second_however_many_ask():
    members = pool("D1")
    verifiers = [target(f"r{n}") for n in range(2)]
    settle(members, verifiers)
    members.renew(drafter("D2"), 1e9, now=0)
    assert ask(members, verifiers, 2 * MOVE_PAUSE_S + 0.9 * LOOK_S) == []
    assert len(ask(members, verifiers, 2 * MOVE_PAUSE_S + LOOK_S)) == 1


def test_the_fullest_drafter_is_left_first():
    members = pool("D1", "D2", "D3")
    verifiers = [target(f"r{n}", linked_to="D1" if n < 5 else "D2") for n in range(9)]
    assert [old for _, old, _ in settle(members, verifiers)] == ["D1", "D2", "D1"]


def test_nobody_moves_while_one_waits():
    members = pool("D1", "D2")
    verifiers = [target(f"r{n}", linked_to="D1") for n in range(4)]
    waits = target("waits", fingerprint="other")
    for number in range(10):
        assert ask(members, [*verifiers, waits], number * MOVE_PAUSE_S) == []
    members.renew(drafter("D3", fingerprint="other"), 1e9, now=0)
    assert len(settle(members, [*verifiers, waits])) == 2


# By place.


def test_a_drafter_on_the_node_is_returned_to_though_another_would_have_a_little_less():
    one, two, three = NODES[0], NODES[4], NODES[7]
    members = pool(drafter("D1", one), drafter("D2", two), drafter("D3", three))
    verifiers = [
        target("r1", 10.0, one, "D1"),
        target("r2", 10.1, one, "D3"),
        target("r3", 9.8, two, "D2"),
        *(target(f"r{n}", 10.0, three, "D3") for n in (4, 5, 6)),
    ]
    first, second = settle(members, verifiers)
    assert first == ("r2", "D3", "D1")
    assert second[1:] == ("D3", "D2")


@pytest.mark.parametrize(("num_targets", "moves"), [(35, []), (36, [("D0", "far")])])
def test_near_is_worth_a_fifth_of_a_fair_share(num_targets, moves):
    members = pool(*(drafter(f"D{n}", NODES[0]) for n in range(7)), drafter("far", NODES[7]))
    verifiers = [target(f"r{n}", place=NODES[0], linked_to=f"D{n % 7}") for n in range(num_targets)]
    assert [tuple(ends) for _, *ends in settle(members, verifiers)] == moves


def test_near_is_no_reason_to_leave_a_drafter_idle():
    members = pool(drafter("D1", NODES[0]), drafter("D2", NODES[1]), drafter("D3", NODES[7]))
    verifiers = [target(f"r{n}", 8.0, NODES[n % 2]) for n in range(4)]
    ask(members, verifiers, 0.0)
    settle(members, verifiers)
    assert sorted(loads_of(members).values()) == [9.0, 9.0, 18.0]


# By round trip.


def test_the_round_trip_of_two_nodes_is_the_least_of_the_last_few():
    here, there = NODES[0], NODES[1]
    trips = RoundTrips()
    assert trips.between(here, there) is None
    for rtt_us in (300.0, 900.0, 0.0, 400.0):
        trips.add(here, there, rtt_us)
    assert trips.between(here, there) == 300.0
    assert trips.between(there, here) is None
    for _ in range(RoundTrips.EACH):
        trips.add(here, there, 500.0)
    assert trips.between(here, there) == 500.0, "they change"
    trips.add(Place(), there, 1.0)
    assert trips.between(Place(), there) is None


def test_no_more_round_trips_are_remembered_than_so_many():
    trips = RoundTrips()
    first, again = Place("first"), Place("again")
    trips.add(first, NODES[0], 100.0)
    trips.add(again, NODES[0], 100.0)
    for number in range(RoundTrips.PAIRS - 1):
        trips.add(Place(f"n{number}"), NODES[0], 100.0)
        trips.add(again, NODES[0], 200.0)
    assert trips.between(first, NODES[0]) is None
    assert trips.between(again, NODES[0]) == 200.0


def test_round_trips_are_those_of_links_that_come_up():
    members = pool(drafter("D1", NODES[1]))
    members.assigned_to(target("r1", place=NODES[0]), 0.0)
    members.report("r1", LinkReport("down", 1, "D1", rtt_us=50.0))
    members.report("r1", LinkReport("up", 1, "gone", rtt_us=50.0))
    members.report("nobody", LinkReport("up", 1, "D1", rtt_us=50.0))
    assert members.round_trips.between(NODES[0], NODES[1]) is None
    members.report("r1", LinkReport("up", 2, "D1", rtt_us=70.0))
    assert members.round_trips.between(NODES[0], NODES[1]) == 70.0
    assert members.links["r1"].epoch == 2


def measured(members, here, **rtts_us):
    for each in members.members.values():
        if each.drafter in rtts_us:
            members.round_trips.add(here, each.place, rtts_us[each.drafter])


HERE = Place("here", zone="z")
ZONE = {name: drafter(name, Place(f"n-{name}", zone="z")) for name in ("D1", "D2", "D3")}


@pytest.mark.parametrize(
    ("rtts_us", "expected"),
    [
        ({}, "D1"),
        ({"D1": 900.0, "D2": 300.0, "D3": 900.0}, "D2"),
        ({"D1": 500.0, "D2": 300.0}, "D1"),
        ({"D1": 600.0, "D2": 100.0}, "D2"),
        ({"D1": 600.0, "D2": 620.0, "D3": 3000.0}, "D1"),
        ({"D1": 3000.0, "D3": 600.0}, "D3"),
        ({"D1": 3000.0}, "D1"),
    ],
)
def test_whoever_has_none_is_assigned_one_whose_round_trip_is_shorter_by_a_power_of_two(rtts_us, expected):
    """One that is not known counts as the median."""
    members = pool(*ZONE.values())
    measured(members, HERE, **rtts_us)
    members.assigned_to(target("r1", place=HERE), 0.0)
    assert members.assigned["r1"] == expected


@pytest.mark.parametrize(
    ("rtts_us", "expected"),
    [
        ({"D1": 1000.0, "D2": 450.0}, "D2"),
        ({"D1": 1000.0, "D2": 510.0}, "D1"),
        ({"D1": 200.0 + RTT_GAIN_US / 2, "D2": 120.0}, "D1"),
        ({"D1": 1000.0}, "D1"),
        ({"D2": 40.0}, "D1"),
        ({"D1": 1000.0, "D2": 450.0, "D3": 60.0}, "D3"),
    ],
)
def test_a_target_moves_to_a_round_trip_that_is_known_to_be_much_shorter(rtts_us, expected):
    members = pool(*ZONE.values())
    measured(members, HERE, **rtts_us)
    moves = settle(members, [target("r1", place=HERE, linked_to="D1")])
    assert members.assigned["r1"] == expected
    assert len(moves) == (expected != "D1")


def test_a_short_round_trip_is_no_reason_to_crowd_nor_to_be_further_away():
    members = pool(*ZONE.values())
    measured(members, HERE, D1=900.0, D2=50.0, D3=900.0)
    verifiers = [target(f"r{n}", place=HERE, linked_to=f"D{n}") for n in (1, 2, 3)]
    assert settle(members, verifiers) == []
    members = pool(drafter("D1", Place("here", zone="z")), ZONE["D2"])
    measured(members, HERE, D1=900.0, D2=50.0)
    assert settle(members, [target("r1", place=HERE, linked_to="D1")]) == []


# No running to and fro.


def anything(seed):
    """A pool with places, loads and round trips at random, and its targets, linked to whomever."""
    rng = random.Random(seed)

    def place():
        return rng.choice([*NODES[:6], Place()])

    kinds = ["", "other"][: rng.choice([1, 1, 2])]
    drafters = [drafter(f"D{n}{kind}", place(), kind) for kind in kinds for n in range(rng.randint(1, 6))]
    members = pool(*drafters)
    verifiers = []
    for number in range(rng.randint(1, 14)):
        linked_to = rng.choice(drafters)
        rows = rng.choice([0.0, 7.0, rng.uniform(0, 8), float(rng.randint(0, 64))])
        verifiers.append(target(f"r{number}", rows, place(), linked_to.drafter, linked_to.fingerprint))
    for verifier in verifiers:
        for each in drafters:
            if rng.random() < 0.7:
                rtt_us = rng.choice([50, 200, 500, 1000, 3000]) * rng.uniform(0.7, 1.4)
                members.round_trips.add(verifier.place, each.place, rtt_us)
    return members, verifiers


def where(members, name):
    return next(each.place for each in members.members.values() if each.drafter == name)


def what_moves_lower(members, fingerprint):
    """Each move lowers it, in the order of tuples, while loads stay."""
    fair, loads = fair_of(members, fingerprint), loads_of(members, fingerprint).values()
    pairs = [
        (each.place, where(members, members.assigned[each.name]))
        for each in members.verifiers.values()
        if each.fingerprint == fingerprint
    ]

    def unevenness(least):
        return round(sum(max(load, least) ** 2 for load in loads), 6)

    distance = sum(ours.distance(theirs) for ours, theirs in pairs)
    rtt_us = sum(members.round_trips.between(*pair) or 0.0 for pair in pairs)
    return unevenness(TOLERANCE * fair), distance, unevenness(fair), rtt_us


@pytest.mark.parametrize(
    "first", [0, 60, *(pytest.param(first, marks=pytest.mark.exhaustive) for first in range(120, 600, 60))]
)
def test_moves_end_and_leave_even_shares_while_loads_stay(first):
    for seed in range(first, first + 60):
        members, verifiers = anything(seed)
        kinds = {each.name: each.fingerprint for each in verifiers}
        assert ask(members, verifiers, 0.0) == []
        moves = 0
        for number in range(1, 3 * len(verifiers) + 3):
            before = {kind: what_moves_lower(members, kind) for kind in set(kinds.values())}
            moved = ask(members, verifiers, number * MOVE_PAUSE_S)
            assert len(moved) <= 1
            for name, _, _ in moved:
                assert what_moves_lower(members, kinds[name]) < before[kinds[name]], seed
            moves += len(moved)
        assert not moved, "the last times nobody has moved"
        assert moves <= 2 * len(verifiers), seed
        for verifier in verifiers:
            loads, fair = loads_of(members, verifier.fingerprint), fair_of(members, verifier.fingerprint)
            own = members.assigned[verifier.name]
            assert own in loads, "of its own models"
            least = min(load for name, load in loads.items() if name != own) if len(loads) > 1 else loads[own]
            assert loads[own] <= HYSTERESIS * max(fair, least + members.weight(verifier.name)) + 1e-6, seed


def bursts(seed, of_places):
    """24 targets on three drafters for a quarter of an hour, each with 16 requests for some seconds and with none for
    some seconds. Returns the moves."""
    rng = random.Random(seed)
    places = {"none": [Place()] * 24, "even": NODES[:3] * 8, "uneven": [*NODES[:2], NODES[1], NODES[1]] * 6}[of_places]
    members = pool(*(drafter(f"D{n}", NODES[n]) for n in range(3)))
    busy, until = [rng.random() < 0.5 for _ in places], [rng.uniform(0, 8) for _ in places]
    moves = 0
    for now in range(900):
        for number, end in enumerate(until):
            if now >= end:
                busy[number], until[number] = not busy[number], now + rng.uniform(2, 8)
        verifiers = [target(f"r{n:02}", 16.0 * busy[n], place) for n, place in enumerate(places)]
        moves += len(ask(members, verifiers, float(now)))
    return moves


FEW = 16
"""Of the 180 that there is time for."""


@pytest.mark.parametrize("places", ["none", "even", "uneven"])
def test_bursts_of_some_seconds_move_few(places):
    assert bursts(1, places) <= FEW


@pytest.mark.parametrize(("constant", "without"), [("SMOOTHING_S", 1e-3), ("HYSTERESIS", 1.0)])
def test_bursts_would_move_many_without(constant, without, monkeypatch):
    monkeypatch.setattr(membership, constant, without)
    assert bursts(1, "uneven") > 2 * FEW
