"""The message codec on receipt: no words at all that do more than raise MessageError."""

import numpy as np
import pytest

from outrider.cluster.link.codec import MIN_FRAME_WORDS, pack, unpack
from outrider.cluster.link.frame import MAX_INT31
from outrider.cluster.link.messages import (
    MAX_ADAPTERS,
    MAX_TOP_N,
    Commit,
    DraftOrigin,
    MessageError,
    Name,
    PrefetchedProposal,
    Proposals,
    SparseQ,
)
from tests.unit.messages.message_samples import (
    CAPACITY,
    EVERY_KIND,
    VOCAB,
    K,
    drawn,
    lesson,
    open_request,
    repack,
    sparse_q,
)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (open_request(token_ids=[1, 2, 3, 4, VOCAB]), "Open.token_ids"),
        (open_request(token_ids=[-1, 2, 3, 4, 5]), "Open.token_ids"),
        (open_request(num_speculative_tokens=K + 1), "Open.num_speculative_tokens"),
        (open_request(sampling=drawn(biases=((1, 1.0), (VOCAB, 1.0)))), "Open.biases"),
        (PrefetchedProposal(1, 2, 3, VOCAB, [1], DraftOrigin.MISS), "PrefetchedProposal.next_token"),
        (PrefetchedProposal(1, 2, 3, 4, [VOCAB], DraftOrigin.MISS), "PrefetchedProposal.token_ids"),
        (PrefetchedProposal(1, 2, 3, 4, [1] * (K + 1), DraftOrigin.MISS), "PrefetchedProposal.token_ids"),
        (Commit(1, 1, [VOCAB], 2, 1), "Commit.token_ids"),
        (Commit(1, 1, [3, -1, 3], 2, 1), "Commit.token_ids"),
        (Commit(1, 1, [1] * (K + 2), 2, 1), "Commit.token_ids"),
        (Proposals(1, 1, [VOCAB]), "Proposals.token_ids"),
        (Proposals(1, 1, [1] * (K + 1)), "Proposals.token_ids"),
        (Proposals(1, 1, [1], q=SparseQ(np.array([[1, VOCAB]], np.int32), np.array([[1, 0]], np.float32))), "q_ids"),
    ],
)
def test_vocabulary_and_k_are_checked_on_receipt(message, field):
    (payload,) = pack([message], CAPACITY)
    with pytest.raises(MessageError) as caught:
        unpack(payload, VOCAB, K)
    assert caught.value.field.endswith(field)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ([], "payload.count"),
        ([0], "payload.count"),
        ([-1, 3, 4, 1, 1], "payload.count"),
        ([2, 3, 4, 1, 1], "payload.count"),
        ([MAX_INT31, 3, 4, 1, 1], "payload.count"),
        ([1, 3, 4, 1, 1, 0], "payload.count"),
        ([2, 3, 4, 1, 1, 3, 4, 1, 1, 3, 4, 1, 1], "payload.count"),
        ([2, 2, 10, 1, 1, 4, 4, 0, 5, 5, 5], "payload.count"),
        ([1, 0, 4, 1, 1], "message.type"),
        ([1, 8, 4, 1, 1], "message.type"),
        ([1, 3, 3, 1, 1], "message.length"),
        ([1, 3, 5, 1, 1], "message.length"),
        ([1, 3, 5, 1, 1, 1], "message.length"),
        ([1, 2, -4, 1, 1], "message.length"),
        ([1, 2, MAX_INT31, 1, 1], "message.length"),
        ([1, 3, 4, 1, 9], "Close.reason"),
        ([1, 3, 4, -1, 1], "Close.request"),
        ([1, 2, 7, 1, 1, 4, 4, 0], "Commit.token_ids"),
        ([1, 2, 8, 1, 1, K + 1, 0, 0, 5], "Commit.num_wanted"),
        ([1, 2, 8, 1, 1, -1, 0, 0, 5], "Commit.num_wanted"),
        ([1, 2, 8, 1, 1, 2, 3, 0, 5], "Commit.num_on_miss"),
        ([1, 2, 8, 1, 1, 2, -1, 0, 5], "Commit.num_on_miss"),
        ([1, 2, 8, 1, 1, 2, 1, 2, 5], "Commit.has_drafts"),
        ([1, 2, 8, 1, 1, 0, 0, 1, 5], "Commit.has_drafts"),
        ([1, 7, 9, 1, 2, 3, 4, 9, 0, 5], "PrefetchedProposal.origin"),
        ([1, 7, 9, 1, 2, 3, 4, 2, -1, 5], "PrefetchedProposal.step_us"),
        ([1, 7, 9, 1, 2, 1, 4, 2, 0, 5], "PrefetchedProposal.position"),
        ([1, 7, 9, 1, 2, 3, -4, 2, 0, 5], "PrefetchedProposal.next_token"),
        ([1, 7, 8, 1, 2, 3, 4, 2, 0], "PrefetchedProposal.token_ids"),
        ([1, 4, 9, 1, 1, 9, 0, 0, 0, 0], "Proposals.status"),
        ([1, 4, 9, 1, 1, 1, 0, 0, 4, 0], "Proposals.origin"),
        ([1, 4, 9, 1, 1, 1, 0, 0, 1, -1], "Proposals.step_us"),
        ([1, 4, 9, 1, 1, 1, -1, 0, 0, 0], "Proposals.token_ids"),
        ([1, 4, 9, 1, 1, 1, 1, 0, 0, 0], "Proposals.q_ids"),
        ([1, 4, 9, 1, 1, 1, 0, 5, 0, 0], "Proposals.q_ids"),
        ([1, 4, 9, 1, 1, 1, 4, MAX_INT31, 0, 0], "Proposals.q_ids"),
    ],
)
def test_wrong_words_are_named(words, field):
    with pytest.raises(MessageError) as caught:
        unpack(np.array(words, dtype=np.int32), VOCAB, K)
    assert caught.value.field == field


def opening_words(**changes):
    """A valid Open of one token, biases at offset 0, with words changed by index."""
    (payload,) = pack(
        [open_request(prompt_len=9, token_ids=[1], sampling=drawn(biases=((5, 1.0), (6, 2.0))))], CAPACITY
    )
    for index, word in changes.items():
        payload[1 + int(index[1:])] = word
    return payload


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ({"w5": K + 1}, "Open.num_speculative_tokens"),
        ({"w6": -1}, "Open.mode"),
        ({"w6": 4}, "Open.mode"),
        ({"w7": -1}, "Open.top_n"),
        ({"w7": MAX_TOP_N + 1}, "Open.top_n"),
        ({"w8": -1}, "Open.top_k"),
        ({"w9": 2}, "Open.only_biased"),
        ({"w9": 1, "w4": 1}, "Open.only_biased"),
        ({"w4": 1}, "Open.biases"),
        ({"w10": -1}, "Open.biases"),
        ({"w10": MAX_INT31}, "Open.biases"),
        ({"w10": 3}, "Open.biases"),
        ({"w11": -1}, "Open.adapter"),
        ({"w11": MAX_ADAPTERS + 1}, "Open.adapter"),
        ({"w17": 0x7FF80000}, "Open.temperature"),
        ({"w17": 0, "w16": 0}, "Open.temperature"),
        ({"w19": -1}, "Open.top_p"),
        ({"w21": -1}, "Open.min_p"),
        ({"w22": 6}, "Open.biases"),
        ({"w22": -1}, "Open.biases"),
        ({"w22": VOCAB}, "Open.biases"),
        ({"w24": 0x7F800000}, "Open.biases"),
        ({"w24": 0x7FA00000}, "Open.biases"),
        ({"w9": 1, "w24": -0x800000, "w25": -0x800000}, "Open.only_biased"),
        ({"w26": VOCAB}, "Open.token_ids"),
    ],
)
def test_wrong_words_of_an_open_are_named(words, field):
    assert len(unpack(opening_words(), VOCAB, K)) == 1
    with pytest.raises(MessageError) as caught:
        unpack(opening_words(**words), VOCAB, K)
    assert caught.value.field == field


def test_an_open_that_is_all_biases_has_no_tokens():
    payload = opening_words(w1=26)[:-1]
    with pytest.raises(MessageError, match=r"Open\.token_ids: empty"):
        unpack(payload, VOCAB, K)


def survives(payload):
    """True when the words are valid messages. Anything but MessageError, warnings included, fails the test."""
    try:
        messages = unpack(payload, VOCAB, K)
    except MessageError:
        return False
    assert repack(messages, capacity=MIN_FRAME_WORDS) == messages
    return True


def test_random_words():
    generator = np.random.default_rng(1)
    for _ in range(2000):
        size = int(generator.integers(0, 80))
        words = generator.integers(-(2**31), 2**31, size, dtype=np.int32)
        small = generator.random(size) < 0.8
        words[small] = generator.integers(-1, 16, int(small.sum()), dtype=np.int32)
        survives(words)


def test_valid_payloads_with_a_few_words_replaced():
    """Reaches every branch behind the counts: both outcomes must occur."""
    generator = np.random.default_rng(2)
    (valid,) = pack(EVERY_KIND, MIN_FRAME_WORDS)
    outcomes = set()
    for _ in range(4000):
        words = valid.copy()
        where = generator.integers(0, len(words), int(generator.integers(1, 4)))
        choices = [generator.integers(-2, 20), generator.integers(-(2**31), 2**31)]
        words[where] = choices[int(generator.integers(0, 2))]
        outcomes.add(
            survives(words[: int(generator.integers(1, len(words) + 1))] if generator.random() < 0.2 else words)
        )
    assert outcomes == {True, False}


def test_q_bits_at_random():
    generator = np.random.default_rng(3)
    (valid,) = pack([Proposals(3, 11, [2, 3], q=sparse_q())], CAPACITY)
    for _ in range(2000):
        words = valid.copy()
        words[int(generator.integers(len(words) - 6, len(words)))] = generator.integers(-(2**31), 2**31)
        survives(words)


def test_words_of_an_open_at_random():
    generator = np.random.default_rng(4)
    outcomes = set()
    for _ in range(4000):
        words = opening_words()
        where = generator.integers(1, len(words), int(generator.integers(1, 4)))
        choices = [generator.integers(-2, 30, len(where)), generator.integers(-(2**31), 2**31, len(where))]
        words[where] = choices[int(generator.integers(0, 2))]
        outcomes.add(survives(words))
    assert outcomes == {True, False}


LESSON_WORDS = {"position": 4, "rows": 5, "width": 6, "an id": 7, "a log-probability": 23}


@pytest.mark.parametrize(
    ("word", "value", "field"),
    [
        ("position", -1, "TrainingSample.position"),
        ("rows", 0, "TrainingSample.ids"),
        ("rows", K + 2, "TrainingSample.ids"),
        ("rows", 1, "TrainingSample.ids"),
        ("width", 17, "TrainingSample.ids"),
        ("width", -8, "TrainingSample.ids"),
        ("an id", VOCAB, "TrainingSample.ids"),
        ("an id", -1, "TrainingSample.ids"),
        ("an id", 1, "TrainingSample.ids"),  # twice in its row
        ("a log-probability", 0x7E007E00, "TrainingSample.log_p"),  # not a number
        ("a log-probability", 0x3C003C00, "TrainingSample.log_p"),  # 1, above 0
        ("a log-probability", 0, "TrainingSample.log_p"),  # 0, and others beside it
    ],
)
def test_words_that_are_no_lesson(word, value, field):
    (words,) = pack([lesson()], CAPACITY)
    words[LESSON_WORDS[word]] = value
    with pytest.raises(MessageError, match=field.replace(".", r"\.")):
        unpack(words, VOCAB, K)


@pytest.mark.parametrize(
    ("word", "value"), [(4, 0), (4, 5), (4, 4), (5, -1)], ids=["none", "more than come", "padding too", "not ASCII"]
)
def test_words_that_are_no_name(word, value):
    (words,) = pack([Name(1, "abc")], CAPACITY)
    words[word] = value
    with pytest.raises(MessageError, match=r"Name\.request_id"):
        unpack(words, VOCAB, K)
