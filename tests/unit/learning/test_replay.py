"""What is kept to train on, and what never is."""

import collections
import random

from outrider.actors.learning.replay import HELD_TEXTS, Replay, Reservoir

TRAINED = 2**63 - 1
"""A prompt that no share holds out."""


def replay(held_out=0.0, recent_tokens=100, past_tokens=200):
    return Replay(recent_tokens, past_tokens, 10, held_out)


def test_a_reservoir_keeps_each_with_the_same_chance():
    counts = collections.Counter()
    for seed in range(2000):
        kept = Reservoir(5, random.Random(seed))
        for item in range(20):
            kept.add(item)
        counts.update(kept.kept)
    assert sum(counts.values()) == 2000 * 5
    assert all(400 < counts[item] < 600 for item in range(20)), counts  # 500, 5 deviations of 20 each


def test_half_of_a_batch_is_recent_and_the_rest_of_all_time():
    kept = replay()
    for item in range(1000):
        kept.add(item, 10, TRAINED)
    batch = [text for _ in range(200) for text in kept.batch(8)]
    recent = sum(text >= 990 for text in batch)
    assert len(batch) == 1600
    assert recent >= 800, "ten texts are recent"
    assert min(batch) < 500
    assert replay().batch(8) == []


def test_prompts_that_are_held_out_are_never_trained_on():
    kept = replay(held_out=0.25)
    for item in range(400):
        kept.add(item, 10, (item % 4) * 2**61)
    held = set(kept.held_recent()) | set(kept.held_past())
    trained = {text for _ in range(400) for text in kept.batch(8)}
    assert held
    assert trained
    assert all(item % 4 == 0 for item in held)
    assert all(item % 4 for item in trained)
    assert (kept.num_added, kept.num_held_out) == (300, 100)


def test_held_out_texts_are_the_latest_and_a_sample_of_all():
    kept = replay(held_out=1.0)
    for item in range(10 * HELD_TEXTS):
        kept.add(item, 10, 0)
    assert kept.held_recent() == list(range(9 * HELD_TEXTS, 10 * HELD_TEXTS))
    assert kept.held_recent(since=10 * HELD_TEXTS - 3) == list(range(10 * HELD_TEXTS))[-3:]
    assert len(kept.held_past()) == HELD_TEXTS
    assert min(kept.held_past()) < 5 * HELD_TEXTS


def test_a_quarter_of_a_batch_is_general_where_there_is_something_general():
    kept = Replay(100, 200, 10, 0.0, general=["g1", "g2"])
    assert kept.batch(8) == [], "nothing has come"
    for item in range(50):
        kept.add(item, 10, TRAINED)
    for _ in range(50):
        batch = kept.batch(8)
        assert len(batch) == 8
        assert sum(isinstance(text, str) for text in batch) == 2


def test_what_is_forgotten_is_in_no_batch_and_in_no_comparison():
    kept = Replay(100, 200, 10, 0.25, general=["general"])
    for item in range(200):
        kept.add(item, 10, TRAINED if item % 2 else 0)
    counted = kept.num_added, kept.num_held_out
    kept.forget()
    assert kept.batch(8) == []
    assert kept.held_recent() == kept.held_past() == []
    assert (kept.num_added, kept.num_held_out) == counted
    for item in range(1000, 1010):
        kept.add(item, 10, TRAINED if item % 2 else 0)
    assert {text for _ in range(50) for text in kept.batch(8)} == {1001, 1003, 1005, 1007, 1009, "general"}
    assert kept.held_recent() == kept.held_past() == [1000, 1002, 1004, 1006, 1008]
    assert kept.held_recent(counted[1] + 4) == [1008]
