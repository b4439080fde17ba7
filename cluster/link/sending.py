"""Frames on their way out of a link."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cluster.link.frame import FrameKind, encode, next_sequence
from cluster.link.transport import Transport

NO_WORDS = np.empty(0, dtype=np.int32)


class Outgoing(NamedTuple):
    """A frame to send. payload: int32 [words]."""

    kind: FrameKind
    payload: np.ndarray
    work_us: int = 0


HEARTBEAT = Outgoing(FrameKind.HEARTBEAT, NO_WORDS)


class Begun(NamedTuple):
    """A frame on its way. finish: blocks until the next one may begin, and raises what went wrong. nbytes: without
    padding."""

    kind: FrameKind
    finish: Callable[[], None]
    nbytes: int


class Sending:
    """One frame at a time: the next begins when the last is finished. By one thread at a time."""

    def __init__(self, transport: Transport, epoch: int, capacity_words: int) -> None:
        self._transport, self._epoch = transport, epoch
        self._buffer = np.zeros(capacity_words, dtype=np.int32)
        self._sequence = 0

    def begin(self, frame: Outgoing) -> Begun:
        """Never blocks, never raises: who finishes the frame learns of what went wrong."""
        used = 0
        try:
            used = encode(
                self._buffer,
                epoch=self._epoch,
                sequence=self._sequence,
                kind=frame.kind,
                payload=frame.payload,
                work_us=frame.work_us,
            )
            self._sequence = next_sequence(self._sequence)
            finish = self._transport.start_send(self._buffer)
        except Exception as error:  # noqa: BLE001 - raised again by finish
            finish = _raising(error)
        return Begun(frame.kind, finish, 4 * used)


def _raising(error: Exception) -> Callable[[], None]:
    def finish() -> None:
        raise error

    return finish
