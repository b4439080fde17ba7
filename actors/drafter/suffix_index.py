"""Where the ends of a text occurred before, and what followed: the index behind suffix decoding. Pure.

SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975) keeps suffix trees with counts. What it asks of them is, for every
length of context, how often each continuation followed it. Here that is answered from the tokens themselves: every
position is linked to the one before it with the same 1, 3 and 6 tokens to its left, as LZ77 compressors do, and a
look-up follows these links over the latest occurrences, measures how long each match really is, and counts. The
counts are those of a tree over these occurrences; memory is 28 bytes a token whatever the depth, appending costs the
same for every token, and the oldest tokens are forgotten by moving one number.

From occurrences to a draft is SuffixDecoding's choice (section 4): for a context of each length, walk the likeliest
tokens while the product of their estimated probabilities stays above a threshold, at most in proportion to the
context's length; the sum of these products estimates how many tokens will be accepted, and the context with the
largest sum wins.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class SuffixLimits:
    """vLLM's keys without their prefix ``suffix_decoding_``."""

    max_tree_depth: int = 24
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1


@dataclass(frozen=True, slots=True)
class Path:
    """score: expected number of right tokens."""

    score: float
    token_ids: list[int]


NO_PATH = Path(0.0, [])


@functools.lru_cache(maxsize=4096)
def _most_tokens(limits: SuffixLimits, shortest: int, longest: int) -> int:
    """Of a draft after a context of one of these lengths, whichever allows most."""
    depth = limits.max_tree_depth
    return max(min(int(limits.max_spec_factor * n), depth - n) for n in range(shortest, longest + 1))


def best_path(
    index: SuffixIndex, end_of_text: Sequence[int], num_wanted: int, limits: SuffixLimits, *, is_the_text: bool
) -> Path:
    """The draft that follows the text, num_wanted tokens at most.

    is_the_text: the index is that of the text itself, which goes on with its own draft: a loop stays a loop.
    """
    found = index.occurrences(end_of_text)
    best = NO_PATH
    for count, occurrence in enumerate(found, 1):
        following = found[count].match_len if count < len(found) else 0
        if following == occurrence.match_len:
            continue
        most = min(num_wanted, _most_tokens(limits, following + 1, occurrence.match_len))
        if most > best.score:  # no path scores more than its length
            path = _walk(index, found[:count], most, limits.min_token_prob, is_the_text)
            if path.score > best.score:
                best = path
    return best


def _walk(index: SuffixIndex, found: Sequence[Occurrence], most: int, min_prob: float, is_the_text: bool) -> Path:
    tokens, end = index.tokens, len(index.tokens)
    at = [occurrence.position - index.base for occurrence in found]
    token_ids: list[int] = []
    prob, score = 1.0, 0.0
    while len(token_ids) < most:
        if len(at) == 1 and at[0] < end:  # one place is left: nothing to choose any more
            rest = tokens[at[0] : at[0] + most - len(token_ids)].tolist()
            if SEPARATOR in rest:
                rest = rest[: rest.index(SEPARATOR)]
            token_ids += rest
            score += prob * len(rest)
            at[0] += len(rest)
            if not rest or not is_the_text:
                break
            continue
        here = [tokens[i] if i < end else (token_ids[i - end] if is_the_text else SEPARATOR) for i in at]
        counts: dict[int, int] = {}
        for token in here:
            if token != SEPARATOR:
                counts[token] = counts.get(token, 0) + 1
        if not counts:
            break
        token = max(counts, key=counts.__getitem__)  # of equals the first: longest match, then latest
        prob *= counts[token] / sum(counts.values())
        if prob < min_prob:
            break
        token_ids.append(token)
        score += prob
        at = [i + 1 for i, other in zip(at, here, strict=True) if other == token]
    return Path(score, token_ids)


SEPARATOR = -1
"""Stands between texts in an index of many: matches and continuations end there."""

_ORDERS = (6, 3, 1)
"""Tokens of context by which positions are linked, the longest first."""

_MOST_PER_ORDER = 16
"""Latest occurrences looked at, for each order: bounds the time of a look-up."""

_ENOUGH = 8
"""With so many, shorter contexts add nothing that would be chosen."""


_FREE_AT_ONCE = 8
"""Forgotten tokens are freed when they are an eighth of all: moving the rest costs as much as it holds."""


_TOKEN_BITS = 8 * array("i").itemsize


class Occurrence(NamedTuple):
    """A place where the end of the text occurred before. They sort by length, then age."""

    match_len: int
    """Tokens that agree, to the left of position."""

    position: int
    """Of the token that followed."""


class SuffixIndex:
    """Append-only tokens with links. Positions count from the first token ever appended."""

    def __init__(self, max_match_len: int, num_buckets: int) -> None:
        """num_buckets: a power of two, of the order of the tokens to be held; fewer only make look-ups poorer."""
        self.tokens = array("i")
        self.base = 0
        """Position of tokens[0]."""

        self.first = 0
        """Position of the first token that counts; what is before is forgotten, and freed some time later."""

        self._max_match_len = max_match_len
        self._mask = num_buckets - 1
        self._heads = tuple(array("q", [-1]) * num_buckets for _ in _ORDERS)
        self._earlier = tuple(array("q") for _ in _ORDERS)
        """By order, beside tokens: the position before with the same hash, -1 for none."""

    @property
    def end(self) -> int:
        """Position of the next token."""
        return self.base + len(self.tokens)

    def append(self, token_ids: Sequence[int], context: Sequence[int] | None = None) -> None:
        """Add tokens that follow what is there, or, with a context, start another text with them.

        context: the tokens before them, for matches to reach into; they are no occurrences themselves.
        """
        tokens, mask = self.tokens, self._mask
        if context is None:
            left = [] if not tokens else list(tokens[-_ORDERS[0] :])
        else:
            tokens.append(SEPARATOR)
            tokens.extend(context)
            for earlier in self._earlier:
                earlier.extend([-1] * (1 + len(context)))
            left = list(context[-_ORDERS[0] :])
        (heads_6, heads_3, heads_1), (earlier_6, earlier_3, earlier_1) = self._heads, self._earlier
        length = len(left)
        a, b, c, d, e, f = [SEPARATOR] * (6 - length) + left
        position = self.end
        for token in token_ids:
            if length >= 6:
                bucket = hash((a, b, c, d, e, f)) & mask
                earlier_6.append(heads_6[bucket])
                heads_6[bucket] = position
            else:
                earlier_6.append(-1)
            if length >= 3:
                bucket = hash((d, e, f)) & mask
                earlier_3.append(heads_3[bucket])
                heads_3[bucket] = position
            else:
                earlier_3.append(-1)
            if length >= 1:
                bucket = hash((f,)) & mask
                earlier_1.append(heads_1[bucket])
                heads_1[bucket] = position
            else:
                earlier_1.append(-1)
            tokens.append(token)
            a, b, c, d, e, f = b, c, d, e, f, token
            position += 1
            length += 1

    def forget_before(self, position: int) -> None:
        """Links into what is forgotten end there."""
        self.first = max(self.first, position)
        count = self.first - self.base
        if count * _FREE_AT_ONCE > len(self.tokens):
            del self.tokens[:count]
            for earlier in self._earlier:
                del earlier[:count]
            self.base = self.first

    def occurrences(self, end_of_text: Sequence[int]) -> list[Occurrence]:
        """The latest occurrences of the text's end, the longest matches first, of equals the latest.

        end_of_text: its last tokens, max_match_len of them at most.
        """
        found: list[Occurrence] = []
        known = self._max_match_len + 1
        most = len(end_of_text)
        wanted = int.from_bytes(array("i", end_of_text).tobytes(), "little")
        first, base, bits = self.first, self.base, _TOKEN_BITS
        with memoryview(self.tokens) as tokens:
            for order, heads, earlier in zip(_ORDERS, self._heads, self._earlier, strict=True):
                if most < order:
                    continue
                position = heads[hash(tuple(end_of_text[-order:])) & self._mask]
                for _ in range(_MOST_PER_ORDER):
                    if position < first:
                        break
                    right = position - base
                    if right >= most:
                        # Both as numbers, the last token highest: the highest bit that differs ends the match.
                        there = int.from_bytes(tokens[right - most : right], "little")
                        match_len = most - ((there ^ wanted).bit_length() + bits - 1) // bits
                    else:
                        match_len = self._match_len(right, end_of_text)
                    if order <= match_len < known:  # else another context's bucket, or found by a longer one
                        found.append(Occurrence(match_len, position))
                    position = earlier[right]
                if len(found) >= _ENOUGH:
                    break
                known = order
        found.sort(reverse=True)
        return found

    def _match_len(self, right: int, end_of_text: Sequence[int]) -> int:
        """Of a place near the beginning. right: its offset in tokens."""
        tokens, length = self.tokens, 0
        while length < right and tokens[right - 1 - length] == end_of_text[-1 - length]:
            length += 1
        return length
