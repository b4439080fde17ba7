"""The message codec: round trips, splitting, and no words at all that do more than raise MessageError."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

from actors.message_codec import MIN_FRAME_WORDS, frame_capacity_words, pack, unpack
from actors.messages import (
    MAX_BIAS,
    MAX_BIASED_TOKENS,
    MAX_NAME_LENGTH,
    MAX_TOP_N,
    Close,
    CloseReason,
    Commit,
    DraftSampling,
    MessageError,
    Name,
    Open,
    Proposals,
    ProposalStatus,
    SparseQ,
)
from actors.verification.mode import Mode
from cluster.link.frame import HEADER_WORDS, MAX_INT31

VOCAB, K = 1000, 4
CAPACITY = 256
INF, NAN = float("inf"), float("nan")


def drawn(**changes):
    values = {
        "mode": Mode.REJECTION,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "seed": 12345678901,
        "top_n": 8,
    }
    return DraftSampling(**(values | changes))


def open_request(**changes):
    values = {
        "request": 3,
        "prompt_len": 5,
        "offset": 0,
        "token_ids": [1, 2, 3, 4, 5],
        "num_speculative_tokens": 4,
        "sampling": drawn(),
    }
    return Open(**(values | changes))


def sparse_q(k=2, n=3):
    probs = np.full((k, n), 1 / n, dtype=np.float32)
    return SparseQ(np.arange(k * n, dtype=np.int32).reshape(k, n), probs)


EVERY_KIND = [
    open_request(),
    open_request(sampling=DraftSampling()),
    open_request(sampling=drawn(seed=-(2**63)), request=MAX_INT31),
    open_request(sampling=drawn(seed=2**63 - 1, mode=Mode.BLOCK, top_n=MAX_TOP_N)),
    open_request(sampling=drawn(mode=Mode.COUPLED, top_k=MAX_INT31, min_p=1.0)),
    open_request(sampling=drawn(biases=((7, 1.5), (999, -INF), (0, -MAX_BIAS)))),
    open_request(sampling=drawn(mode=Mode.GREEDY, biases=((7, 1.5), (8, -INF)), only_biased=True)),
    open_request(offset=1, prompt_len=6, sampling=drawn(top_n=0)),
    Name(3, "x"),
    Name(MAX_INT31, "0_req-1-0a1b2c3d"),
    Name(0, "n" * MAX_NAME_LENGTH),
    Commit(3, 5, [7], 2, 1),
    Commit(3, 6, [1, 2, 3, 4, 999], 2, 1),
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


def test_commit_properties():
    commit = Commit(1, 10, [4, 5, 6], 2, 1)
    assert (commit.accepted_len, commit.next_token, commit.committed_len) == (2, 6, 13)


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
    with pytest.raises(MessageError, match="Commit: 306 words do not fit"):
        pack([Commit(1, 1, [1] * 300, 2, 1)], CAPACITY)


def test_frame_without_room_for_an_open_is_refused():
    with pytest.raises(MessageError, match="Open"):
        pack([open_request()], HEADER_WORDS + 10)


def test_id_over_32_bits_is_refused_when_packing():
    with pytest.raises(MessageError, match="32-bit"):
        pack([Commit(1, 1, [2**31], 2, 1)], CAPACITY)


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
        (lambda: drawn(temperature=NAN), "Open.temperature"),
        (lambda: drawn(temperature=INF), "Open.temperature"),
        (lambda: drawn(temperature=-0.1), "Open.temperature"),
        (lambda: drawn(top_p=0.0), "Open.top_p"),
        (lambda: drawn(top_p=NAN), "Open.top_p"),
        (lambda: drawn(top_k=-1), "Open.top_k"),
        (lambda: drawn(seed=2**63), "Open.seed"),
        (lambda: drawn(mode=1), "Open.mode"),
        (lambda: drawn(mode=Mode.COUPLED, temperature=0.0), "Open.temperature"),
        (lambda: drawn(min_p=NAN), "Open.min_p"),
        (lambda: drawn(min_p=1.1), "Open.min_p"),
        (lambda: drawn(top_n=-1), "Open.top_n"),
        (lambda: drawn(top_n=MAX_TOP_N + 1), "Open.top_n"),
        (lambda: drawn(biases=tuple((i, 0.0) for i in range(MAX_BIASED_TOKENS + 1))), "Open.biases"),
        (lambda: drawn(biases=((1, 0.0), (1, 1.0))), "Open.biases"),
        (lambda: drawn(biases=((-1, 0.0),)), "Open.biases"),
        (lambda: drawn(biases=((1, NAN),)), "Open.biases"),
        (lambda: drawn(biases=((1, INF),)), "Open.biases"),
        (lambda: drawn(biases=((1, 1e39),)), "Open.biases"),
        (lambda: drawn(biases=((1, -1e39),)), "Open.biases"),
        (lambda: drawn(only_biased=True), "Open.only_biased"),
        (lambda: drawn(biases=((1, -INF),), only_biased=True), "Open.only_biased"),
        (lambda: Commit(-1, 1, [1], 2, 1), "Commit.request"),
        (lambda: Commit(1, -1, [1], 2, 1), "Commit.base_committed_len"),
        (lambda: Commit(1, MAX_INT31, [1], 2, 1), "Commit.base_committed_len"),
        (lambda: Commit(1, 1, [], 2, 1), "Commit.token_ids"),
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
        (open_request(sampling=drawn(biases=((1, 1.0), (VOCAB, 1.0)))), "Open.biases"),
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
        ([2, 2, 10, 1, 1, 4, 4, 5, 5, 5, 5], "payload.count"),
        ([1, 0, 4, 1, 1], "message.type"),
        ([1, 6, 4, 1, 1], "message.type"),
        ([1, 3, 3, 1, 1], "message.length"),
        ([1, 3, 5, 1, 1], "message.length"),
        ([1, 3, 5, 1, 1, 1], "message.length"),
        ([1, 2, -4, 1, 1], "message.length"),
        ([1, 2, MAX_INT31, 1, 1], "message.length"),
        ([1, 3, 4, 1, 9], "Close.reason"),
        ([1, 3, 4, -1, 1], "Close.request"),
        ([1, 2, 6, 1, 1, 4, 4], "Commit.token_ids"),
        ([1, 2, 7, 1, 1, K + 1, 0, 5], "Commit.num_wanted"),
        ([1, 2, 7, 1, 1, -1, 0, 5], "Commit.num_wanted"),
        ([1, 2, 7, 1, 1, 2, 3, 5], "Commit.num_on_miss"),
        ([1, 2, 7, 1, 1, 2, -1, 5], "Commit.num_on_miss"),
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
        ({"w14": 0x7FF80000}, "Open.temperature"),
        ({"w14": 0, "w13": 0}, "Open.temperature"),
        ({"w16": -1}, "Open.top_p"),
        ({"w18": -1}, "Open.min_p"),
        ({"w19": 6}, "Open.biases"),
        ({"w19": -1}, "Open.biases"),
        ({"w19": VOCAB}, "Open.biases"),
        ({"w21": 0x7F800000}, "Open.biases"),
        ({"w21": 0x7FA00000}, "Open.biases"),
        ({"w9": 1, "w21": -0x800000, "w22": -0x800000}, "Open.only_biased"),
        ({"w23": VOCAB}, "Open.token_ids"),
    ],
)
def test_wrong_words_of_an_open_are_named(words, field):
    assert len(unpack(opening_words(), VOCAB, K)) == 1
    with pytest.raises(MessageError) as caught:
        unpack(opening_words(**words), VOCAB, K)
    assert caught.value.field == field


def test_an_open_that_is_all_biases_has_no_tokens():
    payload = opening_words(w1=23)[:-1]
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


@pytest.mark.parametrize(("seqs", "k", "n"), [(1, 4, 0), (16, 4, 0), (1024, 32, 0), (64, 5, 64)])
def test_a_round_fits_one_frame(seqs, k, n):
    capacity = frame_capacity_words(seqs, k, n)
    assert capacity >= MIN_FRAME_WORDS
    q = sparse_q(k, n) if n else None
    ids = [i * n for i in range(k)] if n else [1] * k
    proposals = [Proposals(r, 9, ids, q=q) for r in range(seqs)]
    commits = [m for r in range(seqs) for m in (Commit(r, 9, [1] * (k + 1), 2, 1), Close(r, CloseReason.FINISHED))]
    assert len(pack(proposals, capacity)) == 1
    assert len(pack(commits, capacity)) == 1


def test_small_deployments_get_the_smallest_frame():
    assert frame_capacity_words(16, 4) == MIN_FRAME_WORDS


@pytest.mark.parametrize("name", ["", "n" * (MAX_NAME_LENGTH + 1), "two\nlines", "ü"])
def test_a_name_that_cannot_be_sent(name):
    with pytest.raises(MessageError, match=r"Name\.request_id"):
        Name(1, name)


@pytest.mark.parametrize(
    ("word", "value"), [(4, 0), (4, 5), (4, 4), (5, -1)], ids=["none", "more than come", "padding too", "not ASCII"]
)
def test_words_that_are_no_name(word, value):
    (words,) = pack([Name(1, "abc")], CAPACITY)
    words[word] = value
    with pytest.raises(MessageError, match=r"Name\.request_id"):
        unpack(words, VOCAB, K)
