"""A full replica with a huge request waiting in front of a small one."""

import threading
import time

import pytest

from tests.support.cluster.serving import HANG_GUARD_S, wait_until

pytestmark = [pytest.mark.exhaustive, pytest.mark.engine, pytest.mark.timeout(900)]

SEATS = 4
"""max_num_seqs."""

HUGE = [number % 250 for number in range(900)]
SMALL = [1, 2, 3]
TOGETHER_S = 1.5
"""A request overtakes by 2 ms a token: the small one what came this much before it, with something to spare."""


def test_a_small_request_gets_the_seat_before_a_huge_one_that_came_just_before(ngram_pair):
    assert ngram_pair.config.target.max_num_seqs == SEATS
    order = wait_until(lambda: order_of_two(ngram_pair), HANG_GUARD_S, "two requests soon after each other")
    assert order == ["small", "huge"]


def order_of_two(ngram_pair):
    """Who of them began first; None when they came too far apart to tell anything."""
    begun, order = [], []

    def run(prompt, max_tokens, name=None):
        options = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "speculation": name is not None}
        with ngram_pair.client.stream(prompt, **options) as messages:
            for number, _ in enumerate(messages):
                if number == 0:
                    (begun if name is None else order).append(name)

    def start(*args):
        thread = threading.Thread(target=run, args=args, daemon=True)
        thread.start()
        return thread

    # Their answers differ in length, so that seats come free one by one.
    threads = [start([number, 9, 9], 800 + 12 * number) for number in range(SEATS)]
    wait_until(lambda: len(begun) == SEATS, HANG_GUARD_S, "every seat taken")
    began = time.monotonic()
    threads.append(start(HUGE, 100, "huge"))

    def waits_or_runs():
        return order or ngram_pair.status().target.waiting == 1

    wait_until(waits_or_runs, HANG_GUARD_S, "the huge one waiting, or begun", every_s=0.01)
    apart_s = time.monotonic() - began
    came_in_time = not order and apart_s <= TOGETHER_S
    threads.append(start(SMALL, 8, "small"))
    for thread in threads:
        thread.join(HANG_GUARD_S)
    return order if came_in_time else None
