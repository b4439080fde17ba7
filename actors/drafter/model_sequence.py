"""Holds one sequence of the draft model: its drafts, side branches for other outcomes, and its KV blocks.
Imports neither vLLM, Ray nor torch.

At any time it is in one of two states. *Due*: a commit waits for its answer, and the main line's tokens after the text
are the drafts of the round that starts there. *Answered*: `num_proposed` of them are being verified,
and what is drafted now is for the outcomes of their verification. The main line assumes that all are accepted and goes
on with a guess of the bonus token, then the next round's drafts; a side branch assumes another token at one of the
positions.

A model that drafts *in one pass* draws a whole round and a guess of the bonus token after each row: the first after
the row's last token, the others after masks behind it. The KV of a mask counts as not computed. Main line and side
branches are rows of one step, since none needs the KV of another: each feeds the sent drafts that it assumes.

A proposal of such a model may carry further paths of a tree (draft_paths.py). After one nothing is drafted ahead: the
round ends in one of so many places that few of them could be prepared for, and a miss costs one pass.

The outcome of a round is (accepted length, next token), the key of Speculative Speculative Decoding's cache (Kumar et
al. 2026). Here the main line's outcomes need no key, because they are a prefix of it.
"""

from __future__ import annotations

import itertools
from collections import abc
from dataclasses import dataclass, field

import numpy as np

from outrider.actors.drafter.draft_paths import draft_paths
from outrider.actors.drafter.engine import Draw, Drawn
from outrider.actors.drafter.outcomes import OutcomeModel
from outrider.actors.drafter.proposer import Sequence, SequenceKey
from outrider.cluster.link.messages import (
    Commit,
    DraftOrigin,
    DraftSampling,
    PrefetchedProposal,
    Proposals,
    ProposalStatus,
    SparseQ,
)

CATCH_UP_TOKENS = 32
"""Committed tokens that a draft step may feed of one sequence. A sequence that is further behind is prefilled."""

NUM_ALTERNATIVES = 2
"""Other tokens named with every draw. One covers about nine outcomes in ten, two 97 in a hundred."""


@dataclass(eq=False, slots=True)
class DraftChain:
    """Holds drafted tokens from absolute position `start` on. It grows at its end only.

    tokens: at positions start, start + 1 ...; drawn: how each was drawn, None for a token that is assumed (the outcome
    of a side branch) or given by a look-up.
    """

    start: int
    tokens: list[int] = field(default_factory=list)
    drawn: list[Drawn | None] = field(default_factory=list)
    num_computed: int = 0
    """Positions below this have valid KV, those of the text included."""

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
        """Returns the chain's tokens at positions start to end - 1."""
        return self.tokens[start - self.start : end - self.start]

    def at(self, position: int) -> Drawn | None:
        index = position - self.start
        return self.drawn[index] if 0 <= index < len(self.drawn) else None

    def num_same(self, start: int, token_ids: abc.Sequence[int]) -> int:
        """Returns how many of these tokens the chain has too, from position `start` up to the first difference."""
        own = self.ids(start, start + len(token_ids))
        return next((i for i, (a, b) in enumerate(zip(own, token_ids, strict=False)) if a != b), len(own))

    def cut(self, end: int) -> None:
        """Forgets the tokens from position `end` on."""
        keep = max(end - self.start, 0)
        if keep < len(self.tokens):
            del self.tokens[keep:], self.drawn[keep:]
            self.ended = False
            self.num_computed = min(self.num_computed, max(end - 1, 0))


def stacked_q(drawn: abc.Sequence[Drawn | None]) -> SparseQ | None:
    """Returns the q of a proposal of these tokens; None where none of them has one."""
    ids = [d.q_ids for d in drawn if d is not None and d.q_ids is not None]
    probs = [d.q_probs for d in drawn if d is not None and d.q_probs is not None]
    if not ids:
        return None
    if len(ids) < len(drawn):
        raise RuntimeError(f"{len(ids)} of {len(drawn)} drafts have a q: verification would be biased")
    return SparseQ(np.stack(ids), np.stack(probs))


@dataclass(eq=False, slots=True)
class SideBranch:
    """Drafts for one outcome beside the main line: chain.tokens[0] is the outcome's next token, at chain.start.

    value: the outcome's probability.
    private: of each KV group, block index -> the branch's own block; all other blocks are the sequence's.
    blocks: of each KV group, the branch's block table as far as its own blocks go.
    """

    chain: DraftChain
    value: float
    private: tuple[dict[int, int], ...] = ()
    blocks: tuple[list[int], ...] = ()


class ModelSequence(Sequence):
    """Holds a sequence's drafts and KV blocks. The draft loop guards it."""

    def __init__(self, key: SequenceKey, one_pass: bool = False) -> None:
        """one_pass: a row draws all drafts wanted and a guess of the bonus token, all but the first after masks."""
        super().__init__(key)
        self.one_pass = one_pass
        self.engine_id = ""
        """The engine's id for it, a new one each time it is opened."""

        self.max_len = 0
        """The draft model's limit: neither text nor drafts go beyond."""

        self.main = DraftChain(0)
        self.sides: dict[tuple[int, int], SideBranch] = {}
        """By (position, token) of the outcome's next token."""

        self.dropped: list[SideBranch] = []
        """Branches that a commit made useless. The owner of their blocks frees them."""

        self.adopted: SideBranch | None = None
        """The branch that became the main line, while its private blocks are not yet copied into the sequence's."""

        self.num_proposed: int | None = 0
        """Number of drafts being verified; None while a commit awaits its proposal."""

        self.lookup_end = 0
        """Drafts of a look-up are at positions below this, if there are any."""

        self.num_proposed_paths = 1
        """Paths of what was proposed for the text as it is. Above 1 nothing is drafted ahead."""

        self.origin = DraftOrigin.NONE
        self.spawned_to = 0
        """Side branches have been chosen for outcomes at positions below this."""

        self.drawn_per_round = False
        """Whether draws are keyed by their round's start position (rejection, block), so that drafts are valid only in
        that round."""

        self._bonus_sampling = self.sampling
        self.announced = False
        """READY has been sent, or need not be."""

        self.retired = False
        """It is closed, or too long for the draft model: then its text is followed, but no longer in the engine."""

        # What the engine holds of it.

        self.lacks_room = False
        """Its text is not begun, or was given up, for want of KV blocks."""

        self.appended_to = 0
        """Leading text tokens that the engine has."""

        self.allocated_for = 0
        """Length of the text when blocks were last allocated."""

        self.allocated_to = 0
        """Positions below this have KV blocks."""

        self.blocks: tuple[list[int], ...] = ()
        """These blocks, one list per KV cache group."""

    def begin(self, engine_id: str, max_len: int) -> None:
        """Prepares for drafting. The prompt is complete."""
        sampling, length = self.sampling, len(self.text)
        self.engine_id, self.max_len = engine_id, max_len
        self.num_wanted = self.num_on_miss = self.num_speculative_tokens
        self.main, self.spawned_to = DraftChain(length), length
        self.drawn_per_round = sampling.has_q
        likeliest = DraftSampling(biases=sampling.biases, only_biased=sampling.only_biased)
        self._bonus_sampling = likeliest if sampling.has_q else sampling

    @property
    def can_draft(self) -> bool:
        """Its text is read so far that a draft step can feed the rest."""
        return not self.retired and self.committed_len - self.main.num_computed <= CATCH_UP_TOKENS

    @property
    def due(self) -> bool:
        return self.num_proposed is None

    @property
    def num_uncomputed(self) -> int:
        """Tokens of text and main line that the main line's next step feeds: at least the last one."""
        return self.main.end - self.main.num_computed

    @property
    def num_drafted(self) -> int:
        """Tokens of the main line after the text."""
        return self.main.end - self.committed_len

    def token_ids(self, chain: DraftChain, start: int, end: int) -> list[int]:
        """Returns the tokens at positions start to end - 1 as `chain` sees them: text, main line up to where `chain`
        starts, `chain`."""
        ids = self.text[start : min(end, len(self.text))]
        if end > len(self.text):
            shared = min(end, chain.start) if chain is not self.main else end
            if shared > len(self.text):
                ids = ids + self.main.ids(max(start, len(self.text)), shared)
            if chain is not self.main and end > chain.start:
                ids = ids + chain.ids(max(start, chain.start), end)
        return ids

    # What to draft next.

    def next_draws(self, chain: DraftChain) -> list[Draw]:
        """Returns what the next row of `chain` draws; []: the chain is long enough, or must not go on."""
        draws: list[Draw] = []
        guess_at = None if self.num_proposed is None else self.committed_len + self.num_proposed
        while (draw := self.next_draw(chain, len(draws))) is not None:
            draws.append(draw)
            is_guess = chain is self.main and draw.position == guess_at
            if not self.one_pass or is_guess:  # the guess must be fed as a token before the next round is drawn
                break
        return draws

    def next_draw(self, chain: DraftChain, num_ahead: int = 0) -> Draw | None:
        """Returns how `chain` goes on, after so many tokens that are not drawn yet; None: it is long enough, or must
        not."""
        base, position = self.committed_len, chain.end + num_ahead
        most = self.num_wanted + self.one_pass
        if chain.ended or position >= self.max_len:
            return None
        if chain is not self.main:
            start = chain.start + 1
            return None if position - start >= most else self._draw(self.sampling, position, start)
        if self.num_proposed is None:
            return None if position - base >= most else self._draw(self.sampling, position, base)
        bonus_at = base + self.num_proposed
        if self.num_wanted == 0:
            return None
        if position <= bonus_at:
            return self._draw(self._bonus_sampling, position, base)
        start = bonus_at + 1
        return None if position - start >= most else self._draw(self.sampling, position, start)

    def _draw(self, sampling: DraftSampling, position: int, round_start: int) -> Draw:
        return Draw(sampling, position, round_start if self.drawn_per_round else position, NUM_ALTERNATIVES)

    def drew(self, chain: DraftChain, draws: abc.Sequence[Draw], drawn: abc.Sequence[Drawn]) -> bool:
        """Appends the results of a row that fed all of `chain`. Returns False where a commit has made them useless."""
        first = draws[0].position
        if not self.holds(chain) or chain.end != first:
            return False
        if self.one_pass or self.drawn_per_round:
            as_now = itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(draws, self.next_draws(chain), strict=False)
            )
            drawn = drawn[: sum(1 for _ in as_now)]
            if not drawn:
                return False
        chain.num_computed = first
        for one in drawn:
            if not chain.ended:
                chain.append(one)
        return True

    def holds(self, chain: DraftChain) -> bool:
        """Whether it is the main line or a side branch's, still."""
        if chain is self.main:
            return True
        side = self.sides.get((chain.start, chain.tokens[0])) if chain.tokens else None
        return side is not None and side.chain is chain

    def open_outcomes(self) -> list[tuple[int, Drawn]]:
        """Returns the positions at which verification may choose otherwise, and what the main line has there, from the
        first one for which no side branches have been chosen. Each position is returned once."""
        if self.num_proposed is None or self.num_wanted == 0:
            return []
        end = min(self.main.end, self.committed_len + self.num_proposed + 1)
        if not self.one_pass:  # a side branch has its KV up to there from the main line
            end = min(end, self.main.num_computed + 1)
        found = [(position, self.main.at(position)) for position in range(self.spawned_to, end)]
        self.spawned_to = max(self.spawned_to, end)
        return [(position, drawn) for position, drawn in found if drawn is not None]

    # What was committed, and the answer.

    def commit(self, commit: Commit) -> None:
        """Appends committed tokens and keeps the drafts that continue them. It is due afterwards, unless no drafts are
        wanted."""
        base, token_ids, proposed = self.committed_len, commit.token_ids, self.num_proposed
        main, matched = self.main, self.main.num_same(self.committed_len, commit.token_ids)
        end = base + len(token_ids)
        side = self.sides.pop((end - 1, token_ids[-1]), None) if matched == len(token_ids) - 1 else None
        super().commit(commit)
        self.origin = DraftOrigin.MISS
        if side is not None:
            self._adopt(side)
        elif matched == len(token_ids) and (proposed == matched - 1 or not (self.drawn_per_round or self.one_pass)):
            # Drawn for the round that starts here, or for any. After masks only those that stand for what was sent.
            self.origin = DraftOrigin.MAIN_LINE if self.num_drafted > 0 else DraftOrigin.MISS
        else:
            self.main = DraftChain(end, num_computed=min(main.num_computed, base + matched, end - 1))
        if end < self.lookup_end:  # a look-up's drafts that were not verified are no drafts of the model's
            self.main.cut(next((at for at in range(end, self.main.end) if self.main.at(at) is None), self.main.end))
        self._drop_sides()
        self.num_proposed = None
        if commit.num_wanted == 0:
            self.answered(0)

    def _adopt(self, side: SideBranch) -> None:
        assert self.adopted is None, "side branches are chosen after the last adoption's blocks are back"
        self.main, self.adopted = side.chain, side
        self.origin = DraftOrigin.SIDE_BRANCH if self.num_drafted > 0 else DraftOrigin.MISS

    def _drop_sides(self) -> None:
        self.dropped.extend(self.sides.values())
        self.sides.clear()
        self.spawned_to = self.committed_len

    @property
    def num_missing(self) -> int:
        """Drafts that the answer to the commit waits for. A round that was drawn in one pass is not added to."""
        if self.main.ended or (self.one_pass and self.num_drafted):
            return 0
        enough = min(self.num_on_miss, self.num_wanted, self.max_len - self.committed_len)
        return max(enough - self.num_drafted, 0)

    def answer(self, outcomes: OutcomeModel) -> Proposals | None:
        """Returns the answer to the commit, once as many drafts are there as are worth waiting for. None: not yet."""
        if not self.due:
            return None
        if self.num_missing:
            return None
        count = min(self.num_drafted, self.num_wanted, max(self.max_len - self.committed_len, 0))
        start = self.committed_len
        drawn = [self.main.at(start + index) for index in range(count)]
        q = stacked_q(drawn) if self.sampling.mode.samples_q else None
        answer = self.drafts(self.main.ids(start, start + count), q, self.origin)
        if self.one_pass and self.num_paths > 1:
            answer.paths = draft_paths(self.main, start, count, outcomes)[: self.num_paths - 1]
        self.answered(count, 1 + len(answer.paths))
        return answer

    def prefetched(self, chain: DraftChain) -> PrefetchedProposal | None:
        """Returns all the drafts that are wanted for the outcome that `chain` assumes, if the last of them was drawn
        just now. None: some are missing, or they cannot be sent before their round is known."""
        if self.num_proposed is None or not self.num_wanted or self.drawn_per_round:
            return None
        at, origin = chain.start, DraftOrigin.SIDE_BRANCH
        if chain is self.main:
            at, origin = self.committed_len + self.num_proposed, DraftOrigin.MAIN_LINE
        count = chain.end - at - 1
        if count < 1 or (count != self.num_wanted and not self.one_pass):
            return None
        next_token, *drafts = chain.ids(at, min(chain.end, at + 1 + self.num_wanted))
        return PrefetchedProposal(self.key[1], self.committed_len, at, next_token, drafts, origin)

    def propose(self, drafts: list[int]) -> Proposals:
        """Returns the answer to the commit with a look-up's drafts, which the text alone decides: q is one-hot. The
        main line goes on from them and keeps its own tokens as far as they are the same."""
        start, main = self.committed_len, self.main
        same = main.num_same(start, drafts)
        if same < len(drafts):
            given = [main.at(start + index) for index in range(same)] + [None] * (len(drafts) - same)
            self.main = DraftChain(start, list(drafts), given, min(main.num_computed, start + same))
            self.lookup_end = start + len(drafts)
        self.answered(len(drafts))
        return self.drafts(list(drafts), None, DraftOrigin.MAIN_LINE)

    def give_up(self, status: ProposalStatus) -> Proposals:
        """Returns the answer to a commit for which no drafts can be made."""
        self.answered(0)
        return self.no_drafts(status)

    def begin_again(self) -> None:
        """Forgets what the engine held: it has given back all blocks. The commit is answered before."""
        self.drop_everything()
        self.main = DraftChain(self.committed_len)
        self.blocks, self.allocated_to, self.allocated_for = (), 0, 0
        self.lacks_room, self.announced = True, False

    def drop_everything(self) -> None:
        """Drops all side branches, the adopted one included."""
        self._drop_sides()
        if self.adopted is not None:
            self.dropped.append(self.adopted)
            self.adopted = None

    def answered(self, count: int, num_paths: int = 1) -> None:
        """Notes that the target has so many of the main line's drafts for the text as it is, in so many paths."""
        self.num_proposed, self.num_proposed_paths = count, num_paths
        if self.one_pass:
            # What follows the guess of the bonus token is drawn anew, when that is no mask any more.
            self.main.cut(self.committed_len + count + 1)
        elif self.drawn_per_round:
            # Anything beyond was drawn for this round, not for the next one.
            self.main.cut(self.committed_len + count)
