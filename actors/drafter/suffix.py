"""Suffix decoding as a drafter: what followed the end of the text before, in it or in the answers of others. Pure.

The text alone decides, so q is one-hot, and a look-up is answered on the receive thread like an n-gram drafter's.
Longer prompts and the answers of others are read between rounds, a slice at a time; of the answers as many are kept as
there is room for.
"""

from __future__ import annotations

from array import array
from collections import abc, deque
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, ClassVar

from outrider.actors.drafter.proposer import Work
from outrider.actors.drafter.sequence import Answer, Foreseen, Sequence, SequenceKey
from outrider.actors.drafter.suffix_index import NO_PATH, Path, SuffixIndex, SuffixLimits, best_path
from outrider.cluster.link.messages import Commit, ProposalStatus

RequestKey = tuple[str, int]
"""(drafter, number): unique over all drafters of a pool."""


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """Consecutive tokens of one request's answer, int32.

    context: what was before them. seed: the request's, where its tokens were drawn by rejection or block verification;
    None where they do not depend on drafts (greedy, coupled). tenant: whose requests may learn them; 0: everybody's.
    """

    request: RequestKey
    context: array[int]
    token_ids: array[int]
    seed: int | None = None
    tenant: int = 0


TENANT_STRIDE = 1 << 20
"""More than any vocabulary has tokens. A tenant's tokens are remembered as others than every other tenant's, so that
one memory with one bound serves all, and no match reaches across."""

MOST_TENANTS = (1 << 31) // TENANT_STRIDE - 1

MAX_CACHED_TOKENS = 2_000_000
"""Tokens of answers that a memory holds at most, 28 bytes each, whatever the number of answers."""


class SuffixAnswers:
    """Answers of many requests: first in, first out, bounded by requests and by tokens. Those of MOST_TENANTS tenants
    are told apart; a tenant beyond these has no memory."""

    def __init__(self, max_requests: int, max_tokens: int, limits: SuffixLimits) -> None:
        self._max_requests, self._max_tokens, self._limits = max_requests, max_tokens, limits
        buckets = 1 << max(10, min(20, (max_tokens - 1).bit_length()))
        self._index = SuffixIndex(limits.max_tree_depth, buckets)
        self._parts: deque[tuple[RequestKey, int | None, int]] = deque()
        """Request, seed and the position after each part."""

        self._shifts: dict[int, int] = {0: 0}
        """Tenant -> what is added to its tokens."""

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
        shift = self._shift_of(part.tenant)
        if shift is None:
            return
        self._index.append(_shifted(part.token_ids, shift), context=_shifted(part.context, shift))
        self._parts.append((part.request, part.seed, self._index.end))
        self._parts_of[part.request] = self._parts_of.get(part.request, 0) + 1
        if part.seed is not None:
            of_seed = self._seeds.setdefault(part.seed, {})
            of_seed[part.request] = of_seed.get(part.request, 0) + 1
        while self._parts and (self.num_requests > self._max_requests or self.num_tokens > self._max_tokens):
            self._forget_oldest()

    def path(
        self,
        end_of_text: abc.Sequence[int],
        num_wanted: int,
        request: RequestKey,
        seed: int | None,
        tenant: int = 0,
    ) -> Path:
        """What other requests' answers say comes next.

        seed: as in AnswerPart. A request that is drawn with the seed of another draws the same random numbers, and
        drafting from tokens that these numbers chose would bias it: it learns nothing here.
        """
        if seed is not None and any(other != request for other in self._seeds.get(seed, ())):
            return NO_PATH
        shift = self._shift_of(tenant)
        if shift is None:
            return NO_PATH
        found = best_path(self._index, _shifted(end_of_text, shift), num_wanted, self._limits, is_the_text=False)
        if len(self._shifts) == 1:
            return found
        # An answer's end is followed by whatever was remembered next, which may be another tenant's.
        own = list(takewhile(lambda token: shift <= token < shift + TENANT_STRIDE, found.token_ids))
        return Path(min(found.score, len(own)), [token - shift for token in own])

    def _shift_of(self, tenant: int) -> int | None:
        """None: there are too many."""
        if (shift := self._shifts.get(tenant)) is None and len(self._shifts) <= MOST_TENANTS:
            shift = self._shifts[tenant] = len(self._shifts) * TENANT_STRIDE
        return shift

    def _forget_oldest(self) -> None:
        request, seed, end = self._parts.popleft()
        self._index.forget_before(end)
        _count_down(self._parts_of, request)
        if seed is not None:
            of_seed = self._seeds[seed]
            _count_down(of_seed, request)
            if not of_seed:
                del self._seeds[seed]


def _shifted(tokens: abc.Sequence[int], shift: int) -> abc.Sequence[int]:
    return tokens if not shift else array("i", [token + shift for token in tokens])


def _count_down(counts: dict[RequestKey, int], request: RequestKey) -> None:
    counts[request] -= 1
    if counts[request] == 0:
        del counts[request]


PART_TOKENS = 64
"""Tokens of a running answer after which others may learn them."""

_LEAST_PART_TOKENS = 4
_SLICE_TOKENS = 2048
"""Read at once: about two milliseconds."""

_SLICE_PARTS = 8
_MOST_WAITING = 4096
"""Parts that wait to be learnt, or to be sent; beyond that the oldest are lost, and counted."""


class SuffixSequence(Sequence):
    def begin(self, request: RequestKey, max_match_len: int) -> None:
        """The prompt is whole."""
        self.request = request
        buckets = 1 << max(10, min(18, (2 * len(self.text) + 1024).bit_length()))
        self.index = SuffixIndex(max_match_len, buckets)
        self.seed = self.sampling.seed if self.sampling.mode.samples_q else None
        self.num_read = 0
        """Leading tokens of the text that the index has."""

        self.num_shared = len(self.text)
        """Leading tokens that are the prompt's, or that others know."""

    def read(self) -> int:
        """A slice, into the index. Returns its length; num_read is for whoever holds the loop's lock."""
        tokens = self.text[self.num_read : self.num_read + _SLICE_TOKENS]
        self.index.append(tokens)
        return len(tokens)


@dataclass(eq=False, slots=True)
class _Reading:
    """The next slice of a prompt, whose index nobody else uses before all is read. None: answers of others are to be
    learnt, which belongs to the lock."""

    is_step: ClassVar[bool] = False
    sequence: SuffixSequence | None = None
    num_tokens: int = 0
    """How many were read; by the time they are counted the text may have grown."""

    def execute(self) -> None:
        if self.sequence is not None:
            self.num_tokens = self.sequence.read()


@dataclass
class SuffixCounters:
    parts_learnt: int = 0
    parts_lost: int = 0
    own_text_drafts: int = 0
    others_text_drafts: int = 0


@dataclass
class SuffixProposer:
    """Implements Proposer without a model. `take_parts` and `learn` may be called from any thread."""

    limits: SuffixLimits
    max_cached_requests: int
    max_cached_tokens: int
    name: str
    """Of this drafter, unlike any other's that ever was in the pool."""

    counted: SuffixCounters = field(default_factory=SuffixCounters)

    def __post_init__(self) -> None:
        self._answers: SuffixAnswers | None = None
        if self.max_cached_requests:
            self._answers = SuffixAnswers(self.max_cached_requests, self.max_cached_tokens, self.limits)
        self._num_sequences = 0
        self._unread: dict[SuffixSequence, None] = {}
        """Whose text is not read whole, the oldest first."""

        self._to_learn: deque[AnswerPart] = deque()
        self._to_send: deque[AnswerPart] = deque()
        self._last_number = 0

    def new_sequence(self, key: SequenceKey) -> SuffixSequence:
        return SuffixSequence(key)

    def open(self, sequence: SuffixSequence) -> list[Answer]:
        self._num_sequences += 1
        self._last_number += 1
        sequence.begin((self.name, self._last_number), self.limits.max_tree_depth)
        self._count_read(sequence, sequence.read())
        return [] if sequence in self._unread else [sequence.no_drafts(ProposalStatus.READY)]

    def commit(self, sequence: SuffixSequence, commit: Commit) -> list[Answer]:
        sequence.commit(commit)
        self._share(sequence, PART_TOKENS)
        unread = sequence in self._unread
        if not unread:
            self._count_read(sequence, sequence.read())
        if not commit.num_wanted:
            return []
        return [sequence.no_drafts(ProposalStatus.NOT_READY) if unread else self._looked_up(sequence)]

    def delivered(self) -> list[Answer]:
        return []

    def close(self, sequence: SuffixSequence) -> None:
        self._num_sequences -= 1
        self._unread.pop(sequence, None)
        self._share(sequence, _LEAST_PART_TOKENS)

    def unlink(self, link_id: int) -> None: ...

    def limit_vocabulary(self, size: int) -> None:
        """What is proposed was committed before, by a target of this application."""

    def plan(self) -> tuple[Work | None, list[Answer]]:
        for sequence in self._unread:
            return _Reading(sequence), []
        return (_Reading() if self._to_learn else None), []

    def complete(self, work: Work) -> list[Answer]:
        """Take one slice: of a prompt, while somebody waits for one, else of the answers of others."""
        assert isinstance(work, _Reading)
        sequence = work.sequence
        if sequence is not None:
            return self._read_on(sequence, work.num_tokens) if sequence in self._unread else []
        for _ in range(min(_SLICE_PARTS, len(self._to_learn))):
            assert self._answers is not None
            self._answers.add(self._to_learn.popleft())
            self.counted.parts_learnt += 1
        return []

    def foreseen(self) -> list[Foreseen]:
        return []

    def step_us(self) -> int:
        return 0

    def usage(self) -> dict[str, float]:
        return {
            "num_sequences": self._num_sequences,
            "num_prefilling": len(self._unread),
            "kv_cache_usage": 0.0,
        }

    def counters(self) -> dict[str, Any]:
        answers, counted = self._answers, self.counted
        return {
            "suffix_cached_requests": answers.num_requests if answers else 0,
            "suffix_cached_tokens": answers.num_tokens if answers else 0,
            "suffix_parts_learnt": counted.parts_learnt,
            "suffix_parts_lost": counted.parts_lost,
            "suffix_own_text_drafts": counted.own_text_drafts,
            "suffix_others_text_drafts": counted.others_text_drafts,
        }

    def take_parts(self) -> list[AnswerPart]:
        """What other drafters do not know yet."""
        taken = []
        while self._to_send:
            taken.append(self._to_send.popleft())
        return taken

    def learn(self, parts: list[AnswerPart]) -> None:
        """Take parts of other drafters' answers; they are read between rounds."""
        if self._answers is not None:
            self._queue(self._to_learn, parts)

    def _queue(self, queue: deque[AnswerPart], parts: list[AnswerPart]) -> None:
        queue.extend(parts)
        while len(queue) > _MOST_WAITING:
            queue.popleft()
            self.counted.parts_lost += 1

    def _looked_up(self, sequence: SuffixSequence) -> Answer:
        return sequence.drafts(self._draft(sequence, sequence.num_wanted))

    def _draft(self, sequence: SuffixSequence, num_wanted: int) -> list[int]:
        end_of_text = sequence.text[-self.limits.max_tree_depth :]
        own = best_path(sequence.index, end_of_text, num_wanted, self.limits, is_the_text=True)
        if self._answers is not None and own.score < num_wanted:
            others = self._answers.path(
                end_of_text, num_wanted, sequence.request, sequence.seed, sequence.sampling.tenant
            )
            if others.score > own.score:
                self.counted.others_text_drafts += 1
                return others.token_ids
        self.counted.own_text_drafts += bool(own.token_ids)
        return own.token_ids

    def _count_read(self, sequence: SuffixSequence, num_tokens: int) -> None:
        sequence.num_read += num_tokens
        if sequence.num_read < len(sequence.text):
            self._unread[sequence] = None
        else:
            self._unread.pop(sequence, None)

    def _read_on(self, sequence: SuffixSequence, num_tokens: int) -> list[Answer]:
        self._count_read(sequence, num_tokens)
        if sequence in self._unread:
            return []
        answers = [sequence.no_drafts(ProposalStatus.READY)]
        if sequence.num_wanted:  # whoever asked before waits for an answer from READY on
            answers.append(self._looked_up(sequence))
        return answers

    def _share(self, sequence: SuffixSequence, least: int) -> None:
        """Give what is new in an answer to this drafter's own memory and to the pool, if it is enough and may be."""
        start, text = sequence.num_shared, sequence.text
        if self._answers is None or not sequence.sampling.remembered or len(text) - start < least:
            return
        context = text[max(0, start - self.limits.max_tree_depth) : start]
        part = AnswerPart(
            sequence.request, array("i", context), array("i", text[start:]), sequence.seed, sequence.sampling.tenant
        )
        sequence.num_shared = len(text)
        self._queue(self._to_learn, [part])
        self._queue(self._to_send, [part])
