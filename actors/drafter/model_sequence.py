"""One sequence of the draft model's: its drafts, side branches for other outcomes, and what the engine holds. Pure.

At any time it is in one of two states. *Due*: a commit waits for its answer, and the main line's tokens after the text
are the drafts of the round that starts there. *Answered*: `sent` of them went out, and what is drafted now is for the
outcomes of their verification. The main line assumes that all are accepted and goes on with a guess of the bonus token,
then the next round's drafts; a side branch assumes another token at one of the positions.

The outcome of a round is (accepted length, next token), the key of Speculative Speculative Decoding's cache (Kumar et
al. 2026); here the main line's outcomes need no key, because they are a prefix of it.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

import numpy as np

from outrider.actors.drafter.engine import Draw, Drawn
from outrider.actors.drafter.sequence import Answer, Sequence, SequenceKey
from outrider.cluster.link.messages import (
    Commit,
    DraftOrigin,
    DraftSampling,
    PrefetchedProposal,
    ProposalStatus,
    SparseQ,
)

CATCH_UP_TOKENS = 32
"""Committed tokens a draft step may feed per sequence; further behind, it is prefill."""

_PACE_WEIGHT = 0.1

NUM_ALTERNATIVES = 2
"""Named with every draw. One covers about nine outcomes in ten, two 97 in a hundred."""


@dataclass(eq=False, slots=True)
class DraftChain:
    """Tokens from absolute position `start` on, each following the last. Grows at its end only.

    tokens: at positions start, start + 1 ...; drawn: None for a token that is taken as given (the outcome a side
    branch assumes).
    """

    start: int
    tokens: list[int] = field(default_factory=list)
    drawn: list[Drawn | None] = field(default_factory=list)
    num_computed: int = 0
    """Positions below this have valid KV, in the text before the line too."""

    ended: bool = False
    """Nothing can be drawn after its last token."""

    @property
    def end(self) -> int:
        """The position that is drawn next."""
        return self.start + len(self.tokens)

    def append(self, drawn: Drawn) -> None:
        if drawn.usable:
            self.tokens.append(drawn.token)
            self.drawn.append(drawn)
        else:
            self.ended = True

    def ids(self, start: int, end: int) -> list[int]:
        """Tokens at positions start to end - 1, all of them the line's."""
        return self.tokens[start - self.start : end - self.start]

    def at(self, position: int) -> Drawn | None:
        index = position - self.start
        return self.drawn[index] if 0 <= index < len(self.drawn) else None

    def cut(self, end: int) -> None:
        """Forget the tokens from position `end` on."""
        keep = max(end - self.start, 0)
        if keep < len(self.tokens):
            del self.tokens[keep:], self.drawn[keep:]
            self.ended = False
            self.num_computed = min(self.num_computed, max(end - 1, 0))


def stacked_q(drawn: abc.Sequence[Drawn | None]) -> SparseQ | None:
    """The q of a proposal of these tokens; None where none of them has one."""
    ids = [d.q_ids for d in drawn if d is not None and d.q_ids is not None]
    probs = [d.q_probs for d in drawn if d is not None and d.q_probs is not None]
    if not ids:
        return None
    if len(ids) < len(drawn):
        raise RuntimeError(f"{len(ids)} of {len(drawn)} drafts have a q: verification would be biased")
    return SparseQ(np.stack(ids), np.stack(probs))


@dataclass(eq=False, slots=True)
class SideBranch:
    """line.tokens[0] is the outcome's next token, at position line.start. value: the outcome's probability.

    private: of each KV group, block index -> the branch's own block; all other blocks are the sequence's. blocks: of
    each KV group, the branch's block table as far as its own blocks go.
    """

    line: DraftChain
    value: float
    private: tuple[dict[int, int], ...] = ()
    blocks: tuple[list[int], ...] = ()


class ModelSequence(Sequence):
    """Single-threaded; the draft loop guards it."""

    def __init__(self, key: SequenceKey) -> None:
        super().__init__(key)
        self.engine_id = ""
        """By which the engine knows it: another one in each of its lives."""

        self.max_len = 0
        """Of the draft model; neither text nor drafts go beyond."""

        self.main = DraftChain(0)
        self.sides: dict[tuple[int, int], SideBranch] = {}
        """By (position, token) of the outcome's next token."""

        self.dropped: list[SideBranch] = []
        """Pointless since the last commit; whoever owns their blocks frees them."""

        self.adopted: SideBranch | None = None
        """Became the main line; its private blocks are not yet copied into the sequence's."""

        self.sent: int | None = 0
        """Drafts proposed for the text as it is; None: due."""

        self.given_to = 0
        """Positions below this may hold drafts of somebody else's."""

        self.origin = DraftOrigin.NONE
        self.spawned_to = 0
        """Side branches have been chosen for outcomes at positions below this."""

        self.free_of_rounds = True
        """Drafts are a function of text and seed alone, whatever round they are for."""

        self._bonus_sampling = self.sampling
        self.announced = False
        """READY has been sent, or need not be."""

        self.tokens_per_s = 0.0
        """As they are committed lately; 0: not known yet."""

        self._committed_at: float | None = None
        self.retired = False
        """Closed, or too long for the draft model: then it is followed, so that commits stay known, but no longer in
        the engine."""

        # What the engine holds of it.

        self.started = False
        self.lacks_room = False
        """Its text is not begun, or was given up: there are not KV blocks for all of it."""

        self.appended_to = 0
        """Leading text tokens that the engine knows."""

        self.allocated_for = 0
        """Length of the text when blocks were last allocated."""

        self.allocated_to = 0
        """Positions below this have KV blocks."""

        self.blocks: tuple[list[int], ...] = ()
        """These blocks, one list per KV cache group."""

    def begin(self, engine_id: str, max_len: int) -> None:
        """The prompt is whole."""
        sampling, length = self.sampling, len(self.text)
        self.engine_id, self.max_len = engine_id, max_len
        self.num_wanted = self.num_on_miss = self.num_speculative_tokens
        self.main, self.spawned_to = DraftChain(length), length
        samples_q = sampling.mode.samples_q and sampling.top_n > 0
        self.free_of_rounds = not samples_q
        likeliest = DraftSampling(biases=sampling.biases, only_biased=sampling.only_biased)
        self._bonus_sampling = likeliest if samples_q else sampling

    @property
    def can_draft(self) -> bool:
        return self.started and not self.retired and self.committed_len - self.main.num_computed <= CATCH_UP_TOKENS

    @property
    def due(self) -> bool:
        return self.sent is None

    @property
    def num_uncomputed(self) -> int:
        """Tokens of text and main line that the main line's next step feeds: at least the last one."""
        return self.main.end - self.main.num_computed

    @property
    def num_drafted(self) -> int:
        """Main line tokens after the text."""
        return self.main.end - self.committed_len

    def token_ids(self, line: DraftChain, start: int, end: int) -> list[int]:
        """The tokens at positions start to end - 1 as `line` sees them: text, main line up to where it starts, line."""
        ids = self.text[start : min(end, len(self.text))]
        if end > len(self.text):
            shared = min(end, line.start) if line is not self.main else end
            if shared > len(self.text):
                ids = ids + self.main.ids(max(start, len(self.text)), shared)
            if line is not self.main and end > line.start:
                ids = ids + line.ids(max(start, line.start), end)
        return ids

    # What to draft next.

    def next_draw(self, line: DraftChain) -> Draw | None:
        """How `line` goes on; None: it is long enough, or must not."""
        base, position = self.committed_len, line.end
        if line.ended or position >= self.max_len:
            return None
        if line is not self.main:
            start = line.start + 1
            return None if position - start >= self.num_wanted else self._draw(self.sampling, position, start)
        if self.sent is None:
            return None if position - base >= self.num_wanted else self._draw(self.sampling, position, base)
        bonus_at = base + self.sent
        if self.num_wanted == 0:
            return None
        if position <= bonus_at:
            return self._draw(self._bonus_sampling, position, base)
        start = bonus_at + 1
        return None if position - start >= self.num_wanted else self._draw(self.sampling, position, start)

    def _draw(self, sampling: DraftSampling, position: int, round_start: int) -> Draw:
        return Draw(sampling, position, position if self.free_of_rounds else round_start, NUM_ALTERNATIVES)

    def drew(self, line: DraftChain, draw: Draw, drawn: Drawn) -> bool:
        """Take the result of a step that fed all of `line`. False: a commit has made it pointless meanwhile."""
        if not self.holds(line) or line.end != draw.position:
            return False
        if not self.free_of_rounds and self.next_draw(line) != draw:
            return False
        line.num_computed = draw.position
        line.append(drawn)
        return True

    def holds(self, line: DraftChain) -> bool:
        if line is self.main:
            return True
        side = self.sides.get((line.start, line.tokens[0])) if line.tokens else None
        return side is not None and side.line is line

    def open_outcomes(self) -> list[tuple[int, Drawn]]:
        """Positions at which verification may choose otherwise, and what the main line has there, from the first for
        which no side branches have been chosen. Asking settles them."""
        if self.sent is None or self.num_wanted == 0:
            return []
        end = min(self.main.end, self.committed_len + self.sent + 1, self.main.num_computed + 1)
        found = [(position, self.main.at(position)) for position in range(self.spawned_to, end)]
        self.spawned_to = max(self.spawned_to, end)
        return [(position, drawn) for position, drawn in found if drawn is not None]

    # What was committed, and the answer.

    def commit(self, commit: Commit) -> None:
        """Take committed tokens and keep of the drafts what continues them. Due afterwards, unless none are wanted."""
        base, token_ids, sent = self.committed_len, commit.token_ids, self.sent
        main, matched = self.main, 0
        drafted = main.ids(base, main.end)
        while matched < len(token_ids) and matched < len(drafted) and drafted[matched] == token_ids[matched]:
            matched += 1
        end = base + len(token_ids)
        side = self.sides.pop((end - 1, token_ids[-1]), None) if matched == len(token_ids) - 1 else None
        super().commit(commit)
        self.origin = DraftOrigin.MISS
        if side is not None:
            self._adopt(side)
        elif matched == len(token_ids) and (self.free_of_rounds or sent == matched - 1):
            # Drawn for the round that starts here, or for any.
            self.origin = DraftOrigin.MAIN_LINE if self.num_drafted > 0 else DraftOrigin.MISS
        else:
            self.main = DraftChain(end, num_computed=min(main.num_computed, base + matched, end - 1))
        if end < self.given_to:
            self.main.cut(next((at for at in range(end, self.main.end) if self.main.at(at) is None), self.main.end))
        self._drop_sides()
        self.sent = None
        if commit.num_wanted == 0:
            self._answered(0)

    def timed(self, num_tokens: int, now: float) -> None:
        """So many tokens have been committed at this time, seconds."""
        before, self._committed_at = self._committed_at, now
        if before is not None and now > before:
            pace = num_tokens / (now - before)
            self.tokens_per_s += (pace - self.tokens_per_s) * (_PACE_WEIGHT if self.tokens_per_s else 1.0)

    def _adopt(self, side: SideBranch) -> None:
        assert self.adopted is None, "side branches are chosen after the last adoption's blocks are back"
        self.main, self.adopted = side.line, side
        self.origin = DraftOrigin.SIDE_BRANCH if self.num_drafted > 0 else DraftOrigin.MISS

    def _drop_sides(self) -> None:
        self.dropped.extend(self.sides.values())
        self.sides.clear()
        self.spawned_to = self.committed_len

    def answer(self) -> Answer | None:
        """The answer to the commit, once as many drafts are there as are worth waiting for. None: not yet."""
        if not self.due:
            return None
        room = max(self.max_len - self.committed_len, 0)
        enough = min(self.num_on_miss, self.num_wanted, room)
        if self.num_drafted < enough and not self.main.ended:
            return None
        count = min(self.num_drafted, self.num_wanted, room)
        start = self.committed_len
        drawn = [self.main.at(start + index) for index in range(count)]
        q = stacked_q(drawn) if self.sampling.mode.samples_q else None
        answer = self.drafts(self.main.ids(start, start + count), q, self.origin)
        self._answered(count)
        return answer

    def ahead(self, line: DraftChain) -> PrefetchedProposal | None:
        """All the drafts that are wanted for the outcome that `line` assumes, if the last of them was drawn just now.
        None: they are not all there, or cannot be sent before their round is known."""
        if self.sent is None or not self.num_wanted or not self.free_of_rounds:
            return None
        at, origin = line.start, DraftOrigin.SIDE_BRANCH
        if line is self.main:
            at, origin = self.committed_len + self.sent, DraftOrigin.MAIN_LINE
        if line.end - at - 1 != self.num_wanted:
            return None
        next_token, *drafts = line.ids(at, line.end)
        return PrefetchedProposal(self.key[1], self.committed_len, at, next_token, drafts, origin)

    def take(self, count: int) -> None:
        """The target has had so many of the main line's drafts since before the commit: see `ahead`."""
        self._answered(count)

    def propose(self, drafts: list[int]) -> Answer:
        """The answer to the commit is these drafts of somebody else's, chosen by the text alone: q is one-hot. The main
        line goes on from them, with what it has as far as that is the same."""
        start, main, same = self.committed_len, self.main, 0
        known = main.ids(start, main.end)
        while same < min(len(known), len(drafts)) and known[same] == drafts[same]:
            same += 1
        if same < len(drafts):
            given = [main.at(start + index) for index in range(same)] + [None] * (len(drafts) - same)
            self.main = DraftChain(start, list(drafts), given, min(main.num_computed, start + same))
            self.given_to = start + len(drafts)
        self._answered(len(drafts))
        return self.drafts(list(drafts), None, DraftOrigin.MAIN_LINE)

    def give_up(self, status: ProposalStatus) -> Answer:
        """No drafts can be made for this commit."""
        self._answered(0)
        return self.no_drafts(status)

    def begin_again(self) -> None:
        """The engine holds no block of it any more. Answered before."""
        self.drop_everything()
        self.main = DraftChain(self.committed_len)
        self.blocks, self.allocated_to, self.allocated_for = (), 0, 0
        self.lacks_room, self.announced = True, False

    def drop_everything(self) -> None:
        self._drop_sides()
        if self.adopted is not None:
            self.dropped.append(self.adopted)
            self.adopted = None

    def _answered(self, count: int) -> None:
        self.sent = count
        if not self.free_of_rounds:
            # Anything beyond was drawn for this round, not for the next one.
            self.main.cut(self.committed_len + count)
