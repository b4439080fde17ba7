"""Contexts that a drafter meets from its second draft on: the text, then tokens of its own.

Trained on texts alone it would never see its own tokens, which is what later positions are drafted after; so part of
the batches has them (on-policy data, as in DistillSpec, 2310.08461, and as EAGLE-3, 2503.01840, unrolls its drafts in
training). From a number of positions of a text, the anchors, the drafter draws a few tokens each. All of these branches
are judged in one pass: they stand behind the text, each with the positions it would have, and see the text up to their
anchor and their own tokens before them.

Each of these contexts counts with the probability that a round gets there: that every one of its tokens is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.actors.learning.text import Text, padded

ANCHORS = 32
"""Of a text."""

DEPTH = 3
"""Tokens of its own at most: contexts of the second to the fourth draft."""


@dataclass(frozen=True)
class Branches:
    """B texts of at most N tokens, A anchors each, and what was drawn after them, D tokens deep."""

    ids: Tensor
    """int64 [B, N + A x D]: the texts, then the first tokens of all branches, then the second ones."""

    positions: Tensor
    """int64, likewise."""

    sees: Tensor
    """bool [B, 1, N + A x D, N + A x D]."""

    anchors: Tensor
    """int64 [B, A]: the last token of the text that a branch sees."""

    depth: int

    def columns(self, depth: int) -> Tensor:
        """int64 [B, A]: where the branches' tokens of that depth stand; 0: their anchors."""
        if depth == 0:
            return self.anchors
        count = self.anchors.shape[1]
        first = self.ids.shape[1] - count * (self.depth - depth + 1)
        return (first + torch.arange(count, device=self.ids.device)).expand_as(self.anchors)

    def extended(self, tokens: Tensor) -> Branches:
        """One deeper. tokens: int64 [B, A]."""
        batch, size = self.ids.shape
        count = self.anchors.shape[1]
        ids = torch.cat([self.ids, tokens], 1)
        positions = torch.cat([self.positions, self.anchors + self.depth + 1], 1)
        sees = torch.zeros(batch, 1, size + count, size + count, dtype=torch.bool, device=ids.device)
        sees[:, :, :size, :size] = self.sees
        # A token sees what the one before it in its branch sees, and itself.
        before = self.columns(self.depth)
        rows = torch.arange(batch, device=ids.device)[:, None].expand_as(before)
        sees[:, 0, size:, :size] = self.sees[rows, 0, before]
        own = torch.arange(size, size + count, device=ids.device)
        sees[:, :, own, own] = True
        return Branches(ids, positions, sees, self.anchors, self.depth + 1)


def rooted(texts: Sequence[Text], pad: int, generator: torch.Generator, num_anchors: int = ANCHORS) -> Branches:
    """Texts with anchors, drawn with replacement among the positions that predict a token of the answer."""
    ids, mask = padded(texts, pad)
    size = ids.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    sees = causal[None] & mask.bool()[:, None, :] | torch.eye(size, dtype=torch.bool)[None]
    anchors = [torch.randint(text.start - 1, len(text.ids) - 1, (num_anchors,), generator=generator) for text in texts]
    return Branches(ids, torch.arange(size).expand_as(ids), sees[:, None], torch.stack(anchors), 0)


def to_device(branches: Branches, device: torch.device) -> Branches:
    ids, positions = branches.ids.to(device), branches.positions.to(device)
    return Branches(ids, positions, branches.sees.to(device), branches.anchors.to(device), branches.depth)


def reach(p: Tensor, q: Tensor) -> Tensor:
    """The probability that a round gets past each drawn token: float32, p, q: [B, A, D], of the tokens where they were
    drawn."""
    return (p / q.clamp(min=1e-9)).clamp(max=1.0).cumprod(-1)


def grown(
    branches: Branches, draw: Callable[[Branches, Tensor], tuple[Tensor, Tensor]], depth: int = DEPTH
) -> tuple[Branches, Tensor]:
    """Branches of the drafter's own tokens, and the probability with which it drew each, float32 [B, A, D].

    draw: (branches, columns [B, A]) -> tokens that follow there and their probabilities.
    """
    probabilities = []
    for level in range(depth):
        tokens, q = draw(branches, branches.columns(level))
        probabilities.append(q)
        branches = branches.extended(tokens)
    return branches, torch.stack(probabilities, -1)
