"""A drafted continuation of a text: one path of tokens, and what each was drawn from. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.messages import SparseQ


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
