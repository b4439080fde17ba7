"""A drafted continuation of a text: one path of tokens, and what each was drawn from. Pure.

What the drafter asks its engine's ranks to run: one step over many rows. Plain data.

One sequence in the drafter: its committed text, the drafts that continue it, and side branches. Pure.

At any time the sequence is in one of two states. *Due*: a commit waits for its answer, and the main line's tokens
after the text are the drafts of the round that starts there. *Answered*: `sent` of them went out, and what is drafted
now is for the outcomes of their verification. The main line assumes that all are accepted and goes on with a guess of
the bonus token, then the next round's drafts; a side branch assumes another token at one of the positions.

The outcome of a round is (accepted length, next token), the key of Speculative Speculative Decoding's cache (Kumar et
al. 2026); here the main line's outcomes need no key, because they are a prefix of it.

A sequence of the draft model's, and what the engine holds of it. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.actors.drafter.ngram import GrowingText
from outrider.actors.drafter.strategy import Draft, SequenceKey, UnknownSequence
from outrider.cluster.link.messages import DraftSampling, Origin, ProposalStatus, SparseQ


@dataclass(frozen=True, slots=True)
class Drawn:
    """One drawn token.

    q_ids: int32 [n], q_probs: float32 [n], what it was drawn from; None where no q need travel.
    confidence: the drafter's probability of the token. alternatives: other tokens the verifier may choose in its place,
    likeliest first, with the drafter's probability of each. usable: False where there was nothing to draw, with
    bad_logits because the logits were not finite.
    """

    token: int
    q_ids: np.ndarray | None = None
    q_probs: np.ndarray | None = None
    confidence: float = 1.0
    alternatives: tuple[tuple[int, float], ...] = ()
    usable: bool = True
    bad_logits: bool = False


@dataclass(eq=False, slots=True)
class Line:
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


def stacked_q(drawn: Sequence[Drawn | None]) -> SparseQ | None:
    """The q of a proposal of these tokens; None where none of them has one."""
    ids = [d.q_ids for d in drawn if d is not None and d.q_ids is not None]
    probs = [d.q_probs for d in drawn if d is not None and d.q_probs is not None]
    if not ids:
        return None
    if len(ids) < len(drawn):
        raise RuntimeError(f"{len(ids)} of {len(drawn)} drafts have a q: verification would be biased")
    return SparseQ(np.stack(ids), np.stack(probs))


@dataclass(frozen=True, slots=True)
class Draw:
    """How the token after a row is drawn: at `position`, as a draft of the round that starts at `round_start`.

    alternatives: how many other likely tokens to name.
    """

    sampling: DraftSampling
    position: int
    round_start: int
    alternatives: int = 0


@dataclass(slots=True)
class StepRow:
    """Tokens to feed, the first of them at position `start`.

    block_ids: the KV blocks of the row's sequence from its beginning, one list per KV cache group, enough for what is
        fed. Nobody changes a list: who gets another block gets another list.
    draws: what is drawn after token_ids; none for a prefill chunk.
    guesses: one fewer than draws; what these draws but the last are expected to be, fed in the same step. Draws count
        up to the first that is not its guess.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: tuple[Sequence[int], ...]
    draws: Sequence[Draw] = ()
    guesses: Sequence[int] = ()

    @property
    def num_fed(self) -> int:
        return len(self.token_ids) + len(self.guesses)


@dataclass(slots=True)
class StepPlan:
    """restores, copies: (from, to) KV blocks to copy before anything is fed, first the ones, then the others.
    vocabulary_changes: (slot, token id) of the cut output head, see DraftVocabulary."""

    rows: list[StepRow] = field(default_factory=list)
    restores: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    vocabulary_changes: list[tuple[int, int]] = field(default_factory=list)


NUM_ALTERNATIVES = 2
"""Named with every draw. One covers about nine outcomes in ten, two 97 in a hundred."""


@dataclass(eq=False, slots=True)
class SideBranch:
    """line.tokens[0] is the outcome's next token, at position line.start. value: the outcome's probability.

    private: of each KV group, block index -> the branch's own block; all other blocks are the sequence's. blocks: of
    each KV group, the branch's block table as far as its own blocks go.
    """

    line: Line
    value: float
    private: tuple[dict[int, int], ...] = ()
    blocks: tuple[list[int], ...] = ()


class DraftSequence:
    """Single-threaded; the drafter's loop guards it."""

    def __init__(
        self, key: SequenceKey, token_ids: list[int], num_wanted: int, sampling: DraftSampling, max_len: int
    ) -> None:
        """max_len: of the draft model; neither text nor drafts go beyond."""
        self.key, self.sampling, self.max_len = key, sampling, max_len
        self.text = token_ids
        self.main = Line(len(token_ids))
        self.sides: dict[tuple[int, int], SideBranch] = {}
        """By (position, token) of the outcome's next token."""

        self.dropped: list[SideBranch] = []
        """Pointless since the last commit; whoever owns their blocks frees them."""

        self.adopted: SideBranch | None = None
        """Became the main line; its private blocks are not yet copied into the sequence's."""

        self.num_wanted = self.num_on_miss = num_wanted
        self.sent: int | None = 0
        """Drafts proposed for the text as it is; None: due."""

        self.origin = Origin.NONE
        self.spawned_to = len(token_ids)
        """Side branches have been chosen for outcomes at positions below this."""

        samples_q = sampling.mode.samples_q and sampling.top_n > 0
        self.free_of_rounds = not samples_q
        """Drafts are a function of text and seed alone, whatever round they are for."""

        likeliest = DraftSampling(biases=sampling.biases, only_biased=sampling.only_biased)
        self._guess_sampling = likeliest if samples_q else sampling

    @property
    def committed_len(self) -> int:
        return len(self.text)

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

    def token_ids(self, line: Line, start: int, end: int) -> list[int]:
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

    def next_draws(self, line: Line, count: int = 1) -> list[Draw]:
        """How `line` goes on, `count` tokens at most; none: it is long enough, or must not."""
        draws: list[Draw] = []
        if not line.ended:
            for position in range(line.end, min(line.end + count, self.max_len)):
                draw = self._draw_at(line, position)
                if draw is None:
                    break
                draws.append(draw)
        return draws

    def _draw_at(self, line: Line, position: int) -> Draw | None:
        base = self.committed_len
        if line is not self.main:
            start = line.start + 1
            return None if position - start >= self.num_wanted else self._draw(self.sampling, position, start)
        if self.sent is None:
            return None if position - base >= self.num_wanted else self._draw(self.sampling, position, base)
        guess_at = base + self.sent
        if self.num_wanted == 0:
            return None
        if position <= guess_at:
            return self._draw(self._guess_sampling, position, base)
        start = guess_at + 1
        return None if position - start >= self.num_wanted else self._draw(self.sampling, position, start)

    def _draw(self, sampling: DraftSampling, position: int, round_start: int) -> Draw:
        return Draw(sampling, position, position if self.free_of_rounds else round_start, NUM_ALTERNATIVES)

    def drew(self, line: Line, draws: Sequence[Draw], drawn: Sequence[Drawn]) -> bool:
        """Take the results of a step that fed all of `line`, and the tokens drawn but the last. False: a commit has
        made them pointless meanwhile."""
        taken = False
        for draw, token in zip(draws, drawn, strict=False):
            if not self.holds(line) or line.end != draw.position:
                break
            if not self.free_of_rounds and self._draw_at(line, line.end) != draw:
                break
            line.num_computed = draw.position
            line.append(token)
            taken = True
        return taken

    def holds(self, line: Line) -> bool:
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

    def commit(self, base_committed_len: int, token_ids: Sequence[int], num_wanted: int, num_on_miss: int) -> None:
        """Append committed tokens and keep of the drafts what continues them. The sequence is due afterwards, unless
        num_wanted is 0.

        Raises UnknownSequence when base_committed_len is not this sequence's length.
        """
        base = self.committed_len
        if base_committed_len != base:
            raise UnknownSequence(self.key)
        sent = self.sent
        main, matched = self.main, 0
        drafted = main.ids(base, main.end)
        while matched < len(token_ids) and matched < len(drafted) and drafted[matched] == token_ids[matched]:
            matched += 1
        end = base + len(token_ids)
        side = self.sides.pop((end - 1, token_ids[-1]), None) if matched == len(token_ids) - 1 else None
        self.text.extend(token_ids)
        self.origin = Origin.MISS
        if side is not None:
            self._adopt(side)
        elif matched == len(token_ids) and (self.free_of_rounds or sent == matched - 1):
            # Drawn for the round that starts here, or for any.
            self.origin = Origin.MAIN_LINE if self.num_drafted > 0 else Origin.MISS
        else:
            self.main = Line(end, num_computed=min(main.num_computed, base + matched, end - 1))
        self._drop_sides()
        self.num_wanted, self.num_on_miss = num_wanted, num_on_miss
        self.sent = None
        if num_wanted == 0:
            self._answered(0)

    def _adopt(self, side: SideBranch) -> None:
        assert self.adopted is None, "side branches are chosen after the last adoption's blocks are back"
        self.main, self.adopted = side.line, side
        self.origin = Origin.SIDE_BRANCH if self.num_drafted > 0 else Origin.MISS

    def _drop_sides(self) -> None:
        self.dropped.extend(self.sides.values())
        self.sides.clear()
        self.spawned_to = self.committed_len

    def answer(self) -> Draft | None:
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
        draft = Draft(
            self.key,
            start,
            self.main.ids(start, start + count),
            ProposalStatus.OK,
            stacked_q(drawn) if self.sampling.mode.samples_q else None,
            self.origin,
        )
        self._answered(count)
        return draft

    def give_up(self) -> None:
        """No answer can be made for this commit."""
        self._answered(0)

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


CATCH_UP_TOKENS = 32
"""Committed tokens a draft step may feed per sequence; further behind, it is prefill."""


@dataclass(eq=False, slots=True)
class Resident:
    """A sequence, and what the engine holds of it."""

    sequence: DraftSequence
    request_id: str
    retired: bool = False
    """Too long for the draft model: followed, so that commits stay known, but no longer in the engine."""

    appended_to: int = 0
    """Leading text tokens that the engine knows."""

    allocated_for: int = 0
    """Length of the text when blocks were last allocated."""

    allocated_to: int = 0
    """Positions below this have KV blocks."""

    blocks: tuple[list[int], ...] = ()
    """These blocks, one list per KV cache group."""

    index: GrowingText | None = None
    """Of the text, for guesses of draws."""

    asked: int = 0
    """Number of the commit that waits, or waited last."""

    announced: bool = False
    """READY has been sent, or need not be."""

    @property
    def can_draft(self) -> bool:
        sequence = self.sequence
        return not self.retired and sequence.committed_len - sequence.main.num_computed <= CATCH_UP_TOKENS
