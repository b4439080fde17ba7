"""From occurrences to a draft: the continuation with the best expected number of right tokens. Pure.

SuffixDecoding's choice (arXiv 2411.04975, section 4): for a context of each length, walk the likeliest tokens while the
product of their estimated probabilities stays above a threshold, at most in proportion to the context's length; the
sum of these products estimates how many tokens will be accepted, and the context with the largest sum wins.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from actors.drafting.suffix_index import SEPARATOR, Occurrence, SuffixIndex


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
