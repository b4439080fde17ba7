"""Prompt lookup drafting: propose what followed the latest earlier occurrence of the current n-gram.

The method is Saxena's prompt lookup decoding (2023), also vLLM's ``ngram``. The index is a dictionary per n-gram
length, extended as tokens are committed, so a draft costs a few look-ups whatever the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.drafting.strategy import Draft, SequenceKey, UnknownSequence, Work
from actors.messages import Commit, DraftSampling, Origin, ProposalStatus


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


class NgramStrategy:
    """Implements DraftStrategy without a model: always ready, no KV. The text alone decides, so q is one-hot. A look-up
    is quicker than any lookahead would be, so nothing is drafted ahead, and every answer leaves at once."""

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        self._min_n, self._max_n = prompt_lookup_min, prompt_lookup_max
        self._sequences: dict[SequenceKey, NgramIndex] = {}

    def open(
        self, key: SequenceKey, token_ids: list[int], num_speculative_tokens: int, sampling: DraftSampling
    ) -> Draft | None:
        self._sequences[key] = NgramIndex(token_ids, self._min_n, self._max_n)
        return Draft(key, len(token_ids), [], ProposalStatus.READY)

    def commit(self, key: SequenceKey, commit: Commit) -> list[Draft]:
        index = self._sequences.get(key)
        if index is None or len(index.token_ids) != commit.base_committed_len:
            raise UnknownSequence(key)
        index.extend(commit.token_ids)
        if commit.num_wanted == 0:
            return []
        ids = index.lookup(commit.num_wanted)
        return [Draft(key, len(index.token_ids), ids, ProposalStatus.OK, origin=Origin.MISS)]

    def close(self, key: SequenceKey) -> None:
        self._sequences.pop(key, None)

    def plan(self) -> tuple[Work | None, list[Draft]]:
        return None, []

    def complete(self, work: Work) -> list[Draft]:
        raise RuntimeError("an n-gram drafter plans no work")

    def step_us(self) -> int:
        return 0

    def counters(self) -> dict[str, Any]:
        return {}

    def usage(self) -> dict[str, float]:
        return {"num_sequences": len(self._sequences), "num_prefilling": 0, "kv_cache_usage": 0.0}
