"""Collects training samples on the drafter: parts of answers with the target's likeliest tokens."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Hashable, Sequence

import numpy as np

from outrider.actors.learning.texts import MAX_TEXT_TOKENS, Text
from outrider.cluster.link.messages import TrainingSample

MAX_PART_TOKENS = 128
"""Tokens of an answer that are one text to train on, at most: what a long answer shows is learned before it ends."""

_IDENTITY_TOKENS = 512
"""The last tokens of a prompt stand for the prompt: the first ones are the same wherever a system prompt is."""

_MOST_WAITING_TOKENS = 200_000
"""The most tokens of all parts that the trainer has not fetched."""


class SampleCollector:
    """Cuts answers into parts while samples of them come."""

    def __init__(self) -> None:
        self._parts: dict[Hashable, list[TrainingSample]] = {}
        self._prompts: dict[Hashable, int] = {}  # of every sequence that has had a sample
        self._done: deque[Text] = deque()
        self._waiting = 0
        self.dropped = 0  # parts that were not fetched in time

    def add(self, key: Hashable, text: Sequence[int], sample: TrainingSample, greedy: bool) -> None:
        """text: of the sequence, all that was committed. A sample that does not follow the last one begins a part."""
        start, end = sample.position, sample.position + len(sample.ids)
        if not 1 <= start < end <= len(text):
            return
        if key not in self._prompts:
            last = np.array(text[max(0, start - _IDENTITY_TOKENS) : start], np.int32).tobytes()
            self._prompts[key] = int.from_bytes(hashlib.blake2b(last, digest_size=8).digest()) >> 1
        if last_one := self._parts.get(key, [])[-1:]:
            (before,) = last_one
            if before.position + len(before.ids) != start or before.ids.shape[1] != sample.ids.shape[1]:
                self._finish(key, text, greedy)
        part = self._parts.setdefault(key, [])
        part.append(sample)
        if end - part[0].position >= MAX_PART_TOKENS:
            self._finish(key, text, greedy)

    def close(self, key: Hashable, text: Sequence[int], greedy: bool) -> None:
        """Ends a sequence: nothing more of this text follows."""
        self._finish(key, text, greedy)
        self._prompts.pop(key, None)

    def _finish(self, key: Hashable, text: Sequence[int], greedy: bool) -> None:
        """Completes a part, with as much of what stands before it as fits."""
        if not (part := self._parts.pop(key, [])):
            return
        start = part[0].position
        end = min(part[-1].position + len(part[-1].ids), start + MAX_TEXT_TOKENS - 1)
        first = max(0, end - MAX_TEXT_TOKENS)
        top_ids, top_log_p = np.concatenate([p.ids for p in part]), np.concatenate([p.log_p for p in part])
        top_ids, top_log_p = top_ids[: end - start], top_log_p[: end - start]
        ids = np.array(text[first:end], np.int32)
        self._done.append(Text(self._prompts[key], int(not greedy), ids, start - first, top_ids, top_log_p))
        self._waiting += len(ids)
        while self._waiting > _MOST_WAITING_TOKENS:
            self._waiting -= len(self._done.popleft().ids)
            self.dropped += 1

    def take(self) -> list[Text]:
        """Returns the parts that are complete, once."""
        done, self._done, self._waiting = list(self._done), deque(), 0
        return done
