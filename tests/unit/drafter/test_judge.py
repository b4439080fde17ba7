"""Who drafts for a request: what a judge makes of what it hears of look-ups and models."""

import itertools
import random

from outrider.actors.drafter.judge import MODEL, Judge, Offer
from tests.bench.several_drafters import SMALL

K = 4


def played(rates, rounds=60, seed=0):
    """A judge that has heard of so many rounds of one request, and its record."""
    chance = random.Random(seed)
    judge = Judge(list(rates))
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


def test_a_model_that_nothing_is_heard_of_is_tried_ever_more_rarely():
    judge, record = played({MODEL: 0.1, "ngram": 0.9})
    judge.chosen[MODEL] = 0
    offers = [Offer(MODEL, 0), Offer(MODEL, 2, 0.012), Offer("ngram", 4)]
    tried = [number for number in range(1, 200) if judge.choose(record, offers) is offers[1]]
    assert tried == [25, 74, 171]
    assert judge.chosen[MODEL] == 3
    for _ in range(200):
        judge.verdict(record, MODEL, 0, 1)
        assert judge.choose(record, offers) is offers[2], "it is heard of"


def leading(rates, steps_s):
    """A judge that has heard as much of each model, and who leads then."""
    judge = Judge(list(rates), tuple(rates))
    record = judge.record()
    judge.took(0.025)
    for name, rate in rates.items():
        judge.verdict(record, name, round(200 * rate), 200)
    return judge, record, judge.lead(record, list(rates), K, 2, steps_s)


STEPS_S = {MODEL: 0.006, SMALL: 0.0014}


def test_the_larger_leads_where_it_is_so_much_better_that_its_steps_pay():
    assert leading({MODEL: 0.8, SMALL: 0.3}, STEPS_S)[2] == MODEL
    assert leading({MODEL: 0.85, SMALL: 0.8}, STEPS_S)[2] == SMALL
    assert leading({MODEL: 0.85, SMALL: 0.8}, {MODEL: 0.0015, SMALL: 0.0014})[2] == MODEL


def test_a_leader_stays_where_another_is_no_better_for_certain():
    judge, record, leader = leading({MODEL: 0.8, SMALL: 0.8}, dict.fromkeys(STEPS_S, 0.003))
    other = SMALL if leader == MODEL else MODEL
    assert judge.lead(record, list(STEPS_S), K, 2, {leader: 0.0032, other: 0.003}) == leader
    assert judge.lead(record, list(STEPS_S), K, 2, {leader: 0.006, other: 0.003}) == other


def test_what_is_heard_of_one_that_rests_counts_at_once():
    judge, record, leader = leading({MODEL: 0.8, SMALL: 0.3}, STEPS_S)
    assert leader == MODEL
    judge.verdict(record, SMALL, 1800, 2000)
    assert judge.lead(record, list(STEPS_S), K, 2, STEPS_S) == SMALL


def test_one_that_nothing_is_heard_of_is_tried_ever_more_rarely():
    judge, record, _ = leading({MODEL: 0.8, SMALL: 0.1}, STEPS_S)
    led = []
    for _ in range(200):
        led.append(judge.lead(record, list(STEPS_S), K, 2, STEPS_S))
        judge.verdict(record, MODEL, 3, 4)
    trials = [number for number, name in enumerate(led) if name == SMALL]
    gaps = [after - before for before, after in itertools.pairwise(trials) if after - before > 1]
    assert trials
    assert gaps == sorted(gaps)
    assert len(trials) < 20


def test_one_that_leads_and_is_never_sent_drafts_as_rarely_as_one_alone():
    judge = Judge([*STEPS_S, "ngram"], tuple(STEPS_S))
    record = judge.record()
    judge.took(0.02)
    for name, rate in {MODEL: 0.5, SMALL: 0.1, "ngram": 0.9}.items():
        judge.verdict(record, name, round(200 * rate), 200)
    offers, tried = [Offer(MODEL, 0), Offer(MODEL, 2, 0.012), Offer("ngram", 4)], []
    for number in range(1, 200):
        assert judge.lead(record, list(STEPS_S), K, 2, STEPS_S) == MODEL
        judge.verdict(record, SMALL, 0, 1)
        if judge.choose(record, offers) is offers[1]:
            tried.append(number)
    assert tried == [24, 73, 170]
