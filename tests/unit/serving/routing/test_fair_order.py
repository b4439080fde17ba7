"""Order of service and shares of a step: the rules, and what they do to simulated queues."""

import heapq

import pytest

from outrider.actors.round.scheduling import (
    DELAY_MS_PER_TOKEN,
    LONG_PREFILL_SHARE,
    FairOrder,
    prefill_threshold,
)

LIMIT_S = 10.0


def virtual(arrival_s, tokens, limit_s=LIMIT_S, order=None, **fields):
    return (order or FairOrder(limit_s)).virtual_arrival_ms(1.7e9 + arrival_s, tokens, 16, **fields)


def test_a_small_request_overtakes_a_large_one_that_came_shortly_before():
    assert virtual(1.0, 10) < virtual(0.0, 4000)
    assert virtual(9.9, 10) > virtual(0.0, 4000), "but not one that has waited for its size"


def test_nobody_is_overtaken_by_what_comes_after_the_limit():
    for tokens in (1, 1000, 10**6):
        assert virtual(0.0, tokens) < virtual(LIMIT_S + 0.001, 1)


def test_requests_alike_are_served_in_order_of_arrival():
    assert virtual(0.0, 100) < virtual(0.001, 100)


def test_without_overtaking_arrival_decides():
    assert virtual(0.0, 10**6, limit_s=0.0) < virtual(0.001, 1, limit_s=0.0)


def test_vllms_priority_comes_first():
    assert virtual(100.0, 10**6, priority=-1) < virtual(0.0, 1)
    assert virtual(0.0, 1, priority=1) > virtual(1e6, 10**6)
    assert abs(virtual(0.0, 1, priority=-(2**15))) < 2**63


def test_a_limitless_answer_is_not_taken_for_a_huge_one():
    assert FairOrder(1e3).virtual_arrival_ms(0.0, 10, 10**6) == FairOrder(1e3).virtual_arrival_ms(0.0, 10, 512)


def served(requests, limit_s, tokens_per_s=500.0):
    """One after the other, by virtual arrival. requests: (arrival in s, tokens), and maybe a caller. Seconds waited, by
    number."""
    order = FairOrder(limit_s)
    arrivals = sorted((request[0], number) for number, request in enumerate(requests))
    waiting, waited, now = [], {}, 0.0
    while arrivals or waiting:
        now = max(now, arrivals[0][0]) if not waiting and arrivals else now
        while arrivals and arrivals[0][0] <= now:
            arrival, number = arrivals.pop(0)
            _, tokens, *caller = requests[number]
            fields = {"caller": caller[0]} if caller else {}
            heapq.heappush(waiting, (virtual(arrival, tokens, limit_s, order, **fields), arrival, number))
        _, arrival, number = heapq.heappop(waiting)
        waited[number] = now - arrival
        now += requests[number][1] / tokens_per_s
    return waited


def test_many_small_ones_do_not_wait_for_a_few_huge_ones():
    huge = [(0.0, 5000)] * 3
    small = [(0.1 + 0.2 * number, 20) for number in range(60)]
    fair, plain = served(huge + small, LIMIT_S), served(huge + small, 0.0)

    def mean(waited):
        return sum(waited[number] for number in range(3, 63)) / 60

    assert mean(fair) < mean(plain) / 2


def test_a_huge_one_is_served_however_many_small_ones_come():
    """Small requests alone ask for all there is, for ten minutes."""
    flood = [(0.04 * number, 20) for number in range(15_000)]
    waited = served([*flood, (1.0, 4000)], LIMIT_S)
    # 25 small ones a second came before its virtual arrival, and none after is served first.
    assert waited[15_000] <= LIMIT_S + 0.1
    assert max(waited.values()) <= LIMIT_S + 4000 / 500 + 0.1


@pytest.mark.parametrize(("num_prefills", "each"), [(0, 1536), (1, 1536), (2, 768), (5, 307)])
def test_long_prompts_share_what_they_may_have(num_prefills, each):
    assert prefill_threshold(2048, num_prefills, at_least=5) == each
    assert num_prefills * each <= 2048 * LONG_PREFILL_SHARE


def test_a_rounds_own_tokens_are_never_cut():
    assert prefill_threshold(64, 100, at_least=9) == 9


def first_tokens(prompts, budget, thresholded):
    """Steps until each prompt is read, all there from the start, scheduled in order as vLLM does."""
    left, steps, step = list(prompts), {}, 0
    started: set[int] = set()
    while any(left):
        step += 1
        room = budget
        limit = prefill_threshold(budget, sum(left[n] > 0 for n in started), 9) if thresholded else budget
        for number in [*sorted(started), *(n for n in range(len(left)) if n not in started)]:
            tokens = min(left[number], limit, room)
            if tokens:
                started.add(number)
                left[number] -= tokens
                room -= tokens
                if not left[number]:
                    steps[number] = step
    return steps


def test_a_small_prompt_gets_in_after_a_step_for_each_huge_one_before_it():
    prompts = [20_000, 20_000, 20_000, 100]
    assert first_tokens(prompts, 2048, thresholded=True)[3] <= 3
    assert first_tokens(prompts, 2048, thresholded=False)[3] > 20


def test_the_delay_is_in_the_units_its_name_says():
    assert virtual(0.0, 1016) - virtual(0.0, 16) == 1000 * DELAY_MS_PER_TOKEN


def test_who_asks_for_little_does_not_wait_behind_who_asks_for_much():
    flood = [(0.0, 100, 7)] * 400
    little = [(1.0 + 2 * number, 100, 8) for number in range(5)]
    told_apart, alike = served(flood + little, LIMIT_S), served([(a, t) for a, t, _ in flood + little], LIMIT_S)
    assert max(told_apart[400 + number] for number in range(5)) < 10.5
    assert min(alike[400 + number] for number in range(5)) > 60
    mean = sum(told_apart[400 + number] for number in range(1, 5)) / 4
    assert mean < 5, "but for the first moments, in which nobody knew"


def test_a_flood_of_one_caller_is_not_starved_by_another_s():
    """Nobody waits behind what came more than the limit later, whoever sent it."""
    small = [(0.04 * number, 20, 7) for number in range(5000)]
    waited = served([*small, (1.0, 4000, 8)], LIMIT_S)
    assert waited[5000] <= LIMIT_S + 0.1


def test_requests_alike_of_one_caller_keep_their_order():
    order = FairOrder(LIMIT_S)
    found = [virtual(0.01 * number, 300, order=order, caller=7) for number in range(2000)]
    assert found == sorted(found)
    assert all(ms <= (1.7e9 + 0.01 * number + LIMIT_S) * 1e3 + 1 for number, ms in enumerate(found))


def test_a_flood_is_forgotten_when_its_time_is_over():
    order = FairOrder(LIMIT_S)
    for _ in range(1000):
        virtual(0.0, 4000, order=order, caller=7)
    assert virtual(2 * LIMIT_S, 10, order=order, caller=7) == virtual(2 * LIMIT_S, 10)


def test_a_flood_is_remembered_however_many_others_come():
    order = FairOrder(LIMIT_S)
    for _ in range(100):
        virtual(0.0, 400, order=order, caller=10**6)
    for caller in range(1, 3000):
        virtual(0.5, 10, order=order, caller=caller)
        virtual(0.5 + 0.2 * (caller % 2), 1, order=order)
    assert virtual(1.0, 10, order=order, caller=10**6) > virtual(1.0, 10) + 5000


def test_clocks_of_callers_that_tell_nothing_are_not_kept():
    order = FairOrder(LIMIT_S)
    for caller in range(1, 10_000):
        virtual(float(caller), 10, order=order, caller=caller)
    assert len(order._clocks) <= 1024


def test_a_flood_of_answers_does_not_keep_the_next_request_waiting() -> None:
    """Whether its caller is the same or another, and long after the limit."""
    order = FairOrder(10.0)
    flood = [order.virtual_arrival_ms(0.0, 10, 512, caller=1, answer=answer) for answer in range(64)]
    for caller in (1, 2):
        late = order.virtual_arrival_ms(30.0, 10, 512, caller=caller)
        assert sum(place < late for place in flood) < 40
