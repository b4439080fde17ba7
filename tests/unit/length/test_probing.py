"""Probes: when, how often, at what cost."""

from actors.length.limits import LengthLimits
from actors.length.probing import Probing

LIMITS = LengthLimits(max_tokens=4)


def probe_rounds(probing, rounds, off=("a",), on=(), cost_s=0.0):
    """Rounds, from 1, in which a probe begins."""
    return [
        r
        for r in range(1, rounds + 1)
        if probing.advance(list(off), list(on), round_s=0.1, extra_s=lambda n: n * cost_s)
    ]


def tracked(*request_ids):
    probing = Probing(LIMITS)
    for request_id in request_ids:
        probing.track(request_id)
    return probing


def test_back_off_doubles_up_to_the_maximum():
    begun = probe_rounds(tracked("a"), 4000)
    rest = LIMITS.probe_rounds - 1
    gaps = [after - before - rest for before, after in zip([-rest, *begun], begun, strict=False)]
    assert gaps[:7] == [16, 32, 64, 128, 256, 512, 512]


def test_a_probe_lasts_its_rounds_and_says_when_it_ends():
    probing = tracked("a")
    probe_rounds(probing, 15)
    lasts = []
    for _ in range(6):
        probing.advance(["a"], [], 0.1, lambda n: 0.0)
        lasts.append((probing.probed.get("a"), probing.ended))
    assert lasts == [(3, False), (2, False), (1, False), (0, True), (None, False), (None, False)]


def test_probes_cost_no_more_than_their_share_of_time():
    rounds, cost_s = 20_000, 0.05
    begun = probe_rounds(tracked("a"), rounds, cost_s=cost_s)
    assert 0 < len(begun) * LIMITS.probe_rounds * cost_s <= (rounds + 100) * 0.1 * LIMITS.probe_share


def test_a_probe_that_costs_more_than_can_be_saved_up_is_made_by_fewer():
    requests = [f"r{i}" for i in range(64)]
    probing = tracked(*requests)
    probe_rounds(probing, 3000, off=requests, cost_s=0.1)
    assert 0 < probing.probes < 64


def test_who_is_half_way_joins_in():
    probing = tracked("a", "b", "c")
    probe_rounds(probing, 5, off=["a"])
    probe_rounds(probing, 8, off=["a", "b"])
    probe_rounds(probing, 2, off=["a", "b", "c"])
    assert sorted(probing.advance(["a", "b", "c"], [], 0.1, lambda n: 0.0)) == ["a", "b"]


def test_settling_makes_the_next_probes_early_again():
    probing = tracked("a")
    probe_rounds(probing, 200)
    assert probe_rounds(probing, 40, off=[], on=["a"]) == []
    assert probe_rounds(probing, 20)[0] == 16


def test_untracked_requests_are_forgotten():
    probing = tracked("a")
    probe_rounds(probing, 16)
    probing.untrack("a")
    probing.untrack("a")
    assert len(probing) == 0
    assert not probing.probed
