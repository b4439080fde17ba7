"""The message codec: round trips, splitting over frames, and what does not fit."""

from dataclasses import replace

import numpy as np
import pytest

from outrider.cluster.link.codec import MAX_FRAME_WORDS, MIN_FRAME_WORDS, frame_capacity_words, pack, unpack
from outrider.cluster.link.frame import HEADER_WORDS
from outrider.cluster.link.messages import (
    MAX_BIASED_TOKENS,
    Close,
    CloseReason,
    Commit,
    MessageError,
    Proposals,
    SparseQ,
)
from tests.unit.messages.message_samples import (
    CAPACITY,
    EVERY_KIND,
    INF,
    VOCAB,
    K,
    drawn,
    open_request,
    repack,
    sparse_q,
)


@pytest.mark.parametrize("message", EVERY_KIND, ids=lambda m: type(m).__name__)
def test_round_trip_of_one(message):
    assert repack([message]) == [message]


def test_round_trip_of_many_in_order_over_several_frames():
    messages = EVERY_KIND * 20
    assert len(pack(messages, CAPACITY)) > 3
    assert repack(messages) == messages


def test_sampling_parameters_arrive_to_the_last_bit():
    sampling = drawn(temperature=0.1 + 0.2, top_p=1 / 3, min_p=1 / 7, seed=-(2**62) - 1)
    (message,) = repack([open_request(sampling=sampling)])
    assert message.sampling == sampling


def test_biases_arrive_rounded_to_float32():
    (message,) = repack([open_request(sampling=drawn(biases=((3, 0.1), (4, -INF))))])
    assert message.sampling.biases == ((3, float(np.float32(0.1))), (4, -INF))


def test_arrays_of_ids_are_taken_and_lists_come_out():
    (message,) = repack([Commit(1, 1, np.array([5, 6], dtype=np.int64), 2, 1)])
    assert message == Commit(1, 1, [5, 6], 2, 1)
    assert type(message.token_ids) is list


def test_no_messages_need_no_frame():
    assert pack([], CAPACITY) == []


def test_unpacked_messages_keep_nothing_of_the_payload():
    (payload,) = pack([Proposals(3, 11, [2, 3], q=sparse_q())], CAPACITY)
    (message,) = unpack(payload, VOCAB, K)
    payload[:] = -1
    assert message == Proposals(3, 11, [2, 3], q=sparse_q())


@pytest.mark.parametrize("num_biases", [0, 30])
@pytest.mark.parametrize("prompt_len", [1, 160, 161, 220, 221, 222, 1000])
def test_long_prompt_is_cut_at_growing_offsets(prompt_len, num_biases):
    ids = [i % VOCAB for i in range(prompt_len)]
    sampling = drawn(biases=tuple((i, 1.0) for i in range(num_biases)), only_biased=num_biases > 0)
    later = drawn()
    whole = open_request(prompt_len=prompt_len, token_ids=ids, sampling=sampling)
    pieces = repack([Commit(9, 1, [1], 2, 1), whole, Commit(9, 2, [2], 2, 1)])
    assert pieces[0] == Commit(9, 1, [1], 2, 1)
    assert pieces[-1] == Commit(9, 2, [2], 2, 1)
    offset = 0
    for piece in pieces[1:-1]:
        part = ids[offset : offset + len(piece.token_ids)]
        assert piece == replace(whole, offset=offset, token_ids=part, sampling=later if offset else sampling)
        offset += len(piece.token_ids)
    assert offset == prompt_len


def test_open_fills_frames():
    """3,000 tokens in frames with room for 220 each: 14 frames, not one more."""
    assert len(pack([open_request(prompt_len=3000, token_ids=[1] * 3000)], CAPACITY)) == 14


def test_the_most_biases_fit_the_smallest_frame_whatever_is_before_them():
    sampling = drawn(biases=tuple((i, -float(i)) for i in range(MAX_BIASED_TOKENS)), only_biased=True)
    opening = open_request(sampling=sampling)
    assert repack([opening], MIN_FRAME_WORDS) == [opening]
    before = [Commit(1, 1, [1], 2, 1)] * 700
    assert repack([*before, opening, opening], MIN_FRAME_WORDS) == [*before, opening, opening]


def test_a_later_piece_leaves_the_biases_behind():
    sampling = drawn(biases=((1, 1.0),), only_biased=True)
    (message,) = repack([open_request(offset=1, prompt_len=6, sampling=sampling)])
    assert message.sampling == drawn()


def test_a_q_too_large_for_the_frames_is_refused_where_it_is_asked_for_and_where_it_is_sent():
    capacity = frame_capacity_words(1, 2, 1023)
    assert capacity == MIN_FRAME_WORDS + 64
    wide = SparseQ(np.arange(2 * 1024, dtype=np.int32).reshape(2, 1024), np.full((2, 1024), 1 / 1024, np.float32))
    answer = Proposals(1, 1, [0, 1024], q=wide)
    opening = open_request(num_speculative_tokens=2, sampling=drawn(top_n=1024))
    (payload,) = pack([opening], capacity)
    assert len(pack([answer], capacity)) == 1
    assert unpack(payload, 2000, K, capacity) == [opening]
    with pytest.raises(MessageError, match="do not fit"):
        pack([answer], MIN_FRAME_WORDS)
    with pytest.raises(MessageError, match=r"Open\.top_n: answers of 4107 words"):
        unpack(payload, 2000, K, MIN_FRAME_WORDS)
    assert unpack(payload, 1000, K, MIN_FRAME_WORDS) == [opening], "no more columns than tokens"


def test_message_that_cannot_fit_is_refused():
    with pytest.raises(MessageError, match="Commit: 307 words do not fit"):
        pack([Commit(1, 1, [1] * 300, 2, 1)], CAPACITY)


def test_frame_without_room_for_an_open_is_refused():
    with pytest.raises(MessageError, match="Open"):
        pack([open_request()], HEADER_WORDS + 10)


def test_id_over_32_bits_is_refused_when_packing():
    with pytest.raises(MessageError, match="32-bit"):
        pack([Commit(1, 1, [2**31], 2, 1)], CAPACITY)


@pytest.mark.parametrize(("seqs", "k", "n"), [(1, 4, 0), (16, 4, 0), (370, 32, 0), (24, 5, 64), (1, 32, 300)])
def test_a_round_fits_one_frame(seqs, k, n):
    capacity = frame_capacity_words(seqs, k, n)
    assert capacity >= MIN_FRAME_WORDS
    assert capacity <= MAX_FRAME_WORDS or seqs == 1
    proposals, commits = round_of(seqs, k, n)
    assert len(pack(proposals, capacity)) == 1
    assert len(pack(commits, capacity)) == 1


@pytest.mark.parametrize(("seqs", "k", "n"), [(1024, 32, 0), (128, 4, 64)])
def test_a_large_round_goes_on_in_the_next_frame(seqs, k, n):
    capacity = frame_capacity_words(seqs, k, n)
    assert capacity == MAX_FRAME_WORDS
    proposals, commits = round_of(seqs, k, n)
    most = -(-seqs * (9 + k + 2 * k * n) // (MAX_FRAME_WORDS - 1000))
    assert 1 < len(pack(proposals, capacity)) <= most
    assert [message.request for message in repack(proposals, capacity, k=k)] == list(range(seqs))
    assert repack(commits, capacity, k=k) == commits


def round_of(seqs, k, n):
    """Its messages, either way."""
    q = sparse_q(k, n) if n else None
    ids = [i * n for i in range(k)] if n else [1] * k
    proposals = [Proposals(r, 9, ids, q=q) for r in range(seqs)]
    commits = [m for r in range(seqs) for m in (Commit(r, 9, [1] * (k + 1), 2, 1), Close(r, CloseReason.FINISHED))]
    return proposals, commits


def test_small_deployments_get_the_smallest_frame():
    assert frame_capacity_words(16, 4) == MIN_FRAME_WORDS
