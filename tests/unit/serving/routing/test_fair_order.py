"""Order of service and shares of a step: the rules, and what they do to simulated queues."""

import heapq

import pytest

from outrider.actors.round.scheduling import (
    DELAY_MS_PER_TOKEN,
    LONG_PREFILL_SHARE,
    prefill_threshold,
    virtual_arrival_ms,
)

LIMIT_S = 10.0


def virtual(arrival_s, tokens, limit_s=LIMIT_S, **fields):
    return virtual_arrival_ms(1.7e9 + arrival_s, tokens, 16, limit_s, **fields)


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
    assert virtual_arrival_ms(0.0, 10, 10**6, 1e3) == virtual_arrival_ms(0.0, 10, 512, 1e3)


def served(requests, limit_s, tokens_per_s=500.0):
    """One after the other, by virtual arrival. requests: (arrival in s, tokens). Seconds waited, by number."""
    arrivals = sorted((arrival, number) for number, (arrival, _) in enumerate(requests))
    waiting, waited, now = [], {}, 0.0
    while arrivals or waiting:
        now = max(now, arrivals[0][0]) if not waiting and arrivals else now
        while arrivals and arrivals[0][0] <= now:
            arrival, number = arrivals.pop(0)
            heapq.heappush(waiting, (virtual(arrival, requests[number][1], limit_s), arrival, number))
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
