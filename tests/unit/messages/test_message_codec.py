"""The message codec: round trips, and no bytes at all that do more than raise MessageError."""

import msgspec
import numpy as np
import pytest

from outrider.cluster.link.messages import (
    Commit,
    DraftOrigin,
    DraftPath,
    MessageError,
    PrefetchedProposal,
    Proposals,
    SparseQ,
    pack,
    unpack,
)
from tests.unit.messages.message_samples import (
    EVERY_KIND,
    INF,
    NAN,
    VOCAB,
    K,
    arrive,
    drawn,
    lesson,
    open_request,
    repack,
)


@pytest.mark.parametrize("message", EVERY_KIND, ids=lambda m: type(m).__name__)
def test_round_trip_of_one(message):
    assert arrive([message])
    assert type(repack([message])[0]) is type(message)


def test_round_trip_of_many_in_order():
    assert arrive(EVERY_KIND * 20)


def test_sampling_parameters_arrive_to_the_last_bit():
    sampling = drawn(temperature=0.1 + 0.2, top_p=1 / 3, min_p=1 / 7, seed=-(2**62) - 1, biases=((3, 0.1), (4, -INF)))
    (message,) = repack([open_request(sampling=sampling)])
    assert message.sampling == sampling


def test_arrays_of_ids_are_taken_and_lists_come_out():
    for ids in (np.array([5, 6], dtype=np.int64), [np.int32(5), np.int64(6)], (5, 6)):
        (message,) = repack([Commit(1, 1, ids, 2, 1)])
        assert message == Commit(1, 1, [5, 6], 2, 1)
        assert type(message.token_ids) is list


@pytest.mark.parametrize("value", [2**70, "5", 1.5, None, object()])
def test_what_is_no_integer_is_refused_at_one_end_or_the_other(value):
    with pytest.raises(MessageError):
        repack([Commit(1, 1, [value], 2, 1)])


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (open_request(token_ids=[1, 2, 3, 4, VOCAB]), "id 1000 is outside"),
        (open_request(num_speculative_tokens=K + 1), "5 drafts"),
        (open_request(sampling=drawn(biases=((1, 1.0), (VOCAB, 1.0)))), "id 1000 is outside"),
        (PrefetchedProposal(1, 2, 3, VOCAB, [1], DraftOrigin.MISS), "id 1000 is outside"),
        (PrefetchedProposal(1, 2, 3, 4, [VOCAB], DraftOrigin.MISS), "id 1000 is outside"),
        (PrefetchedProposal(1, 2, 3, 4, [1] * (K + 1), DraftOrigin.MISS), "5 drafts"),
        (Commit(1, 1, [VOCAB], 2, 1), "id 1000 is outside"),
        (Commit(1, 1, [1] * (K + 2), 2, 1), "5 drafts"),
        (Commit(1, 1, [1], K + 1, 1), "5 drafts"),
        (Proposals(1, 1, [VOCAB]), "id 1000 is outside"),
        (Proposals(1, 1, [1] * (K + 1)), "5 drafts"),
        (Proposals(1, 1, [1], paths=(DraftPath([1, VOCAB], 0.5),)), "id 1000 is outside"),
        (Proposals(1, 1, [1], paths=(DraftPath([1] * (K + 1), 0.5),)), "5 drafts"),
        (
            Proposals(1, 1, [1], q=SparseQ(np.array([[1, VOCAB]], np.int32), np.array([[1, 0]], np.float32))),
            "id 1000 is outside",
        ),
        (lesson(rows=K + 2), "5 drafts"),
        (lesson(rows=K + 1, width=16, first=VOCAB - 79), "id 1000 is outside"),
    ],
)
def test_vocabulary_and_k_are_checked_on_receipt(message, problem):
    with pytest.raises(MessageError, match=f"^{type(message).__name__}: {problem}"):
        repack([message])


Q_IDS = ["<i4", [1, 2], np.array([1, 2], np.int32).tobytes()]
Q_PROBS = ["<f4", [1, 2], np.array([0.5, 0.5], np.float32).tobytes()]


def proposals(q):
    return [4, 1, 1, [1], 1, q, 0, 0]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        # A type, a field or a value that there is not.
        ([9, 1, 1], "payload"),
        ([3, 1], "payload"),
        ([3, 1, 1, 1], "payload"),
        ([3, 1, 9], "payload"),
        ([3, "1", 1], "payload"),
        ({"type": 3}, "payload"),
        ([2, 1, 1, 5, 2, 1], "payload"),
        ([2, 1, 1, [5], 2, 1, 1], "payload"),
        ([4, 1, 1, [], 9], "payload"),
        ([1, 3, [1], 4, {"mode": 9}], "payload"),
        ([1, 3, [1], 4, {"biases": [[1, 1.0, 2]]}], "payload"),
        # What the messages check themselves.
        ([2, 1, 1, [5], 2, 3], "Commit.num_on_miss"),
        ([2, 1, 1, [5], 0, 0, True], "Commit.has_drafts"),
        ([1, 3, [1], 4, {"temperature": NAN}], "Open.temperature"),
        ([1, 3, [1], 4, {"biases": [[1, NAN]]}], "Open.biases"),
        ([6, 1, 1, Q_IDS, Q_PROBS], "TrainingSample.log_p"),
        # Arrays: their type, their shape, their size.
        (proposals([Q_IDS, Q_IDS]), "Proposals.q_probs"),
        (proposals([["<i8", *Q_IDS[1:]], Q_PROBS]), "payload"),
        (proposals([["O", *Q_IDS[1:]], Q_PROBS]), "payload"),
        (proposals([["<i4", [1, 3], Q_IDS[2]], Q_PROBS]), "payload"),
        (proposals([["<i4", [-1, -2], Q_IDS[2]], Q_PROBS]), "payload"),
        (proposals([["<i4", [2], Q_IDS[2]], Q_PROBS]), "payload"),
        (proposals([["<i4", [2**40, 2**40], b""], Q_PROBS]), "payload"),
        (proposals([[["<i4"], [1, 2], Q_IDS[2]], Q_PROBS]), "payload"),
        (proposals([5, Q_PROBS]), "payload"),
        (proposals([["<i4", [0, 2], b""], ["<f4", [0, 2], b""]]), "Proposals.q_ids"),
    ],
)
def test_what_is_no_message_is_named(message, field):
    with pytest.raises(MessageError) as caught:
        unpack(msgspec.msgpack.encode([message]), VOCAB, K)
    assert caught.value.field == field


@pytest.mark.parametrize("payload", [b"", b"\xc0", b"\x91", b"\x91" * 5000, b"\xdd\xff\xff\xff\xff", b"\xa1\xff"])
def test_bytes_that_are_no_list_of_messages(payload):
    with pytest.raises(MessageError, match=r"^payload: "):
        unpack(payload, VOCAB, K)


def survives(payload):
    """Returns whether the bytes are valid messages. Anything but MessageError, warnings included, fails the test."""
    try:
        messages = unpack(payload, VOCAB, K)
    except MessageError:
        return False
    assert arrive(messages)
    return True


def test_valid_payloads_with_a_few_bytes_replaced():
    """Reaches every branch behind the counts: both outcomes must occur."""
    generator = np.random.default_rng(2)
    outcomes = set()
    for _ in range(4000):
        message = EVERY_KIND[int(generator.integers(len(EVERY_KIND)))]
        damaged = bytearray(pack([message]))
        for where in generator.integers(0, len(damaged), int(generator.integers(1, 4))):
            damaged[where] = int(generator.integers(0, 256))
        cut = len(damaged) if generator.random() < 0.8 else int(generator.integers(0, len(damaged)))
        outcomes.add(survives(bytes(damaged[:cut])))
    assert outcomes == {True, False}
