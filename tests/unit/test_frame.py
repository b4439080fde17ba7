"""The frame header: what goes in comes out, and whatever is damaged or foreign is refused by its field's name."""

import pytest

from outrider.cluster.link.frame import MAX_INT31, FrameError, FrameKind, decode, encode

EPOCH = 7


@pytest.mark.parametrize("kind", list(FrameKind))
def test_round_trip(kind):
    assert decode(encode(kind, EPOCH, b"payload", 1234), EPOCH) == (kind, 1234, b"payload")
    assert decode(encode(kind, EPOCH), EPOCH) == (kind, 0, b"")


def test_work_is_clamped_not_wrapped():
    assert decode(encode(FrameKind.DATA, EPOCH, work_us=2**40), EPOCH).work_us == MAX_INT31


def test_an_epoch_that_does_not_fit_is_refused():
    with pytest.raises(FrameError, match="epoch"):
        encode(FrameKind.DATA, 2**32)


@pytest.mark.parametrize(("index", "field"), [(0, "version"), (1, "version"), (2, "kind"), (4, "epoch"), (7, "epoch")])
def test_damage_is_named(index, field):
    damaged = bytearray(encode(FrameKind.DATA, EPOCH, b"payload"))
    damaged[index] ^= 0x40
    with pytest.raises(FrameError, match=f"^{field}:"):
        decode(bytes(damaged), EPOCH)


def test_a_frame_of_an_old_link_is_refused():
    with pytest.raises(FrameError, match=r"^epoch: found 6, expected 7"):
        decode(encode(FrameKind.DATA, 6), EPOCH)


@pytest.mark.parametrize("length", range(12))
def test_a_frame_cut_in_its_header_is_refused(length):
    with pytest.raises(FrameError, match=r"^length:"):
        decode(encode(FrameKind.DATA, EPOCH)[:length], EPOCH)
