"""Whose drafts are sent: what a judge makes of what it hears of look-ups and the model."""

import random

from outrider.actors.drafter.lookup_drafters import MODEL, DrafterSelector, Offer


def played(rates, rounds=60, seed=0):
    """A judge that has heard of so many rounds of one request, and its record."""
    chance = random.Random(seed)
    judge = DrafterSelector(list(rates))
    record = judge.record()
    for _ in range(rounds):
        for name, rate in rates.items():
            right = next((n for n in range(4) if chance.random() >= rate), 4)
            judge.verdict(record, name, right, min(right + 1, 4))
        judge.took(0.02)
    return judge, record


def test_the_one_with_the_better_drafts_is_chosen():
    for rates in ({MODEL: 0.8, "ngram": 0.3}, {MODEL: 0.3, "ngram": 0.8}):
        judge, record = played(rates)
        best = judge.choose(record, [Offer(MODEL, 4), Offer("ngram", 4)])
        assert best.drafter == max(rates, key=rates.get)


def test_a_few_good_drafts_at_once_beat_more_that_are_waited_for():
    judge, record = played({MODEL: 0.8, "ngram": 0.75})
    offers = [Offer(MODEL, 4, 0.02), Offer("ngram", 3)]
    assert judge.choose(record, offers).drafter == "ngram"
    assert judge.choose(record, [Offer(MODEL, 4, 0.0005), Offer("ngram", 1)]).drafter == MODEL


def test_a_model_that_is_hardly_ever_right_is_not_waited_for():
    judge, record = played({MODEL: 0.05})
    assert judge.choose(record, [Offer(MODEL, 0), Offer(MODEL, 2, 0.012)]).wait_s == 0
    judge, record = played({MODEL: 0.9})
    assert judge.choose(record, [Offer(MODEL, 0), Offer(MODEL, 2, 0.012)]).wait_s > 0


def test_a_new_request_begins_with_what_others_have_shown_and_soon_has_its_own():
    judge, _ = played({MODEL: 0.9, "ngram": 0.1}, rounds=200)
    record = judge.record()
    offers = [Offer(MODEL, 4), Offer("ngram", 4)]
    assert judge.choose(record, offers).drafter == MODEL
    for _ in range(4):
        judge.verdict(record, MODEL, 0, 1)
        judge.verdict(record, "ngram", 4, 4)
    assert judge.choose(record, offers).drafter == "ngram"


def test_a_model_that_nothing_is_heard_of_is_tried_now_and_then():
    judge, record = played({MODEL: 0.1, "ngram": 0.9})
    offers = [Offer(MODEL, 0), Offer(MODEL, 2, 0.012), Offer("ngram", 4)]
    tried = [number for number in range(1, 200) if judge.choose(record, offers) is offers[1]]
    assert tried == [65, 130, 195]
    assert judge.chosen[MODEL] == 3
    for _ in range(200):
        judge.verdict(record, MODEL, 0, 1)
        assert judge.choose(record, offers) is offers[2], "it is heard of"
