"""The frame header: what goes in comes out, and whatever is damaged or foreign is refused by its field's name."""

import numpy as np
import pytest

from outrider.cluster.link.frame import HEADER_WORDS, MAX_INT31, FrameError, FrameKind, decode, encode, next_sequence

CAPACITY = 64
EPOCH = 7


def framed(payload=(1, 2, 3), **header):
    buffer = np.full(CAPACITY, -1, dtype=np.int32)
    header = {"epoch": EPOCH, "sequence": 5, "kind": FrameKind.DATA} | header
    used = encode(buffer, payload=np.array(payload, dtype=np.int32), **header)
    return buffer, used


@pytest.mark.parametrize("kind", list(FrameKind))
def test_round_trip(kind):
    buffer, used = framed([4, -1, MAX_INT31], kind=kind, work_us=1234)
    assert used == HEADER_WORDS + 3
    frame = decode(buffer, EPOCH, 5)
    assert (frame.kind, frame.sequence, frame.work_us) == (kind, 5, 1234)
    assert frame.payload.tolist() == [4, -1, MAX_INT31]
    assert frame.nbytes == 4 * used


@pytest.mark.parametrize("words", [0, CAPACITY - HEADER_WORDS])
def test_empty_and_full_payload(words):
    buffer, used = framed(range(words))
    assert used == HEADER_WORDS + words
    assert decode(buffer, EPOCH).payload.tolist() == list(range(words))


def test_payload_beyond_capacity_is_refused():
    with pytest.raises(FrameError, match=r"length: payload of 49 words does not fit a frame of 64"):
        framed(range(CAPACITY - HEADER_WORDS + 1))


@pytest.mark.parametrize("payload", [np.zeros(3, np.int64), np.zeros((3, 1), np.int32), np.zeros(3, np.float32)])
def test_payload_must_be_a_row_of_int32(payload):
    with pytest.raises(FrameError, match="row of int32"):
        encode(np.zeros(CAPACITY, np.int32), epoch=1, sequence=0, kind=FrameKind.DATA, payload=payload)


def test_header_value_out_of_range_is_refused():
    with pytest.raises(FrameError, match="header"):
        framed(epoch=2**31)


def test_work_is_clamped_not_wrapped():
    assert decode(framed(work_us=2**40)[0], EPOCH).work_us == MAX_INT31


def test_encode_writes_into_the_given_buffer_only_what_it_uses():
    buffer, used = framed()
    assert (buffer[used:] == -1).all()


def test_every_single_flipped_bit_is_caught():
    """Header and payload; nothing beyond the payload matters."""
    buffer, used = framed()
    decode(buffer, EPOCH, 5)
    for word in range(used):
        for bit in range(32):
            damaged = buffer.copy()
            damaged.view(np.uint32)[word] ^= np.uint32(1 << bit)
            with pytest.raises(FrameError, match=r"^(magic|version|length|checksum):"):
                decode(damaged, EPOCH, 5)
    buffer[used:] = 99
    decode(buffer, EPOCH, 5)


@pytest.mark.parametrize(
    ("word", "reason"),
    [(0, "magic"), (1, "version"), (2, "checksum"), (3, "checksum"), (15, "checksum"), (HEADER_WORDS + 1, "checksum")],
)
def test_damage_is_named(word, reason):
    buffer, _ = framed()
    buffer[word] ^= 1
    with pytest.raises(FrameError, match=f"^{reason}:"):
        decode(buffer, EPOCH)


@pytest.mark.parametrize("words", [-1, CAPACITY - HEADER_WORDS + 1, MAX_INT31, -(2**31)])
def test_length_outside_the_buffer(words):
    buffer, _ = framed()
    buffer[5] = words
    with pytest.raises(FrameError, match=r"^length:"):
        decode(buffer, EPOCH)


def test_intact_frame_of_another_epoch():
    with pytest.raises(FrameError, match="epoch: found 7, expected 8"):
        decode(framed()[0], EPOCH + 1)


def test_intact_frame_of_unknown_kind():
    with pytest.raises(FrameError, match="kind: 9 is none of DATA=1"):
        decode(framed(kind=9)[0], EPOCH)


def test_sequence_is_checked_only_when_expected():
    buffer, _ = framed(sequence=5)
    decode(buffer, EPOCH)
    with pytest.raises(FrameError, match="sequence: found 5, expected 6"):
        decode(buffer, EPOCH, 6)


def test_random_words_are_never_a_frame():
    generator = np.random.default_rng(0)
    for size in (0, 1, 15, 16, 64):
        for _ in range(200):
            with pytest.raises(FrameError):
                decode(generator.integers(-(2**31), 2**31, size, dtype=np.int32), EPOCH)


def test_sequence_wraps():
    assert next_sequence(0) == 1
    assert next_sequence(MAX_INT31) == 0
