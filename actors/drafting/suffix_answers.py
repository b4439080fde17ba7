"""Answers of many requests, kept as long as there is room: what suffix decoding learns from. Pure."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from actors.drafting.suffix_index import SuffixIndex
from actors.drafting.suffix_path import NO_PATH, Path, SuffixLimits, best_path

RequestKey = tuple[str, int]
"""(drafter, number): unique over all drafters of a pool."""


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """Consecutive tokens of one request's answer, int32.

    context: what was before them. seed: the request's, where its tokens were drawn by rejection or block verification;
    None where they do not depend on drafts (greedy, coupled).
    """

    request: RequestKey
    context: array[int]
    token_ids: array[int]
    seed: int | None = None


class SuffixAnswers:
    """First in, first out, bounded by requests and by tokens."""

    def __init__(self, max_requests: int, max_tokens: int, limits: SuffixLimits) -> None:
        self._max_requests, self._max_tokens, self._limits = max_requests, max_tokens, limits
        buckets = 1 << max(10, min(20, (max_tokens - 1).bit_length()))
        self._index = SuffixIndex(limits.max_tree_depth, buckets)
        self._parts: deque[tuple[RequestKey, int | None, int]] = deque()
        """Request, seed and the position after each part."""

        self._parts_of: dict[RequestKey, int] = {}
        self._seeds: dict[int, dict[RequestKey, int]] = {}
        """Seed -> requests that were drawn with it -> parts."""

    @property
    def num_requests(self) -> int:
        return len(self._parts_of)

    @property
    def num_tokens(self) -> int:
        return self._index.end - self._index.first

    def add(self, part: AnswerPart) -> None:
        self._index.append(part.token_ids, context=part.context)
        self._parts.append((part.request, part.seed, self._index.end))
        self._parts_of[part.request] = self._parts_of.get(part.request, 0) + 1
        if part.seed is not None:
            of_seed = self._seeds.setdefault(part.seed, {})
            of_seed[part.request] = of_seed.get(part.request, 0) + 1
        while self._parts and (self.num_requests > self._max_requests or self.num_tokens > self._max_tokens):
            self._forget_oldest()

    def path(self, end_of_text: Sequence[int], num_wanted: int, request: RequestKey, seed: int | None) -> Path:
        """What other requests' answers say comes next.

        seed: as in AnswerPart. A request that is drawn with the seed of another draws the same random numbers, and
        drafting from tokens that these numbers chose would bias it: it learns nothing here.
        """
        if seed is not None and any(other != request for other in self._seeds.get(seed, ())):
            return NO_PATH
        return best_path(self._index, end_of_text, num_wanted, self._limits, is_the_text=False)

    def _forget_oldest(self) -> None:
        request, seed, end = self._parts.popleft()
        self._index.forget_before(end)
        _count_down(self._parts_of, request)
        if seed is not None:
            of_seed = self._seeds[seed]
            _count_down(of_seed, request)
            if not of_seed:
                del self._seeds[seed]


def _count_down(counts: dict[RequestKey, int], request: RequestKey) -> None:
    counts[request] -= 1
    if counts[request] == 0:
        del counts[request]
