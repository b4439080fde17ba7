"""Drafts by prompt lookup: proposes what followed the latest earlier occurrence of the current n-gram.
Imports neither vLLM, Ray nor torch.

The method is Saxena's prompt lookup decoding (2023), also vLLM's ``ngram``. The index is a dictionary per n-gram
length, extended as tokens are committed, so a draft costs a few look-ups whatever the length of the text.
"""

from __future__ import annotations

from collections import abc

from outrider.actors.drafter.lookup import LookupProposer, LookupSequence
from outrider.actors.drafter.proposer import SequenceKey


class NgramIndex:
    """Knows where each n-gram of one text last occurred, for every n from min_n to max_n."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._tokens: list[int] = []
        self._min_n, self._max_n = min_n, max_n
        self._next: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_n + 1)]

    def append(self, token_ids: abc.Sequence[int]) -> None:
        tokens = self._tokens
        for token in token_ids:
            # The n-grams that end before this token are now followed by something.
            for n in range(self._min_n, min(self._max_n, len(tokens)) + 1):
                self._next[n][tuple(tokens[-n:])] = len(tokens)
            tokens.append(token)

    def lookup(self, count: int) -> list[int]:
        """Returns `count` ids that followed the longest known end of the text; [] without a match.

        A match that reaches the end of the text goes on through its own proposal, so a loop is continued as a loop.
        """
        tokens = self._tokens
        for n in range(min(self._max_n, len(tokens)), self._min_n - 1, -1):
            start = self._next[n].get(tuple(tokens[-n:]))
            if start is not None:
                window = tokens[start : start + count]
                period = len(tokens) - start
                return [window[i] if i < len(window) else window[i % period] for i in range(count)]
        return []


class NgramProposer(LookupProposer[LookupSequence]):
    """Looks the end of a text up in the text itself."""

    slice_tokens = 256

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        super().__init__()
        self._min_n, self._max_n = prompt_lookup_min, prompt_lookup_max

    def new_sequence(self, key: SequenceKey) -> LookupSequence:
        return LookupSequence(key)

    def new_index(self, sequence: LookupSequence) -> NgramIndex:
        return NgramIndex(self._min_n, self._max_n)

    def look_up(self, sequence: LookupSequence) -> list[int]:
        drafts: list[int] = sequence.index.lookup(sequence.num_wanted)
        return drafts
