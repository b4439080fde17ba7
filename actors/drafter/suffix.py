"""Drafts by suffix decoding: proposes what followed the end of the text before, in it or in other answers.
Imports neither vLLM, Ray nor torch."""

from __future__ import annotations

from array import array
from collections import Counter, abc, deque
from typing import Any

from outrider.actors.drafter.lookup import LookupProposer, LookupSequence
from outrider.actors.drafter.proposer import SequenceKey
from outrider.actors.drafter.suffix_index import NO_PATH, SEPARATOR, Path, SuffixIndex, SuffixLimits, best_path

TENANT_STRIDE = 1 << 20
"""More than any vocabulary has tokens. A tenant's tokens are remembered as others than every other tenant's, so that
one memory with one bound serves all, and no match reaches across."""

MOST_TENANTS = (1 << 31) // TENANT_STRIDE - 1

MAX_CACHED_TOKENS = 2_000_000
"""Tokens of answers that are remembered at most, 28 bytes each, whatever the number of answers."""


class AnswerMemory:
    """Remembers the answers of many requests: first in, first out, bounded by requests and by tokens. It keeps those of
    MOST_TENANTS tenants apart; a tenant beyond these has no memory."""

    def __init__(self, max_requests: int, max_tokens: int, limits: SuffixLimits) -> None:
        self._max_requests, self._max_tokens, self._limits = max_requests, max_tokens, limits
        self._index = SuffixIndex(limits.max_tree_depth, 1 << min(20, (max_tokens - 1).bit_length()))
        self._answers: deque[tuple[int, int | None]] = deque()
        """The position after each answer, and its seed."""

        self._seeds = Counter[int | None]()
        self._shifts: dict[int, int] = {0: 0}
        """Tenant -> what is added to its tokens."""

    @property
    def num_requests(self) -> int:
        return len(self._answers)

    @property
    def num_tokens(self) -> int:
        return self._index.end - self._index.first

    def add(self, token_ids: abc.Sequence[int], seed: int | None = None, tenant: int = 0) -> None:
        """Adds an answer, with the last tokens of its prompt before it.

        Args:
            seed: the request's, where its tokens were drawn by rejection or block verification; None where they do not
                depend on drafts (greedy, coupled).
            tenant: whose requests may learn from it; 0: everybody's.
        """
        shift = self._shift_of(tenant)
        if shift is None:
            return
        self._index.append([SEPARATOR, *_shifted(token_ids, shift)])
        self._answers.append((self._index.end, seed))
        self._seeds[seed] += 1
        while self._answers and (self.num_requests > self._max_requests or self.num_tokens > self._max_tokens):
            end, oldest_seed = self._answers.popleft()
            self._index.forget_before(end)
            self._seeds[oldest_seed] -= 1
            if not self._seeds[oldest_seed]:
                del self._seeds[oldest_seed]

    def path(self, end_of_text: abc.Sequence[int], num_wanted: int, seed: int | None = None, tenant: int = 0) -> Path:
        """Returns what the remembered answers say comes next. Seed and tenant are those of `add`.

        A request that is drawn with the seed of another one draws the same random numbers, and drafts from tokens that
        these numbers chose would bias it. So it learns nothing here.
        """
        shift = self._shift_of(tenant)
        if shift is None or (seed is not None and seed in self._seeds):
            return NO_PATH
        found = best_path(self._index, _shifted(end_of_text, shift), num_wanted, self._limits, is_the_text=False)
        return Path(found.score, [token - shift for token in found.token_ids])

    def _shift_of(self, tenant: int) -> int | None:
        """Returns None where there are too many tenants."""
        if (shift := self._shifts.get(tenant)) is None and len(self._shifts) <= MOST_TENANTS:
            shift = self._shifts[tenant] = len(self._shifts) * TENANT_STRIDE
        return shift


def _shifted(tokens: abc.Sequence[int], shift: int) -> abc.Sequence[int]:
    return tokens if not shift else array("i", [token + shift for token in tokens])


class SuffixSequence(LookupSequence):
    """Adds what is remembered of a request to its sequence."""

    seed: int | None = None
    """Its answer is remembered under this seed, see `AnswerMemory.add`."""

    answer_start = 0
    """Leading tokens of the text that are not to be remembered: the prompt's, and what a former life has answered."""


class SuffixProposer(LookupProposer[SuffixSequence]):
    """Looks the end of a text up in the text itself and in the answers of requests that have ended."""

    slice_tokens = 1024

    def __init__(
        self, limits: SuffixLimits, max_cached_requests: int, max_cached_tokens: int = MAX_CACHED_TOKENS
    ) -> None:
        """max_cached_requests: answers that are remembered; 0: none."""
        super().__init__()
        self.limits = limits
        self._answers = AnswerMemory(max_cached_requests, max_cached_tokens, limits)

    def new_sequence(self, key: SequenceKey) -> SuffixSequence:
        return SuffixSequence(key)

    def new_index(self, sequence: SuffixSequence) -> SuffixIndex:
        buckets = 1 << min(18, (2 * len(sequence.text) + 1024).bit_length())
        return SuffixIndex(self.limits.max_tree_depth, buckets)

    def open(self, sequence: SuffixSequence) -> None:
        sequence.answer_start = len(sequence.text)
        sequence.seed = sequence.sampling.seed if sequence.sampling.mode.samples_q else None
        super().open(sequence)

    def close(self, sequence: SuffixSequence) -> None:
        super().close(sequence)
        if sequence.committed_len > sequence.answer_start:
            context_start = max(0, sequence.answer_start - self.limits.max_tree_depth)
            self._answers.add(sequence.text[context_start:], sequence.seed, sequence.sampling.tenant)

    def look_up(self, sequence: SuffixSequence) -> list[int]:
        end_of_text, num_wanted = sequence.text[-self.limits.max_tree_depth :], sequence.num_wanted
        own = best_path(sequence.index, end_of_text, num_wanted, self.limits, is_the_text=True)
        if own.score >= num_wanted:
            return own.token_ids
        others = self._answers.path(end_of_text, num_wanted, sequence.seed, sequence.sampling.tenant)
        return max(own, others, key=lambda path: path.score).token_ids

    def counters(self) -> dict[str, Any]:
        return {"suffix_cached_requests": self._answers.num_requests, "suffix_cached_tokens": self._answers.num_tokens}
