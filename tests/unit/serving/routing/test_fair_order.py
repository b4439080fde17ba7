"""Order of service and shares of a step: the rules, and what they do to simulated queues."""

import heapq

import pytest

from outrider.actors.round.scheduling import LONG_PREFILL_SHARE, FairOrder, prefill_threshold

LIMIT_S = 10.0


def virtual(arrival_s, tokens, limit_s=LIMIT_S, order=None, **fields):
    return (order or FairOrder(limit_s)).virtual_arrival_ms(1.7e9 + arrival_s, tokens, 16, **fields)


def test_vllms_priority_decides_first_then_size_up_to_the_limit_then_arrival():
    assert virtual(1.0, 10) < virtual(0.0, 4000), "a small request overtakes a large one that came shortly before"
    assert virtual(9.9, 10) > virtual(0.0, 4000), "but not one that has waited for its size"
    for tokens in (1, 1000, 10**6):
        assert virtual(0.0, tokens) < virtual(LIMIT_S + 0.001, 1), "nobody is overtaken after the limit"
    assert virtual(0.0, 100) < virtual(0.001, 100)
    assert virtual(0.0, 10**6, limit_s=0.0) < virtual(0.001, 1, limit_s=0.0), "without overtaking"
    assert virtual(100.0, 10**6, priority=-1) < virtual(0.0, 1)
    assert virtual(0.0, 1, priority=1) > virtual(1e6, 10**6)
    assert abs(virtual(0.0, 1, priority=-(2**15))) < 2**63


def served(requests, limit_s=LIMIT_S, tokens_per_s=500.0):
    """Serves requests, each (arrival in s, tokens, caller), one after the other. Returns the seconds each waited."""
    order = FairOrder(limit_s)
    arrivals = sorted((arrival, number) for number, (arrival, *_) in enumerate(requests))
    waiting, waited, now = [], {}, 0.0
    while arrivals or waiting:
        now = max(now, arrivals[0][0]) if not waiting and arrivals else now
        while arrivals and arrivals[0][0] <= now:
            arrival, number = arrivals.pop(0)
            _, tokens, caller = requests[number]
            fields = {"caller": caller} if caller else {}
            heapq.heappush(waiting, (virtual(arrival, tokens, limit_s, order, **fields), arrival, number))
        _, arrival, number = heapq.heappop(waiting)
        waited[number] = now - arrival
        now += requests[number][1] / tokens_per_s
    return waited


@pytest.mark.parametrize("callers", [(0, 0), (7, 8)], ids=["unknown", "known"])
def test_a_huge_request_is_served_however_many_small_ones_come(callers):
    """Small requests alone ask for all there is, for minutes; none that came after the limit is served first."""
    small, huge = callers
    waited = served([*((0.04 * number, 20, small) for number in range(5000)), (1.0, 4000, huge)])
    assert waited[5000] <= LIMIT_S + 0.1
    assert max(waited.values()) <= LIMIT_S + 4000 / 500 + 0.1


def test_who_asks_for_little_does_not_wait_behind_who_asks_for_much():
    def waits(flood_caller, caller):
        flood = [(0.0, 100, flood_caller)] * 400
        waited = served(flood + [(1.0 + 2 * number, 100, caller) for number in range(5)])
        return [waited[400 + number] for number in range(5)]

    known = waits(7, 8)
    assert max(known) < 10.5
    assert sum(known[1:]) / 4 < 5, "but for the first moments, in which nobody knew"
    assert min(waits(0, 0)) > 60


def test_requests_alike_of_one_caller_keep_their_order():
    order = FairOrder(LIMIT_S)
    found = [virtual(0.01 * number, 300, order=order, caller=7) for number in range(2000)]
    assert found == sorted(found)
    assert all(ms <= (1.7e9 + 0.01 * number + LIMIT_S) * 1e3 + 1 for number, ms in enumerate(found))


def test_a_flood_counts_while_it_lasts_however_many_others_come_and_is_then_forgotten():
    order = FairOrder(LIMIT_S)
    for _ in range(100):
        virtual(0.0, 400, order=order, caller=10**6)
    for caller in range(1, 3000):
        virtual(0.5, 10, order=order, caller=caller)
        virtual(0.5 + 0.2 * (caller % 2), 1, order=order)
    assert virtual(1.0, 10, order=order, caller=10**6) > virtual(1.0, 10) + 5000
    assert virtual(3 * LIMIT_S, 10, order=order, caller=10**6) == virtual(3 * LIMIT_S, 10)


@pytest.mark.parametrize("caller", [1, 2], ids=["the same caller", "another caller"])
def test_a_flood_of_answers_does_not_keep_a_request_waiting_long_after_the_limit(caller):
    order = FairOrder(LIMIT_S)
    flood = [order.virtual_arrival_ms(0.0, 10, 512, caller=1, answer=answer) for answer in range(64)]
    late = order.virtual_arrival_ms(30.0, 10, 512, caller=caller)
    assert sum(place < late for place in flood) < 40


@pytest.mark.parametrize("num_prefills", [0, 1, 2, 5])
def test_long_prompts_share_their_part_of_a_step(num_prefills):
    each = prefill_threshold(2048, num_prefills, at_least=5)
    assert each == int(2048 * LONG_PREFILL_SHARE) // max(1, num_prefills)
    assert prefill_threshold(64, 100, at_least=9) == 9, "a round's own tokens are never cut"
