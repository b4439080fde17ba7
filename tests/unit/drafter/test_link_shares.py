"""Who is next among links that share a drafter: shares of its steps, in virtual time."""

import itertools
import random
from collections import Counter

import pytest

from outrider.actors.drafter.link_shares import MAX_LAG_STEPS, MIN_WEIGHT, LinkShares

CAPACITY = 128


def shares_of(*accepted):
    """Links 1, 2, ... with one sequence each, whose targets accept that share of their drafts."""
    shares = LinkShares()
    for link_id, right in enumerate(accepted, 1):
        shares.opened(link_id)
        shares.verified(link_id, round(1000 * right), 1000)
    return shares


def step(shares, amounts, capacity=CAPACITY):
    """One step. amounts: of every link the pieces that it has to do. Returns what each was given."""
    shares.begin()
    turns, given = shares.turns(capacity), Counter()
    left_out = set()
    for link_id, amount in turns.over({link_id: zip(itertools.repeat(link_id), of) for link_id, of in amounts.items()}):
        fits = min(amount, capacity - given.total())
        turns.gave(link_id, fits)
        given[link_id] += fits
        if given.total() == capacity:
            left_out.update(amounts)
            break
    shares.charge(given, left_out)
    return given


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_as_the_weights_over_any_interval_in_which_all_have_more_to_do(seed):
    rng = random.Random(seed)
    accepted = [rng.choice([0.0, 0.3, 0.5, 0.8, 1.0]) for _ in range(rng.randint(2, 6))]
    weights = dict(enumerate((max(share, MIN_WEIGHT) for share in accepted), 1))
    shares = shares_of(*accepted)
    largest = rng.choice([1, 2, 3])
    history = [dict.fromkeys(weights, 0.0)]
    for _ in range(60):
        step(shares, {link_id: [rng.randint(1, largest) for _ in range(CAPACITY)] for link_id in weights})
        history.append(shares.steps())
    assert sum(history[-1].values()) == pytest.approx(60)
    for since, until in itertools.combinations(history, 2):
        times = [(until[link_id] - since[link_id]) / weight for link_id, weight in weights.items()]
        # Start-time Fair Queuing's bound; half a step, for what the others get in any case of the one in which somebody
        # catches up; and 1% for what is believed of a link before it has shown its acceptance.
        pieces = sorted(largest / CAPACITY / weight for weight in weights.values())
        bound = pieces[-1] + pieces[-2] + 0.5 / sum(weights.values())
        assert max(times) - min(times) <= bound + 0.01 * max(times)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_waits_while_there_is_room_and_each_link_keeps_its_order(seed):
    rng = random.Random(seed)
    shares = shares_of(*[rng.random() for _ in range(rng.randint(1, 5))])
    links = range(1, len(shares.steps()) + 1)
    for _ in range(40):
        shares.begin()
        queues = {link_id: [(link_id, n) for n in range(rng.randint(0, 9))] for link_id in links}
        turns, served = shares.turns(CAPACITY), []
        for link_id, n in turns.over({link_id: iter(queue) for link_id, queue in queues.items()}):
            served.append((link_id, n))
            turns.gave(link_id, rng.randint(0, 3))
        for link_id in links:
            assert [item for item in served if item[0] == link_id] == queues[link_id]
        if served:
            shares.charge(Counter(link_id for link_id, _ in served), rng.sample(links, rng.randint(0, len(links))))


def test_a_link_that_comes_back_has_no_credit_for_the_time_it_was_idle():
    shares = shares_of(0.5, 0.5)
    for _ in range(1000):
        step(shares, {1: [1] * 200})
    had = Counter()
    for _ in range(4):
        had.update(step(shares, {1: [1] * 200, 2: [1] * 200}))
    # The one that was served last may be a step behind.
    assert had[2] - had[1] <= CAPACITY
    assert had[1] >= CAPACITY


def test_a_link_that_was_held_back_for_long_leaves_the_others_half_of_their_share():
    """Its prompts waited while the other had rows: neither may then do without the other for many steps."""
    shares = shares_of(0.5, 0.5)
    for _ in range(100):
        shares.begin()
        shares.charge({1: 30}, {2})
    catching_up = [step(shares, {1: [1] * 200, 2: [1] * 200}) for _ in range(100)]
    assert all(given[1] >= CAPACITY / 4 for given in catching_up)
    assert catching_up[0][2] > catching_up[-1][2]
    assert sum(given[2] - given[1] for given in catching_up) <= (MAX_LAG_STEPS + 2) * CAPACITY
    assert abs(catching_up[-1][1] - CAPACITY / 2) <= 1


def test_a_link_whose_drafts_are_never_accepted_is_not_starved():
    shares = shares_of(1.0, 0.0)
    had = Counter()
    for _ in range(100):
        had.update(step(shares, {1: [1] * 200, 2: [1] * 200}))
    assert had[2] / had.total() == pytest.approx(MIN_WEIGHT / (1 + MIN_WEIGHT), rel=0.05)
    assert shares.steps()[1] + shares.steps()[2] == pytest.approx(100)


def test_links_come_and_go_and_leave_nothing():
    shares = LinkShares()
    for link_id in range(100):
        shares.opened(link_id)
        assert not shares.contended
        shares.opened(link_id)
        shares.opened(1000)
        assert shares.contended
        step(shares, {link_id: [1], 1000: [1]})
        for of in (link_id, link_id, 1000):
            shares.closed(of)
        shares.unlink(link_id)
    assert list(shares.steps()) == [1000]
