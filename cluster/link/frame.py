"""One frame of a link: a header of 12 bytes, and a payload that only some kinds have.

    bytes 0 and 1   protocol version     bytes 4 to 7    epoch
    byte  2         kind (FrameKind)     bytes 8 to 11   work_us: the sender's compute time for this frame
    byte  3         0

The wires keep frames whole and in order; the epoch tells a frame of an old link from one of the link that replaced it.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

PROTOCOL_VERSION = 10
MAX_INT31 = 2**31 - 1

_HEADER = struct.Struct("<HBxIi")


class FrameError(ValueError):
    """A frame that must not be believed. The message starts with the header field at fault."""


class FrameKind(enum.IntEnum):
    HELLO = 0
    """Exchanged once, before there is a link."""

    DATA = 1
    HEARTBEAT = 2
    PING = 3
    PONG = 4
    CLOSE = 5


_KINDS = {int(kind): kind for kind in FrameKind}


class Frame(NamedTuple):
    """A decoded frame."""

    kind: FrameKind
    work_us: int
    payload: bytes


def encode(kind: FrameKind, epoch: int, payload: bytes = b"", work_us: int = 0) -> bytes:
    """Return the frame's bytes. Raises FrameError when the epoch does not fit 32 bits; work_us is clamped."""
    try:
        return _HEADER.pack(PROTOCOL_VERSION, kind, epoch, min(max(work_us, 0), MAX_INT31)) + payload
    except struct.error as error:
        raise FrameError(f"epoch: {epoch}: {error}") from None


def decode(data: bytes, expected_epoch: int) -> Frame:
    """Read a frame. Raises FrameError for one that is damaged, of another protocol version, or of another epoch."""
    if len(data) < _HEADER.size:
        raise FrameError(f"length: {len(data)} bytes cannot hold a header of {_HEADER.size}")
    version, kind, epoch, work_us = _HEADER.unpack_from(data)
    if version != PROTOCOL_VERSION:
        raise FrameError(f"version: found {version}, this side speaks {PROTOCOL_VERSION}")
    if kind not in _KINDS:
        raise FrameError(f"kind: {kind} is none of {', '.join(f'{k.name}={k:d}' for k in FrameKind)}")
    if epoch != expected_epoch:
        raise FrameError(f"epoch: found {epoch}, expected {expected_epoch}")
    return Frame(_KINDS[kind], max(work_us, 0), data[_HEADER.size :])
