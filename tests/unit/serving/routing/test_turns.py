"""Whose request is next: what is promised, on simulated waits."""

import random
from collections import defaultdict

import pytest

from outrider.actors.serving.routing.turns import _MOST_CLOCKS, Turns

GREEDY, MODEST, THIRD = 1, 2, 3


class Waiting:
    """A wait, and who has been served in it, in order."""

    def __init__(self):
        self.turns = Turns()
        self.callers, self.tokens, self.served = {}, {}, []
        self.left = set()

    def come(self, caller, tokens=100):
        number = len(self.callers)
        self.callers[number], self.tokens[number] = caller, tokens
        self.turns.join(number, caller, tokens)
        self.left.add(number)
        return number

    def leave(self, number):
        self.turns.leave(number)
        self.left.discard(number)

    def serve(self):
        number = self.turns.first(self.left)
        self.turns.serve(number)
        self.left.remove(number)
        self.served.append(number)
        return number


def test_a_caller_with_nothing_before_waits_for_one_request_of_each_other():
    waiting = Waiting()
    for _ in range(50):
        waiting.come(GREEDY, 400)
        waiting.come(THIRD, 4000)
    for _ in range(7):
        waiting.serve()
    late = waiting.come(MODEST, 10_000)
    served = iter(waiting.serve, late)
    before = [waiting.callers[number] for number in served]
    assert before.count(GREEDY) <= 1
    assert before.count(THIRD) <= 1


def test_one_caller_is_served_in_order_of_arrival_whatever_the_sizes():
    waiting = Waiting()
    numbers = [waiting.come(0, tokens) for tokens in (5000, 1, 70, 1, 900)]
    assert [waiting.serve() for _ in numbers] == numbers


def test_what_leaves_costs_nothing():
    waiting = Waiting()
    given_up = [waiting.come(MODEST, 10_000) for _ in range(20)]
    first, second = waiting.come(GREEDY), waiting.come(GREEDY)
    for number in given_up:
        waiting.leave(number)
    again = waiting.come(MODEST)
    assert [waiting.serve() for _ in range(3)] == [first, again, second]


def test_a_caller_that_was_idle_has_no_credit():
    waiting = Waiting()
    for _ in range(100):
        waiting.come(GREEDY)
        waiting.serve()
    for _ in range(10):
        waiting.come(MODEST)
        waiting.come(GREEDY)
    callers = [waiting.callers[waiting.serve()] for _ in range(20)]
    assert 4 <= callers[:10].count(GREEDY) <= 6


def test_only_some_may_be_asked_about():
    waiting = Waiting()
    numbers = [waiting.come(GREEDY) for _ in range(3)]
    late = waiting.come(MODEST)
    assert waiting.turns.first({numbers[1], numbers[2]}) == numbers[1]
    assert waiting.turns.first({numbers[2], late}) == late, "its turn is before that of another's third"
    assert waiting.turns.first(()) is None
    turns = [waiting.turns.turn(number) for number in (numbers[0], late, numbers[1], numbers[2])]
    assert turns == sorted(turns)


def test_what_was_served_or_has_left_is_forgotten():
    waiting = Waiting()
    one, other = waiting.come(GREEDY), waiting.come(GREEDY)
    assert waiting.serve() == one
    for _ in range(2):
        waiting.turns.serve(one)
        waiting.turns.leave(one)
    assert one not in waiting.turns
    assert other in waiting.turns
    for caller in range(THIRD, 5000):
        waiting.come(GREEDY, 10)
        waiting.come(caller, 10)
        waiting.serve()
        waiting.serve()
    waiting.serve()
    assert not waiting.left
    assert len(waiting.turns._clocks) <= _MOST_CLOCKS
    assert not waiting.turns._lines
    assert not waiting.turns._callers


@pytest.mark.parametrize("seed", range(40))
def test_what_is_promised_holds_for_any_traffic(seed):
    """Two callers that both have something waiting get alike, within one request of each; each caller's are served in
    order; whoever stays is served."""
    traffic = random.Random(seed)
    waiting, callers = Waiting(), range(traffic.randint(1, 5))
    greatest = [10 ** traffic.randint(1, 4) for _ in callers]
    had = defaultdict(int)
    since = {}
    """Of each pair of callers: what each had had when both began to wait."""

    def look():
        busy = {waiting.callers[number] for number in waiting.left}
        for one in callers:
            for other in range(one):
                if {one, other} <= busy:
                    began = since.setdefault((one, other), (had[one], had[other]))
                    apart = (had[one] - began[0]) - (had[other] - began[1])
                    assert abs(apart) <= greatest[one] + greatest[other]
                else:
                    since.pop((one, other), None)

    for _ in range(400):
        what = traffic.random()
        if what < 0.5:
            caller = traffic.choice(callers)
            waiting.come(caller, traffic.randint(1, greatest[caller]))
        elif what < 0.6 and waiting.left:
            waiting.leave(traffic.choice(sorted(waiting.left)))
        elif waiting.left:
            number = waiting.serve()
            had[waiting.callers[number]] += waiting.tokens[number]
        look()
    while waiting.left:
        number = waiting.serve()
        had[waiting.callers[number]] += waiting.tokens[number]
        look()
    for caller in callers:
        own = [number for number in waiting.served if waiting.callers[number] == caller]
        assert own == sorted(own)
    assert waiting.turns.first(range(len(waiting.callers))) is None
