"""Rounds along a text: exact for every way to verify, whatever the drafts would have been."""

import itertools

import pytest

from outrider.actors.learning.rounds import StepTimes, Tally, look_up, walk


def test_greedy_rounds_are_walked_as_they_would_run():
    # Drafts that would match: round 1 accepts two and is rejected at the third; the next starts behind that token.
    same = [1, 1, 0, 1, 0, 1, 1, 1, 0, 0, 0]
    tally = walk(same, same, 3)
    # Starts at 0 (2 accepted), 3 (1), 5 (3, and the bonus token at 8); 9 and 10 have no room for a whole round.
    assert tally.rounds == 3
    assert tally.reached.tolist() == [3, 3, 2]
    assert tally.accepted.tolist() == [3, 2, 1]
    assert tally.tokens_per_round == pytest.approx(3)
    assert tally.acceptance_rate == pytest.approx(6 / 9)
    assert tally.per_token == pytest.approx(6 / 8)


def test_independent_tokens_give_the_known_formula():
    alpha, k = 0.6, 4
    tally = walk([alpha] * 5000, [alpha] * 5000, k)
    assert tally.by_position == pytest.approx([alpha] * k)
    assert tally.tokens_per_round == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))


def test_later_positions_are_conditioned_on_the_drafts_before_them():
    """Every text of two tokens, weighted by the target's probability, against rejection sampling computed outright."""
    p, q = {(): [0.7, 0.3], (0,): [0.9, 0.1], (1,): [0.2, 0.8]}, {(): [0.4, 0.6], (0,): [0.6, 0.4], (1,): [0.9, 0.1]}

    def overlap(context):
        return sum(map(min, p[context], q[context]))

    tally = Tally(2)
    for text in itertools.product((0, 1), repeat=2):
        weight = p[()][text[0]] * p[text[:1]][text[1]]
        contexts = [text[:index] for index in range(2)]
        moves_on = [min(1.0, q[c][x] / p[c][x]) for c, x in zip(contexts, text, strict=True)]
        part = walk([overlap(context) for context in contexts], moves_on, 2)
        for name in ("reached", "accepted"):
            setattr(tally, name, getattr(tally, name) + weight * getattr(part, name))
    first = overlap(())
    both = sum(min(p[()][x], q[()][x]) * overlap((x,)) for x in (0, 1))
    assert tally.by_position == pytest.approx([first, both / first])


def test_a_text_too_short_for_a_round_counts_nothing():
    tally = walk([1.0, 1.0], [1.0, 1.0], 3)
    assert tally.by_position == [None, None, None]
    assert (tally.tokens_per_round, tally.acceptance_rate, tally.per_token) == (1.0, 0.0, 0.0)


def test_tallies_add_up():
    whole, same = Tally(2), [1, 0, 1, 1, 0]
    for _ in range(3):
        whole.add(walk(same, same, 2))
    assert whole.by_position == walk(same, same, 2).by_position
    assert whole.tokens == 15


def test_a_look_up_is_told_what_was_committed_and_may_propose_less():
    answer, told = [5, 6, 7, 8, 9, 1, 2, 3], []
    proposals = iter([[6, 7, 0], [], [1], [3]])

    def propose(committed):
        told.append(list(committed))
        return next(proposals)

    tally = look_up(answer, propose, 3)
    assert told == [[5], [6, 7, 8], [9], [1, 2]]
    # Committed after the last: [3] accepted, at the end, where no whole round fits: not counted.
    assert (tally.rounds, tally.proposed) == (3, 4)
    assert tally.accepted.tolist() == [2, 1, 0]
    assert tally.reached.tolist() == [2, 1, 1]
    assert tally.acceptance_rate == pytest.approx(3 / 4)


def test_speed_ups_at_given_step_times():
    times = StepTimes(target_ms=30, draft_ms=5)
    assert times.in_turn(2.4, 3) == pytest.approx(2.4 * 30 / 45)
    assert times.hidden(2.4, 3) == pytest.approx(2.4)
    assert times.hidden(2.4, 8) == pytest.approx(2.4 * 30 / 45)
