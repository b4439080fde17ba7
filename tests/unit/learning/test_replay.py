"""Keeps texts to train on apart from held-out ones."""

from outrider.actors.learning.replay import HELD_TEXTS, PAST_TEXTS, RECENT_TEXTS, Replay
from outrider.actors.learning.texts import Text

TRAINED = 2**63 - 1
"""A prompt's hash that no held-out share takes. Not imported from tiny_learner: this file runs without Transformers."""


def text(number, prompt=TRAINED):
    return Text(prompt, number, None, 0, None, None)


def numbers(texts):
    return [each.sample for each in texts]


def test_half_of_a_batch_is_recent_and_the_rest_of_all_time():
    kept, total = Replay(0.1), 10 * RECENT_TEXTS
    assert kept.batch(8) == []
    assert all(kept.add(text(number)) for number in range(total))
    batch = numbers(each for _ in range(200) for each in kept.batch(8))
    assert len(batch) == 1600
    assert 800 <= sum(number >= total - RECENT_TEXTS for number in batch) < 1000
    assert min(batch) < RECENT_TEXTS
    assert RECENT_TEXTS < kept.num_kept <= RECENT_TEXTS + PAST_TEXTS


def test_prompts_that_are_held_out_are_never_trained_on():
    kept = Replay(0.25)
    for number in range(400):
        assert kept.add(text(number, (number % 4) * 2**61)) == bool(number % 4)
    held = numbers(kept.held_recent() + kept.held_past())
    trained = numbers(each for _ in range(400) for each in kept.batch(8))
    assert held
    assert not {number for number in held if number % 4} | {number for number in trained if number % 4 == 0}
    assert (kept.num_kept, kept.num_held_out) == (300, 100)


def test_held_out_texts_are_the_latest_and_a_sample_of_all():
    kept, total = Replay(0.5), 10 * HELD_TEXTS
    for number in range(total):
        kept.add(text(number, 0))
    assert numbers(kept.held_recent()) == list(range(total - HELD_TEXTS, total))
    assert numbers(kept.held_recent(since=total - 3)) == list(range(total))[-3:]
    assert kept.held_recent(since=total) == []
    assert len(kept.held_past()) == HELD_TEXTS
    assert min(numbers(kept.held_past())) < 5 * HELD_TEXTS


def test_a_quarter_of_a_batch_is_general_and_that_alone_is_not_forgotten():
    general = text(-1)
    kept = Replay(0.25, [general])
    assert kept.batch(8) == [], "nothing has come"
    for number in range(200):
        kept.add(text(number, TRAINED if number % 2 else 0))
    assert all(kept.batch(8).count(general) == 2 for _ in range(50))
    kept.forget()
    assert kept.batch(8) == kept.held_recent() == kept.held_past() == []
    assert kept.num_held_out == 100
    for number in range(1000, 1010):
        kept.add(text(number, TRAINED if number % 2 else 0))
    assert set(numbers(each for _ in range(50) for each in kept.batch(8))) == {1001, 1003, 1005, 1007, 1009, -1}
    assert numbers(kept.held_recent()) == numbers(kept.held_past()) == [1000, 1002, 1004, 1006, 1008]
    assert numbers(kept.held_recent(104)) == [1008]
