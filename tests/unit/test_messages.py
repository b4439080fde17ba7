"""The message codec: round trips, splitting, and no words at all that do more than raise MessageError."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

from actors.message_codec import MIN_FRAME_WORDS, frame_capacity_words, pack, unpack
from actors.messages import (
    Close,
    CloseReason,
    Commit,
    MessageError,
    Open,
    Proposals,
    ProposalStatus,
    SparseQ,
)
from cluster.link.frame import HEADER_WORDS, MAX_INT31

VOCAB, K = 1000, 4
CAPACITY = 256


def open_request(**changes):
    values = {
        "request": 3,
        "prompt_len": 5,
        "offset": 0,
        "token_ids": [1, 2, 3, 4, 5],
        "num_speculative_tokens": 4,
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": 20,
        "seed": 12345678901,
    }
    return Open(**(values | changes))


def sparse_q(k=2, n=3):
    probs = np.full((k, n), 1 / n, dtype=np.float32)
    return SparseQ(np.arange(k * n, dtype=np.int32).reshape(k, n), probs)


EVERY_KIND = [
    open_request(),
    open_request(seed=None, temperature=0.0, top_p=1.0, top_k=-1),
    open_request(seed=-(2**63), request=MAX_INT31),
    open_request(seed=0),
    Commit(3, 5, [7]),
    Commit(3, 6, [1, 2, 3, 4, 999]),
    Close(3, CloseReason.FINISHED),
    Close(0, CloseReason.ABORTED),
    Close(1, CloseReason.PREEMPTED),
    Proposals(3, 11, [1, 2, 3, 4]),
    Proposals(3, 11, []),
    *(Proposals(3, 11, [], status) for status in ProposalStatus),
    Proposals(3, 11, [2, 3], q=sparse_q()),
]


def repack(messages, capacity=CAPACITY, vocab_size=VOCAB, k=K):
    payloads = pack(messages, capacity)
    assert all(p.dtype == np.int32 and p.ndim == 1 and len(p) <= capacity - HEADER_WORDS for p in payloads)
    return [message for payload in payloads for message in unpack(payload, vocab_size, k)]


@pytest.mark.parametrize("message", EVERY_KIND, ids=lambda m: type(m).__name__)
def test_round_trip_of_one(message):
    assert repack([message]) == [message]


def test_round_trip_of_many_in_order_over_several_frames():
    messages = EVERY_KIND * 20
    assert len(pack(messages, CAPACITY)) > 3
    assert repack(messages) == messages


def test_sampling_parameters_arrive_to_the_last_bit():
    (message,) = repack([open_request(temperature=0.1 + 0.2, top_p=1 / 3)])
    assert (message.temperature, message.top_p) == (0.1 + 0.2, 1 / 3)


def test_arrays_of_ids_are_taken_and_lists_come_out():
    (message,) = repack([Commit(1, 1, np.array([5, 6], dtype=np.int64))])
    assert message == Commit(1, 1, [5, 6])
    assert type(message.token_ids) is list


def test_commit_properties():
    commit = Commit(1, 10, [4, 5, 6])
    assert (commit.accepted_len, commit.next_token, commit.committed_len) == (2, 6, 13)


def test_no_messages_need_no_frame():
    assert pack([], CAPACITY) == []


def test_unpacked_messages_keep_nothing_of_the_payload():
    (payload,) = pack([Proposals(3, 11, [2, 3], q=sparse_q())], CAPACITY)
    (message,) = unpack(payload, VOCAB, K)
    payload[:] = -1
    assert message == Proposals(3, 11, [2, 3], q=sparse_q())


@pytest.mark.parametrize("prompt_len", [1, 225, 226, 227, 1000])
def test_long_prompt_is_cut_at_growing_offsets(prompt_len):
    ids = [i % VOCAB for i in range(prompt_len)]
    whole = open_request(prompt_len=prompt_len, token_ids=ids)
    pieces = repack([Commit(9, 1, [1]), whole, Commit(9, 2, [2])])
    assert pieces[0] == Commit(9, 1, [1])
    assert pieces[-1] == Commit(9, 2, [2])
    offset = 0
    for piece in pieces[1:-1]:
        assert piece == replace(whole, offset=offset, token_ids=ids[offset : offset + len(piece.token_ids)])
        offset += len(piece.token_ids)
    assert offset == prompt_len


def test_open_fills_frames():
    """3,000 tokens in frames with room for 225 each: 14 frames, not one more."""
    assert len(pack([open_request(prompt_len=3000, token_ids=[1] * 3000)], CAPACITY)) == 14


def test_message_that_cannot_fit_is_refused():
    with pytest.raises(MessageError, match="Commit: 304 words do not fit"):
        pack([Commit(1, 1, [1] * 300)], CAPACITY)


def test_frame_without_room_for_an_open_is_refused():
    with pytest.raises(MessageError, match="Open"):
        pack([open_request()], HEADER_WORDS + 10)


def test_id_over_32_bits_is_refused_when_packing():
    with pytest.raises(MessageError, match="32-bit"):
        pack([Commit(1, 1, [2**31])], CAPACITY)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: open_request(request=-1), "Open.request"),
        (lambda: open_request(request=2**31), "Open.request"),
        (lambda: open_request(prompt_len=-5), "Open.prompt_len"),
        (lambda: open_request(token_ids=[]), "Open.token_ids"),
        (lambda: open_request(offset=1), "Open.offset"),
        (lambda: open_request(offset=-1), "Open.offset"),
        (lambda: open_request(num_speculative_tokens=-1), "Open.num_speculative_tokens"),
        (lambda: open_request(temperature=float("nan")), "Open.temperature"),
        (lambda: open_request(temperature=float("inf")), "Open.temperature"),
        (lambda: open_request(temperature=-0.1), "Open.temperature"),
        (lambda: open_request(top_p=0.0), "Open.top_p"),
        (lambda: open_request(top_p=float("nan")), "Open.top_p"),
        (lambda: open_request(top_k=-2), "Open.top_k"),
        (lambda: open_request(seed=2**63), "Open.seed"),
        (lambda: Commit(-1, 1, [1]), "Commit.request"),
        (lambda: Commit(1, -1, [1]), "Commit.base_committed_len"),
        (lambda: Commit(1, MAX_INT31, [1]), "Commit.base_committed_len"),
        (lambda: Commit(1, 1, []), "Commit.token_ids"),
        (lambda: Close(-1, CloseReason.FINISHED), "Close.request"),
        (lambda: Proposals(-1, 1, []), "Proposals.request"),
        (lambda: Proposals(1, -1, []), "Proposals.base_committed_len"),
        (lambda: Proposals(1, 1, [1], ProposalStatus.NOT_READY), "Proposals.token_ids"),
        (lambda: Proposals(1, 1, [2], q=sparse_q()), "Proposals.q_ids"),
        (lambda: Proposals(1, 1, [2, 999], q=sparse_q()), "Proposals.q_probs"),
    ],
)
def test_a_wrong_message_cannot_be_made(make, field):
    with pytest.raises(MessageError) as caught:
        make()
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("ids", "probs", "field"),
    [
        ([[1, 2]], [[0.5, 0.4]], "Proposals.q_probs"),
        ([[1, 2]], [[0.6, 0.402]], "Proposals.q_probs"),
        ([[1, 2]], [[1.1, -0.1]], "Proposals.q_probs"),
        ([[1, 2]], [[float("nan"), 1.0]], "Proposals.q_probs"),
        ([[1, 2]], [[float("inf"), 0.0]], "Proposals.q_probs"),
        ([[1, 2], [3, 4]], [[0.5, 0.5], [0.5, 0.6]], "Proposals.q_probs"),
        ([[1, 2]], [[1.0]], "Proposals.q_probs"),
        ([[7, 7]], [[0.5, 0.5]], "Proposals.q_ids"),
        ([[1, 2], [8, 8]], [[0.5, 0.5], [1.0, 0.0]], "Proposals.q_ids"),
        ([[-1, 2]], [[0.5, 0.5]], "Proposals.q_ids"),
        ([[]], [[]], "Proposals.q_ids"),
    ],
)
def test_a_wrong_q_cannot_be_made(ids, probs, field):
    with pytest.raises(MessageError) as caught:
        SparseQ(np.array(ids, dtype=np.int32), np.array(probs, dtype=np.float32))
    assert caught.value.field == field


def test_q_within_the_tolerance_is_taken():
    SparseQ(np.array([[1, 2]], np.int32), np.array([[0.5, 0.5009]], np.float32))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (open_request(token_ids=[1, 2, 3, 4, VOCAB]), "Open.token_ids"),
        (open_request(token_ids=[-1, 2, 3, 4, 5]), "Open.token_ids"),
        (open_request(num_speculative_tokens=K + 1), "Open.num_speculative_tokens"),
        (Commit(1, 1, [VOCAB]), "Commit.token_ids"),
        (Commit(1, 1, [3, -1, 3]), "Commit.token_ids"),
        (Commit(1, 1, [1] * (K + 2)), "Commit.token_ids"),
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
        ([2, 2, 8, 1, 1, 5, 5, 5, 5], "payload.count"),
        ([1, 0, 4, 1, 1], "message.type"),
        ([1, 5, 4, 1, 1], "message.type"),
        ([1, 3, 3, 1, 1], "message.length"),
        ([1, 3, 5, 1, 1], "message.length"),
        ([1, 3, 5, 1, 1, 1], "message.length"),
        ([1, 2, -4, 1, 1], "message.length"),
        ([1, 2, MAX_INT31, 1, 1], "message.length"),
        ([1, 3, 4, 1, 9], "Close.reason"),
        ([1, 3, 4, -1, 1], "Close.request"),
        ([1, 2, 4, 1, 1], "Commit.token_ids"),
        ([1, 4, 7, 1, 1, 9, 0, 0], "Proposals.status"),
        ([1, 4, 7, 1, 1, 1, -1, 0], "Proposals.token_ids"),
        ([1, 4, 7, 1, 1, 1, 1, 0], "Proposals.q_ids"),
        ([1, 4, 7, 1, 1, 1, 0, 5], "Proposals.q_ids"),
        ([1, 4, 7, 1, 1, 1, 4, MAX_INT31], "Proposals.q_ids"),
        ([1, 1, 15, 1, 1, 0, 4, 0, 7, *[0] * 6, 1], "Open.seed"),
    ],
)
def test_wrong_words_are_named(words, field):
    with pytest.raises(MessageError) as caught:
        unpack(np.array(words, dtype=np.int32), VOCAB, K)
    assert caught.value.field == field


def survives(payload):
    """True when the words are valid messages. Anything but MessageError, warnings included, fails the test."""
    try:
        messages = unpack(payload, VOCAB, K)
    except MessageError:
        return False
    assert repack(messages, capacity=MIN_FRAME_WORDS) == messages
    return True


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


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


@pytest.mark.parametrize(("seqs", "k", "n"), [(1, 4, 0), (16, 4, 0), (1024, 32, 0), (64, 5, 64)])
def test_a_round_fits_one_frame(seqs, k, n):
    capacity = frame_capacity_words(seqs, k, n)
    assert capacity >= MIN_FRAME_WORDS
    q = sparse_q(k, n) if n else None
    ids = [i * n for i in range(k)] if n else [1] * k
    proposals = [Proposals(r, 9, ids, q=q) for r in range(seqs)]
    commits = [m for r in range(seqs) for m in (Commit(r, 9, [1] * (k + 1)), Close(r, CloseReason.FINISHED))]
    assert len(pack(proposals, capacity)) == 1
    assert len(pack(commits, capacity)) == 1


def test_small_deployments_get_the_smallest_frame():
    assert frame_capacity_words(16, 4) == MIN_FRAME_WORDS
