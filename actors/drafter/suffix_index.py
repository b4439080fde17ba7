"""Finds where the end of a text occurred before, and drafts what followed: the index behind suffix decoding.
Imports neither vLLM, Ray nor torch.

SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975) asks of its suffix trees how often each continuation followed each
length of context. Here the tokens themselves answer that: every position is linked to the one before it with the same
1, 3 and 6 tokens to its left, as LZ77 compressors do. A look-up follows these links over the latest occurrences,
measures how long each match really is, and counts. Memory is 28 bytes a token whatever the depth, and the oldest tokens
are forgotten by moving one number.

The draft is SuffixDecoding's (section 4): for a context of each length, walk the likeliest tokens while the product of
their estimated probabilities stays above a threshold, at most in proportion to the context's length. The sum of these
products estimates how many tokens will be accepted, and the context with the largest sum wins.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

SEPARATOR = -1
"""Stands before each text in an index of many: matches and continuations end there."""

_ORDERS = (6, 3, 1)
"""Tokens of context by which positions are linked, the longest first."""

_MOST_PER_ORDER = 16
"""Latest occurrences that are looked at for each order: bounds the time of a look-up."""

_ENOUGH = 8
"""With so many occurrences, shorter contexts add nothing that would be chosen."""

_FREE_AT_ONCE = 8
"""Forgotten tokens are freed when they are an eighth of all: moving the rest costs as much as it holds."""


@dataclass(frozen=True, slots=True)
class SuffixLimits:
    """Holds vLLM's keys without their prefix ``suffix_decoding_``."""

    max_tree_depth: int
    max_spec_factor: float
    min_token_prob: float

    def most_tokens(self, match_len: int) -> int:
        """Returns how many tokens may be drafted after a match of this length."""
        return min(int(self.max_spec_factor * match_len), self.max_tree_depth - match_len)


class Path(NamedTuple):
    """A draft, and the expected number of its tokens that are accepted."""

    score: float
    token_ids: list[int]


NO_PATH = Path(0.0, [])


class Occurrence(NamedTuple):
    """A place where the end of the text occurred before. Longer matches sort higher, then later ones.

    match_len: tokens that agree, to the left of position. position: of the token that followed.
    """

    match_len: int
    position: int


class SuffixIndex:
    """Holds tokens and links. Positions count from the first token ever appended."""

    def __init__(self, max_match_len: int, num_buckets: int) -> None:
        """num_buckets: a power of two, of the order of the tokens to be held; fewer only make look-ups poorer."""
        self.tokens = array("i")
        self.base = 0
        """Position of tokens[0]."""

        self.first = 0
        """Position of the first token that counts. Those before it are forgotten, and freed some time later."""

        self._max_match_len, self._num_buckets = max_match_len, num_buckets
        self._chains = [(order, array("q", [-1]) * num_buckets, array("q")) for order in _ORDERS]
        """Each order has a table of the latest position by the context's hash, and one of the position before it."""

    @property
    def end(self) -> int:
        """Position of the next token."""
        return self.base + len(self.tokens)

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds tokens that follow what is there. A SEPARATOR among them begins another text."""
        before = self.tokens[-_ORDERS[0] :]
        text, length = (*before, *token_ids), len(before)
        shift = self.end - length
        for order, latest, earlier in self._chains:
            for at in range(length, len(text)):
                left = text[max(at - order, 0) : at]
                if len(left) < order or SEPARATOR in left:
                    earlier.append(-1)
                    continue
                bucket = hash(left) % self._num_buckets
                earlier.append(latest[bucket])
                latest[bucket] = at + shift
        self.tokens.extend(token_ids)

    def forget_before(self, position: int) -> None:
        """Forgets the tokens before a position. Links to them end there."""
        self.first = max(self.first, position)
        count = self.first - self.base
        if count * _FREE_AT_ONCE > len(self.tokens):
            for tokens in (self.tokens, *(earlier for _, _, earlier in self._chains)):
                del tokens[:count]
            self.base = self.first

    def occurrences(self, end_of_text: Sequence[int]) -> list[Occurrence]:
        """Returns the latest occurrences of the text's end, the longest matches first, of equals the latest.

        Args:
            end_of_text: its last tokens, max_match_len of them at most.
        """
        found: list[Occurrence] = []
        known = self._max_match_len + 1
        for order, latest, earlier in self._chains:
            if len(end_of_text) < order:
                continue
            position = latest[hash(tuple(end_of_text[-order:])) % self._num_buckets]
            for _ in range(_MOST_PER_ORDER):
                if position < self.first:
                    break
                match_len = self._match_len(position - self.base, end_of_text)
                if order <= match_len < known:  # else another context's bucket, or found by a longer one
                    found.append(Occurrence(match_len, position))
                position = earlier[position - self.base]
            if len(found) >= _ENOUGH:
                break
            known = order
        return sorted(found, reverse=True)

    def _match_len(self, at: int, end_of_text: Sequence[int]) -> int:
        """Returns how many tokens before tokens[at] agree with the text's end."""
        tokens, length, most = self.tokens, 0, min(at, len(end_of_text))
        while length < most and tokens[at - 1 - length] == end_of_text[-1 - length]:
            length += 1
        return length


def best_path(
    index: SuffixIndex, end_of_text: Sequence[int], num_wanted: int, limits: SuffixLimits, *, is_the_text: bool
) -> Path:
    """Returns the draft that follows the text, num_wanted tokens at most.

    Args:
        is_the_text: the index is that of the text itself, which goes on with its own draft: a loop stays a loop.
    """
    found = index.occurrences(end_of_text)
    best = NO_PATH
    for count, occurrence in enumerate(found, 1):
        shorter = found[count].match_len if count < len(found) else 0
        if shorter == occurrence.match_len:
            continue
        # The same occurrences follow a context of each of these lengths.
        most = max(map(limits.most_tokens, range(shorter + 1, occurrence.match_len + 1)))
        most = min(num_wanted, most)
        if most > best.score:  # no path scores more than its length
            path = _walk(index, found[:count], most, limits.min_token_prob, is_the_text)
            best = max(best, path, key=lambda each: each.score)
    return best


def _walk(index: SuffixIndex, found: Sequence[Occurrence], most: int, min_prob: float, is_the_text: bool) -> Path:
    """Follows the likeliest token of all occurrences, then of those that agree with it, and so on."""
    tokens, end = index.tokens, len(index.tokens)
    at = [occurrence.position - index.base for occurrence in found]
    token_ids: list[int] = []
    prob, score = 1.0, 0.0
    while len(token_ids) < most:
        here = [tokens[i] if i < end else (token_ids[i - end] if is_the_text else SEPARATOR) for i in at]
        counts = Counter(token for token in here if token != SEPARATOR)
        if not counts:
            break
        token = max(counts, key=counts.__getitem__)  # of equals the first: longest match, then latest
        prob *= counts[token] / counts.total()
        if prob < min_prob:
            break
        token_ids.append(token)
        score += prob
        at = [i + 1 for i, other in zip(at, here, strict=True) if other == token]
    return Path(score, token_ids)
