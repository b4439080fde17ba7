"""Parts of answers, as a drafter collects them."""

import numpy as np
import pytest

from outrider.actors.learning.texts import MAX_TEXT_TOKENS
from outrider.actors.learning.training_samples import MAX_PART_TOKENS, SampleCollector
from outrider.cluster.link.messages import TrainingSample

KEY, WIDTH = (1, 7), 4


def lesson(position, rows, log_p=-0.5):
    """Row j of position p names tokens 10 p and on."""
    ids = np.array([[10 * (position + j) + i for i in range(WIDTH)] for j in range(rows)], np.int32)
    return TrainingSample(7, position, ids, np.full((rows, WIDTH), log_p - 2.0, np.float16))


def taught_of(text, *lessons, end=True):
    kept = SampleCollector()
    for each in lessons:
        kept.add(KEY, text, each, greedy=True)
    if end:
        kept.close(KEY, text, greedy=True)
    return kept.take()


def test_what_follows_one_another_is_one_part_with_what_stands_before():
    text = list(range(100, 120))
    (part,) = taught_of(text, lesson(5, 2), lesson(7, 3))
    assert part.ids.tolist() == text[:10]
    assert part.start == 5
    assert part.top_ids[:, 0].tolist() == [50, 60, 70, 80, 90]
    assert part.top_log_p.shape == (5, WIDTH)
    assert part.sample == 0, "greedy"


def test_a_gap_begins_another_part():
    parts = taught_of(list(range(30)), lesson(5, 2), lesson(9, 1))
    assert [(len(part.ids), part.start) for part in parts] == [(7, 5), (10, 9)]


def test_a_part_is_complete_when_it_is_long_or_the_text_ends():
    text = list(range(1, 400))
    assert taught_of(text, lesson(5, 2), end=False) == []
    kept = SampleCollector()
    for position in range(5, 5 + MAX_PART_TOKENS, 2):
        kept.add(KEY, text, lesson(position, 2), greedy=False)
    (part,) = kept.take()
    assert len(part.top_ids) == MAX_PART_TOKENS
    assert part.sample
    assert kept.take() == []


def test_a_long_text_keeps_its_end():
    text = list(range(1, 1000))
    (part,) = taught_of(text, lesson(900, 5))
    assert part.ids.tolist() == text[905 - MAX_TEXT_TOKENS : 905]
    assert part.ids[part.start] == text[900]


@pytest.mark.parametrize("bad", [lesson(19, 2), lesson(0, 2)], ids=["ahead", "0"])
def test_what_cannot_be_learned_from_is_left_out(bad):
    assert taught_of(list(range(20)), bad) == []


def test_all_parts_of_an_answer_and_all_answers_to_a_prompt_are_on_the_same_side():
    text = list(range(1, 900))
    with_a_gap = taught_of(text, lesson(70, 2), lesson(800, 2))
    again = taught_of([*text[:70], 5, 6, 7], lesson(70, 2))
    longer = taught_of(text, lesson(71, 2))
    assert len({part.prompt for part in [*with_a_gap, *again]}) == 1
    assert longer[0].prompt != again[0].prompt
    assert 0 <= again[0].prompt < 2**63


def test_parts_that_nobody_fetches_are_dropped_the_oldest_first():
    kept = SampleCollector()
    text = list(range(1, 300))
    for number in range(2000):
        kept.add((1, number), text, lesson(250, 2), greedy=True)
        kept.close((1, number), text, greedy=True)
    parts = kept.take()
    assert kept.dropped == 2000 - len(parts) > 0
    assert sum(len(part.ids) for part in parts) <= 200_000
