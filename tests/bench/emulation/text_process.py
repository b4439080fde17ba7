"""The text that emulated models write, and how far their drafter follows it.

Both models are functions of one row: the token id and its position. That makes them the same for one row or many, for
prefill, verification and side branches, and after a rollback, without any state. The target's choice after token x at
position t is a hash of (x, t); whether the drafter agrees there is another hash of the same two.

Shapes: R rows.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

NUM_RANKED = 3
"""Tokens that have logits of their own in a row: the choice and two alternatives."""

NUM_LANES = 32
"""Texts that can be told apart for ever, see `TokenRange`."""

STRETCH = 64
"""Tokens after which a text that shifts goes over to its next part."""

_MASK = (1 << 62) - 1
_UNIT = 1 << 40


@dataclass(frozen=True)
class TextProcess:
    """How often a drafter's choices are the target's. Every row is independent of every other."""

    acceptance: float
    """Probability that the drafter's likeliest token is the target's, 0 to 1."""

    second: float
    """Where it is not: probability that the target's token is the drafter's second likeliest."""

    third: float
    """Where it is neither: probability, of the same misses as ``second``, that it is the third likeliest."""

    decay: float = 1.0
    """A one-pass drafter's acceptance at a position of its draft, over that at the position before it."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.acceptance <= 1.0:
            raise ValueError(f"acceptance: {self.acceptance:g} is no probability; give 0 to 1")
        if self.second < 0.0 or self.third < 0.0 or self.second + self.third > 1.0:
            raise ValueError(
                f"second, third: {self.second:g} and {self.third:g} are shares of the same misses; give two that are "
                "not negative and add up to at most 1"
            )

    @classmethod
    def from_coverage(cls, acceptance: float, covered: tuple[float, float, float]) -> TextProcess:
        """From a measured share of rounds whose outcome was prepared for.

        covered: with 0, 1 and 2 alternatives beside the main line at every position. A round whose K drafts and bonus
        guess are all right has the first; any other outcome is one miss, at whatever position, so the share of misses
        that one more alternative covers is (covered[n] - covered[0]) / (1 - covered[0]), whatever K is.
        """
        none, one, two = covered
        missed = 1.0 - none
        return cls(acceptance, (one - none) / missed, (two - one) / missed)

    def coverage(self, num_drafts: int) -> tuple[float, float, float]:
        """Share of rounds of num_drafts tokens whose outcome is prepared for: 0, 1, 2 alternatives a position."""
        main = self.acceptance ** (num_drafts + 1)
        return main, main + (1 - main) * self.second, main + (1 - main) * (self.second + self.third)

    def acceptance_after(self, masks: int) -> float:
        """Acceptance of the draft behind so many masks, if those before it are right."""
        return self.acceptance * self.decay**masks

    def acceptance_length(self, num_drafts: int, one_pass: bool = False) -> float:
        """Tokens a round commits on average, the target's own included. one_pass: all are drafted in one pass."""
        kept = (self.acceptance_after(masks if one_pass else 0) for masks in range(num_drafts))
        return sum(itertools.accumulate(kept, operator.mul, initial=1.0))


@dataclass(frozen=True)
class Text:
    """What a drafter has before it: one process, or several that take turns."""

    parts: tuple[TextProcess, ...]
    by: str = "position"
    """What chooses a row's part: ``position``, so that a text shifts every STRETCH tokens, or ``lane``, so that the
    requests of a batch differ."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts: none; give one process at least")
        if self.by not in ("position", "lane"):
            raise ValueError(f"by: {self.by!r}; give position or lane")

    @classmethod
    def of(cls, *parts: TextProcess, by: str = "position") -> Text:
        return cls(parts, by)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Text:
        return cls(tuple(TextProcess(**part) for part in document["parts"]), document["by"])

    def part_of(self, positions: torch.Tensor, lanes: torch.Tensor) -> torch.Tensor:
        """Index into parts, int64 [R]."""
        return (positions // STRETCH if self.by == "position" else lanes) % len(self.parts)

    def round_shares(self, num_drafts: int, one_pass: bool = False) -> list[float]:
        """Share of rounds of num_drafts tokens in each part: they have the same number of tokens, not of rounds."""
        rounds = [1.0 / part.acceptance_length(num_drafts, one_pass) for part in self.parts]
        return [share / sum(rounds) for share in rounds]

    def coverage(self, num_drafts: int) -> tuple[float, float, float]:
        """As of TextProcess, over all rounds."""
        none, one, two = (
            sum(s * c for s, c in zip(self.round_shares(num_drafts), column, strict=True))
            for column in zip(*(part.coverage(num_drafts) for part in self.parts), strict=True)
        )
        return none, one, two

    def acceptance_length(self, num_drafts: int, one_pass: bool = False) -> float:
        """As of TextProcess, over all rounds."""
        shares = self.round_shares(num_drafts, one_pass)
        return sum(s * part.acceptance_length(num_drafts, one_pass) for s, part in zip(shares, self.parts, strict=True))


@dataclass(frozen=True)
class TokenRange:
    """The ids that models write: ``lanes`` runs of ``size`` from ``first`` on, and a text never leaves its lane.

    Two texts that once have the same token at the same position go on alike for ever. In lanes of their own they cannot
    meet, and requests of a batch stay independent.
    """

    first: int
    lanes: int
    size: int
    """Prime, see `ranked_tokens`."""

    @classmethod
    def of(cls, first: int, vocab_size: int, lanes: int = NUM_LANES) -> TokenRange:
        """The largest usable range of a vocabulary. first: below it are ids that must not come by themselves."""
        size = next((n for n in range((vocab_size - first) // lanes, 6, -1) if _is_prime(n)), 0)
        if not size:
            raise ValueError(f"vocab_size: {vocab_size} leaves {lanes} lanes under 7 tokens; give {first + 7 * lanes}")
        return cls(first, lanes, size)

    def lane(self, token_ids: torch.Tensor) -> torch.Tensor:
        """0 to lanes - 1, int64 [R]. A prompt chooses its lane with its last byte."""
        return torch.where(token_ids < self.first, token_ids, (token_ids - self.first) // self.size) % self.lanes


def ranked_tokens(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    tokens: TokenRange,
    drafter: Text | None = None,
    mask_token: int | None = None,
) -> torch.Tensor:
    """The likeliest tokens after each row, likeliest first.

    token_ids, positions: int64 [R]. drafter: how it follows the target; None for the target itself. mask_token: stands
    for the target's choice after the row before it, which a one-pass drafter does not see.
    Returns int64 [R, NUM_RANKED], distinct within a row.
    """
    masks = torch.zeros_like(token_ids)
    if mask_token is not None:
        token_ids, masks = _unmasked(token_ids, positions, tokens, mask_token)
    base = _hash(token_ids, positions, 1) % tokens.size
    # Multiples of a step below a prime never meet: row r's k-th token differs from its others.
    step = 1 + _hash(token_ids, positions, 2) % (tokens.size - 1)
    multiples = torch.tensor([0, 1, 2]).expand(len(base), NUM_RANKED)
    if drafter is not None:
        part = drafter.part_of(positions, tokens.lane(token_ids))
        multiples = _drafter_multiples(_hash(token_ids, positions, 3) % _UNIT, drafter, part, masks)
    within = (base[:, None] + step[:, None] * multiples) % tokens.size
    return tokens.first + tokens.lane(token_ids)[:, None] * tokens.size + within


def _unmasked(
    token_ids: torch.Tensor, positions: torch.Tensor, tokens: TokenRange, mask_token: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows as the target's own text has them, and how many masks each has had since the last token, int64 [R]."""
    places = torch.arange(len(token_ids))
    masks = places - torch.where(token_ids == mask_token, -1, places).cummax(0).values
    filled = token_ids.clone()
    for number in range(1, int(masks.max()) + 1 if len(masks) else 0):
        at = (masks == number).nonzero().flatten()
        filled[at] = ranked_tokens(filled[at - 1], positions[at - 1], tokens)[:, 0]
    return filled, masks


def _drafter_multiples(uniform: torch.Tensor, drafter: Text, part: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """0, 1, 2 are the target's ranked tokens, 3 to 5 wrong ones. uniform: int64 [R] below _UNIT. part, masks: int64
    [R]."""
    acceptance, decay, second, third = (
        torch.tensor([getattr(each, name) for each in drafter.parts], dtype=torch.float64)[part]
        for name in ("acceptance", "decay", "second", "third")
    )
    right = acceptance * decay**masks
    ends = (torch.stack([right, (1 - right) * second, (1 - right) * third], 1).cumsum(1) * _UNIT).long()
    kinds = torch.tensor([[0, 1, 2], [3, 0, 4], [3, 4, 0], [3, 4, 5]])
    return kinds[(uniform[:, None] >= ends).sum(1)]


def _hash(token_ids: torch.Tensor, positions: torch.Tensor, role: int) -> torch.Tensor:
    """Not negative, int64 [R]. Two rounds of multiply and shift, with overflow wrapping as int64 does."""
    x = (token_ids * 0x9E3779B97F4A7C1 + positions * 0x5851F42D4C957F2 + role * 0x2545F4914F6CDD1) & _MASK
    for factor in (0x14C5B2E3C9D9A35, 0x2C1B3C6D5F4A8B7):
        x = ((x ^ (x >> 29)) * factor) & _MASK
    return x ^ (x >> 32)


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))
