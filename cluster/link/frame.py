"""One frame: a 16-word header and then the payload, at the head of an int32 buffer of fixed capacity.

    word  0  magic             word  4  kind (FrameKind)
    word  1  protocol version  word  5  payload length, words
    word  2  epoch             word  6  work_us: the sender's compute time for this frame
    word  3  sequence          word  7  0, kept for flags
    words 8 to 11  zero, or a keyed MAC on the wire (`cluster/link/authentication.py`)
    words 12 to 14 zero        word 15  crc32 over words 0 to 14 and the payload, unsigned, the MAC taken for zero

Words beyond the payload are whatever the buffer held, and most wires leave them out. How many messages a payload
carries stands at its own head, where the codec that can check it reads it (`cluster/link/messages.py`).
"""

from __future__ import annotations

import enum
import struct
import zlib
from typing import NamedTuple

import numpy as np

MAGIC = 0x4F555452
PROTOCOL_VERSION = 7
HEADER_WORDS = 16
LENGTH_WORD = 5
TAG_WORDS = slice(8, 12)
MAX_INT31 = 2**31 - 1

_CHECKSUM_WORD = HEADER_WORDS - 1
_HEADER = struct.Struct("<15iI")
_NO_PAYLOAD = np.empty(0, dtype=np.int32)


class FrameError(ValueError):
    """A frame that must not be believed. The message starts with the header field at fault."""


class FrameKind(enum.IntEnum):
    DATA = 1
    HEARTBEAT = 2
    PING = 3
    PONG = 4
    CLOSE = 5


_KINDS = {int(kind): kind for kind in FrameKind}


class Frame(NamedTuple):
    """A decoded frame. `payload` is a view of the received buffer: copy what must outlive it."""

    kind: FrameKind
    sequence: int
    work_us: int
    payload: np.ndarray
    """int32 [payload words]"""

    @property
    def nbytes(self) -> int:
        """Bytes in use: header and payload, not the capacity."""
        return 4 * (HEADER_WORDS + len(self.payload))


def next_sequence(sequence: int) -> int:
    """The sequence after this one; wraps after 2**31 frames."""
    return (sequence + 1) & MAX_INT31


def encode(
    into: np.ndarray,
    *,
    epoch: int,
    sequence: int,
    kind: FrameKind,
    payload: np.ndarray = _NO_PAYLOAD,
    work_us: int = 0,
) -> int:
    """Write a frame into the int32 buffer `into` [capacity words]; return the words in use.

    Raises FrameError when the payload does not fit, is not a row of int32, or a header value is out of range.
    """
    words = len(payload)
    used = HEADER_WORDS + words
    if used > len(into):
        raise FrameError(f"length: payload of {words} words does not fit a frame of {len(into)}")
    if payload.dtype != np.int32 or payload.ndim != 1:
        raise FrameError(f"length: payload must be one row of int32, not {payload.dtype} {payload.shape}")
    into[HEADER_WORDS:used] = payload
    work_us = min(max(work_us, 0), MAX_INT31)
    try:
        _HEADER.pack_into(
            into, 0, MAGIC, PROTOCOL_VERSION, epoch, sequence, kind, words, work_us, 0, 0, 0, 0, 0, 0, 0, 0, 0
        )
    except struct.error as error:
        raise FrameError(f"header: epoch {epoch} or sequence {sequence}: {error}") from None
    into.view(np.uint32)[_CHECKSUM_WORD] = _checksum(into, used)
    return used


def decode(buffer: np.ndarray, expected_epoch: int, expected_sequence: int | None = None) -> Frame:
    """Read a frame from a full int32 buffer [capacity words].

    Checked in this order: magic, version, length, checksum, epoch, kind, sequence (when one is expected), so a
    damaged field is called damaged and only an intact one is called foreign. Raises FrameError at the first.
    """
    if len(buffer) < HEADER_WORDS:
        raise FrameError(f"length: a buffer of {len(buffer)} words cannot hold a header")
    magic, version, epoch, sequence, kind, words, work_us, *_, checksum = _HEADER.unpack_from(buffer)
    if magic != MAGIC:
        raise FrameError(f"magic: found {magic & 0xFFFFFFFF:#010x}, expected {MAGIC:#010x}")
    if version != PROTOCOL_VERSION:
        raise FrameError(f"version: found {version}, this side speaks {PROTOCOL_VERSION}")
    used = HEADER_WORDS + words
    if words < 0 or used > len(buffer):
        raise FrameError(f"length: payload of {words} words in a frame of {len(buffer)}")
    found = _checksum(buffer, used)
    if checksum != found:
        raise FrameError(f"checksum: header says {checksum:#010x}, frame has {found:#010x}")
    if epoch != expected_epoch:
        raise FrameError(f"epoch: found {epoch}, expected {expected_epoch}")
    if kind not in _KINDS:
        raise FrameError(f"kind: {kind} is none of {', '.join(f'{k.name}={k:d}' for k in FrameKind)}")
    if expected_sequence is not None and sequence != expected_sequence:
        raise FrameError(f"sequence: found {sequence}, expected {expected_sequence}")
    return Frame(_KINDS[kind], sequence, work_us, buffer[HEADER_WORDS:used])


def _checksum(buffer: np.ndarray, used: int) -> int:
    header = zlib.crc32(buffer[:_CHECKSUM_WORD])
    return zlib.crc32(buffer[HEADER_WORDS:used], header)
