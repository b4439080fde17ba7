"""Prompt lookup drafting: propose what followed the latest earlier occurrence of the current n-gram.

The method is Saxena's prompt lookup decoding (2023), also vLLM's ``ngram``. The index is a dictionary per n-gram
length, extended as tokens are committed, so a draft costs a few look-ups whatever the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from outrider.actors.drafter.strategy import Draft, SequenceKey, UnknownSequence, Work
from outrider.cluster.link.messages import Commit, DraftSampling, Origin, ProposalStatus


class NgramIndex:
    """Where each n-gram of one text last occurred, for every n from min_n to max_n."""

    def __init__(self, token_ids: Sequence[int], min_n: int, max_n: int) -> None:
        self.token_ids: list[int] = []
        self._min_n, self._max_n = min_n, max_n
        self._next: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_n + 1)]
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        tokens = self.token_ids
        for token in token_ids:
            # The n-grams that end before this token are now followed by something.
            for n in range(self._min_n, min(self._max_n, len(tokens)) + 1):
                self._next[n][tuple(tokens[-n:])] = len(tokens)
            tokens.append(token)

    def lookup(self, count: int, suffix: Sequence[int] | None = None) -> list[int]:
        """Up to count ids that followed the longest known end of `suffix` (None: of the text); empty without a match.

        A match that reaches the end of the text goes on through its own proposal, so a loop is continued as a loop.
        """
        tokens = self.token_ids
        end = tokens[-self._max_n :] if suffix is None else suffix
        for n in range(min(self._max_n, len(end)), self._min_n - 1, -1):
            start = self._next[n].get(tuple(end[-n:]))
            if start is not None:
                window = tokens[start : start + count]
                period = len(tokens) - start
                return [window[i] if i < len(window) else window[i % period] for i in range(count)]
        return []


READ_AT_ONCE = 256
"""Tokens read while others wait: about a millisecond."""


class GrowingText:
    """An NgramIndex of a text that is read piece by piece. `read` may run beside one caller of the other methods."""

    def __init__(self, token_ids: Sequence[int], min_n: int, max_n: int) -> None:
        """The first piece is read at once."""
        self.index = NgramIndex(token_ids[:READ_AT_ONCE], min_n, max_n)
        self._unread = list(token_ids[READ_AT_ONCE:])
        self._num_read = self._num_reading = 0
        """Of these; and how many more since settle was last called."""

        self._length = len(token_ids)
        self.is_read = not self._unread
        """The index has all of the text."""

    def __len__(self) -> int:
        return self._length

    def append(self, token_ids: Sequence[int]) -> None:
        self._length += len(token_ids)
        (self.index if self.is_read else self._unread).extend(token_ids)

    def read(self) -> None:
        """The next piece; settle afterwards."""
        piece = self._unread[self._num_read : self._num_read + READ_AT_ONCE]
        self._num_reading = len(piece)  # by settle the text may have grown
        self.index.extend(piece)

    def settle(self) -> bool:
        """Count the piece as read. Returns whether the text is read whole."""
        self._num_read, self._num_reading = self._num_read + self._num_reading, 0
        if self._num_read == len(self._unread):
            self._unread, self._num_read, self.is_read = [], 0, True
        return self.is_read


@dataclass(eq=False, slots=True)
class Reading:
    """Work: the next piece of a sequence's text."""

    is_step: ClassVar[bool] = False
    key: SequenceKey
    text: GrowingText

    def execute(self) -> None:
        self.text.read()


class NgramStrategy:
    """Implements DraftStrategy without a model: no KV, and ready when the prompt is read, between rounds if it is long.
    The text alone decides, so q is one-hot. A look-up is quicker than any lookahead would be, so nothing is drafted
    ahead, and every answer leaves at once."""

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        self._min_n, self._max_n = prompt_lookup_min, prompt_lookup_max
        self._texts: dict[SequenceKey, GrowingText] = {}
        self._unread: dict[SequenceKey, int] = {}
        """Whose text is not read whole, and how many drafts its last commit asked for."""

    def open(
        self, key: SequenceKey, token_ids: list[int], num_speculative_tokens: int, sampling: DraftSampling
    ) -> Draft | None:
        self.close(key)
        text = self._texts[key] = GrowingText(token_ids, self._min_n, self._max_n)
        if text.is_read:
            return Draft(key, len(text), [], ProposalStatus.READY)
        self._unread[key] = 0
        return None

    def commit(self, key: SequenceKey, commit: Commit) -> list[Draft]:
        text = self._texts.get(key)
        if text is None or len(text) != commit.base_committed_len:
            raise UnknownSequence(key)
        text.append(commit.token_ids)
        if not text.is_read:
            self._unread[key] = commit.num_wanted
            return [Draft(key, len(text), [], ProposalStatus.NOT_READY)] if commit.num_wanted else []
        return [self._answer(key, text, commit.num_wanted)] if commit.num_wanted else []

    def close(self, key: SequenceKey) -> None:
        self._texts.pop(key, None)
        self._unread.pop(key, None)

    def plan(self) -> tuple[Work | None, list[Draft]]:
        for key in self._unread:
            return Reading(key, self._texts[key]), []
        return None, []

    def complete(self, work: Work) -> list[Draft]:
        assert isinstance(work, Reading)
        key, text = work.key, work.text
        if self._texts.get(key) is not text or not text.settle():
            return []
        num_wanted = self._unread.pop(key)
        ready = Draft(key, len(text), [], ProposalStatus.READY)
        # Whoever asked before waits for an answer from READY on.
        return [ready, *([self._answer(key, text, num_wanted)] if num_wanted else [])]

    def step_us(self) -> int:
        return 0

    def counters(self) -> dict[str, Any]:
        return {}

    def usage(self) -> dict[str, float]:
        return {"num_sequences": len(self._texts), "num_prefilling": len(self._unread), "kv_cache_usage": 0.0}

    @staticmethod
    def _answer(key: SequenceKey, text: GrowingText, num_wanted: int) -> Draft:
        return Draft(key, len(text), text.index.lookup(num_wanted), ProposalStatus.OK, origin=Origin.MISS)
