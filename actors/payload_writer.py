"""Filling a frame's payload with messages, and going on in the next frame when one is full."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.messages import MessageError


class PayloadWriter:
    """Fills payloads of `capacity` words one after the other. Small things go through a list, q through arrays."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._done: list[np.ndarray] = []
        self._start()

    def _start(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._words: list[int] = [0]
        self._count = 0
        self.room = self._capacity - 1

    def add(self, what: str, words: list[int], arrays: Sequence[np.ndarray] = ()) -> None:
        """One message: `words`, then the flat int32 `arrays`. On to the next frame when this one lacks the room."""
        size = len(words) + sum(len(array) for array in arrays)
        if size > self.room:
            self.next_frame()
            if size > self.room:
                raise MessageError(what, f"{size} words do not fit a frame with room for {self.room}")
        self._words += words
        if arrays:
            self._flush_words()
            self._arrays += arrays
        self._count += 1
        self.room -= size

    def next_frame(self) -> None:
        if self._count:
            self._flush_words()
            payload = self._arrays[0] if len(self._arrays) == 1 else np.concatenate(self._arrays)
            payload[0] = self._count
            self._done.append(payload)
            self._start()

    def finish(self) -> list[np.ndarray]:
        self.next_frame()
        return self._done

    def _flush_words(self) -> None:
        try:
            self._arrays.append(np.array(self._words, dtype=np.int32))
        except (OverflowError, ValueError, TypeError) as error:
            raise MessageError("payload", f"a value is no 32-bit integer: {error}") from None
        self._words = []
