"""Drafts by suffix decoding: proposes what followed the end of the text before, in it or in others' answers. Pure.

The answers of others are read between rounds, a slice at a time; of them as many are kept as there is room for.
"""

from __future__ import annotations

from array import array
from collections import Counter, abc, deque
from dataclasses import dataclass
from typing import Any, ClassVar

from outrider.actors.drafter.lookup import LookupProposer, LookupSequence
from outrider.actors.drafter.proposer import SequenceKey, Work
from outrider.actors.drafter.suffix_index import NO_PATH, Path, SuffixIndex, SuffixLimits, best_path
from outrider.cluster.link.messages import Commit

RequestKey = tuple[str, int]
"""(drafter, number): unique over all drafters of a pool."""

TENANT_STRIDE = 1 << 20
"""More than any vocabulary has tokens. A tenant's tokens are remembered as others than every other tenant's, so that
one memory with one bound serves all, and no match reaches across."""

MOST_TENANTS = (1 << 31) // TENANT_STRIDE - 1

MAX_CACHED_TOKENS = 2_000_000
"""Tokens of answers that a memory holds at most, 28 bytes each, whatever the number of answers."""

PART_TOKENS = 64
"""Tokens of a running answer after which others may learn them."""

_LEAST_PART_TOKENS = 4
_PARTS_AT_ONCE = 8
_MOST_WAITING = 4096
"""Parts that wait to be learnt, or to be sent. Beyond that the oldest are lost, and counted."""


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """Holds consecutive tokens of one request's answer, int32.

    context: what was before them.
    seed: the request's, where its tokens were drawn by rejection or block verification; None where they do not depend
        on drafts (greedy, coupled).
    tenant: whose requests may learn them; 0: everybody's.
    """

    request: RequestKey
    context: array[int]
    token_ids: array[int]
    seed: int | None = None
    tenant: int = 0


class SuffixAnswers:
    """Remembers the answers of many requests: first in, first out, bounded by requests and by tokens. It keeps those of
    MOST_TENANTS tenants apart; a tenant beyond these has no memory."""

    def __init__(self, max_requests: int, max_tokens: int, limits: SuffixLimits) -> None:
        self._max_requests, self._max_tokens, self._limits = max_requests, max_tokens, limits
        self._index = SuffixIndex(limits.max_tree_depth, 1 << max(10, min(20, (max_tokens - 1).bit_length())))
        self._parts: deque[tuple[AnswerPart, int]] = deque()
        """Each part and the position after it."""

        self._shifts: dict[int, int] = {0: 0}
        """Tenant -> what is added to its tokens."""

        self._parts_of: Counter[RequestKey] = Counter()
        self._with_seed: dict[int, set[RequestKey]] = {}
        """Seed -> requests that were drawn with it."""

    @property
    def num_requests(self) -> int:
        return len(self._parts_of)

    @property
    def num_tokens(self) -> int:
        return self._index.end - self._index.first

    def add(self, part: AnswerPart) -> None:
        shift = self._shift_of(part.tenant)
        if shift is None:
            return
        self._index.append(_shifted(part.token_ids, shift), context=_shifted(part.context, shift))
        self._parts.append((part, self._index.end))
        self._parts_of[part.request] += 1
        if part.seed is not None:
            self._with_seed.setdefault(part.seed, set()).add(part.request)
        while self._parts and (self.num_requests > self._max_requests or self.num_tokens > self._max_tokens):
            self._forget_oldest()

    def path(
        self, end_of_text: abc.Sequence[int], num_wanted: int, request: RequestKey, seed: int | None, tenant: int = 0
    ) -> Path:
        """Returns what other requests' answers say comes next.

        A request that is drawn with the seed of another one draws the same random numbers, and drafts from tokens that
        these numbers chose would bias it. So it learns nothing here.

        Args:
            seed: as in AnswerPart.
        """
        shift = self._shift_of(tenant)
        if shift is None or (seed is not None and self._with_seed.get(seed, set()) - {request}):
            return NO_PATH
        found = best_path(self._index, _shifted(end_of_text, shift), num_wanted, self._limits, is_the_text=False)
        return Path(found.score, [token - shift for token in found.token_ids])

    def _shift_of(self, tenant: int) -> int | None:
        """Returns None where there are too many tenants."""
        if (shift := self._shifts.get(tenant)) is None and len(self._shifts) <= MOST_TENANTS:
            shift = self._shifts[tenant] = len(self._shifts) * TENANT_STRIDE
        return shift

    def _forget_oldest(self) -> None:
        part, end = self._parts.popleft()
        self._index.forget_before(end)
        self._parts_of[part.request] -= 1
        if self._parts_of[part.request]:
            return
        del self._parts_of[part.request]
        if part.seed is not None:
            self._with_seed[part.seed].discard(part.request)
            if not self._with_seed[part.seed]:
                del self._with_seed[part.seed]


def _shifted(tokens: abc.Sequence[int], shift: int) -> abc.Sequence[int]:
    return tokens if not shift else array("i", [token + shift for token in tokens])


class SuffixSequence(LookupSequence):
    """Adds what is shared of a request's answer."""

    request: RequestKey = ("", 0)
    seed: int | None = None
    """`request` and `seed` are those of an AnswerPart."""

    num_shared = 0
    """Leading tokens of the text that are the prompt's, or that others may know."""


@dataclass(eq=False, slots=True)
class Learning:
    """Lets the memory of answers learn some parts. That belongs to the lock, so it is done when the work completes."""

    is_step: ClassVar[bool] = False

    def execute(self) -> None: ...


class SuffixProposer(LookupProposer[SuffixSequence]):
    """Looks the end of a text up in the text and in the answers of others. `take_parts` and `learn` may be called from
    any thread."""

    slice_tokens = 1024

    def __init__(self, limits: SuffixLimits, max_cached_requests: int, max_cached_tokens: int, name: str) -> None:
        """name: unlike that of any other drafter that ever was in the pool. max_cached_requests: 0: no memory."""
        super().__init__()
        self.limits, self.name = limits, name
        self._answers: SuffixAnswers | None = None
        if max_cached_requests:
            self._answers = SuffixAnswers(max_cached_requests, max_cached_tokens, limits)
        self._to_learn: deque[AnswerPart] = deque()
        self._to_send: deque[AnswerPart] = deque()
        self._num_requests = 0
        self._counts = Counter[str]()

    def new_sequence(self, key: SequenceKey) -> SuffixSequence:
        return SuffixSequence(key)

    def new_index(self, sequence: SuffixSequence) -> SuffixIndex:
        buckets = 1 << max(10, min(18, (2 * len(sequence.text) + 1024).bit_length()))
        return SuffixIndex(self.limits.max_tree_depth, buckets)

    def open(self, sequence: SuffixSequence) -> None:
        self._num_requests += 1
        sequence.request, sequence.num_shared = (self.name, self._num_requests), len(sequence.text)
        sequence.seed = sequence.sampling.seed if sequence.sampling.mode.samples_q else None
        super().open(sequence)

    def commit(self, sequence: SuffixSequence, commit: Commit) -> None:
        super().commit(sequence, commit)
        self._share(sequence, PART_TOKENS)

    def close(self, sequence: SuffixSequence) -> None:
        super().close(sequence)
        self._share(sequence, _LEAST_PART_TOKENS)

    def plan(self) -> Work | None:
        return super().plan() or (Learning() if self._to_learn else None)

    def complete(self, work: Work) -> None:
        if not isinstance(work, Learning):
            super().complete(work)
            return
        for _ in range(min(_PARTS_AT_ONCE, len(self._to_learn))):
            assert self._answers is not None
            self._answers.add(self._to_learn.popleft())
            self._counts["parts_learnt"] += 1

    def look_up(self, sequence: SuffixSequence) -> list[int]:
        end_of_text, num_wanted = sequence.text[-self.limits.max_tree_depth :], sequence.num_wanted
        own = best_path(sequence.index, end_of_text, num_wanted, self.limits, is_the_text=True)
        if self._answers is not None and own.score < num_wanted:
            asking = sequence.request, sequence.seed, sequence.sampling.tenant
            others = self._answers.path(end_of_text, num_wanted, *asking)
            if others.score > own.score:
                self._counts["others_text_drafts"] += 1
                return others.token_ids
        self._counts["own_text_drafts"] += bool(own.token_ids)
        return own.token_ids

    def counters(self) -> dict[str, Any]:
        names = ("parts_learnt", "parts_lost", "own_text_drafts", "others_text_drafts")
        return {
            "suffix_cached_requests": self._answers.num_requests if self._answers else 0,
            "suffix_cached_tokens": self._answers.num_tokens if self._answers else 0,
            **{f"suffix_{name}": self._counts[name] for name in names},
        }

    def take_parts(self) -> list[AnswerPart]:
        """Returns the parts that other drafters do not know yet."""
        taken = []
        while self._to_send:
            taken.append(self._to_send.popleft())
        return taken

    def learn(self, parts: list[AnswerPart]) -> None:
        """Takes parts of other drafters' answers; they are read between rounds."""
        if self._answers is not None:
            self._queue(self._to_learn, parts)

    def _share(self, sequence: SuffixSequence, least: int) -> None:
        """Gives an answer's new tokens to this drafter's own memory and to the pool, if there are enough and they may
        be remembered."""
        start, text, sampling = sequence.num_shared, sequence.text, sequence.sampling
        if self._answers is None or not sampling.remembered or len(text) - start < least:
            return
        context = array("i", text[max(0, start - self.limits.max_tree_depth) : start])
        part = AnswerPart(sequence.request, context, array("i", text[start:]), sequence.seed, sampling.tenant)
        sequence.num_shared = len(text)
        self._queue(self._to_learn, [part])
        self._queue(self._to_send, [part])

    def _queue(self, queue: deque[AnswerPart], parts: list[AnswerPart]) -> None:
        queue.extend(parts)
        while len(queue) > _MOST_WAITING:
            queue.popleft()
            self._counts["parts_lost"] += 1
