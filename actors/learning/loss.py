"""Computes how far a drafter's distribution is from the target's.

Shapes: P positions, T of the target's likeliest tokens, V tokens of the drafter's vocabulary, S of them computed.

The target's distribution is its T likeliest tokens and one lump for all others, so that it can be kept on disk. Two
distances, over these T + 1:

- forward KL, which is what DistillSpec (Zhou et al., 2310.08461) and online speculative decoding (Liu et al.,
  2310.07177) start from: its gradient is large where the drafter is far off;
- total variation. One minus it is the probability that a draft is accepted (Leviathan et al., 2211.17192), so it is
  the aim itself, but its gradient is next to nothing for a drafter that is far off.

They are mixed as in the hybrid of LK losses (Samarin et al., 2602.23881): the share of KL falls as acceptance rises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

KL_FALL = 3.0
"""The share of KL is exp(-KL_FALL x acceptance)."""

_LEAST = 1e-6


@dataclass(frozen=True)
class DraftIds:
    """Chooses the tokens whose logits are computed: all, or the draft vocabulary and a sample of the others.

    The sample stands for all others in the drafter's normalisation, each weighted by how many it stands for: the head
    is a tenth of the size, and the drafter still learns to leave the others alone.
    """

    ids: Tensor | None  # int64 [S], the named ones ascending, then the sampled ones; None: all of the V
    num_named: int
    place: Tensor  # int64 [V]: where a token is among the named, -1 where it is not
    log_weight: float = 0.0  # added to the sampled ones' logits

    @staticmethod
    def every(vocab_size: int, device: torch.device | str = "cpu") -> DraftIds:
        return DraftIds(None, vocab_size, torch.arange(vocab_size, device=device))

    @staticmethod
    def sampled(
        named: Tensor, vocab_size: int, num_sampled: int, seed: int, device: torch.device | str = "cpu"
    ) -> DraftIds:
        """named: int64, ascending. So many others are drawn without replacement; all are, where no more are left."""
        if len(named) + num_sampled >= vocab_size:
            return DraftIds.every(vocab_size, device)
        place = torch.full((vocab_size,), -1)
        place[named] = torch.arange(len(named))
        others = torch.nonzero(place < 0)[:, 0]
        drawn = others[torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))[:num_sampled]]
        weight = math.log(len(others) / num_sampled)
        return DraftIds(torch.cat([named, drawn]).to(device), len(named), place.to(device), weight)

    def log_q(self, logits: Tensor, top_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities of top_ids, float32 [P, T], and which of them are named, bool [P, T].

        logits: float32 [P, S]. A token that is not named has a meaningless value.
        """
        if logits.shape[1] > self.num_named:
            stand_for = torch.zeros(logits.shape[1], device=logits.device)
            stand_for[self.num_named :] = self.log_weight
            logits = logits + stand_for  # in one piece: a slice's gradient is as large as the whole
        total = logits.logsumexp(-1)
        known = top_ids < len(self.place)
        places = self.place[top_ids.clamp(max=len(self.place) - 1)].masked_fill(~known, -1)
        return logits.gather(1, places.clamp(min=0)) - total[:, None], places >= 0


def distances(log_q: Tensor, named: Tensor, top_log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Returns forward KL and overlap (the probability that a draft is accepted), float32 [P] each.

    log_q, named: [P, T], see DraftIds.log_q. top_log_p: [P, T]. What is not among the T, or not named, is lumped, so
    KL is at most the true one, and the overlap at least the true one.
    """
    p = top_log_p.exp() * named
    q = log_q.exp() * named
    rest_p, rest_q = (1 - p.sum(-1)).clamp(min=0.0), (1 - q.sum(-1)).clamp(min=_LEAST)
    kl = torch.where(named, p * (top_log_p - log_q), 0.0).sum(-1)
    kl = kl + rest_p * (rest_p.clamp(min=_LEAST).log() - rest_q.log())
    return kl, torch.minimum(p, q).sum(-1) + torch.minimum(rest_p, rest_q)


def mixed(kl: Tensor, overlap: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the loss, and the mean overlap without gradient. weight: float32 [P], of each position."""
    weight = weight / weight.sum().clamp(min=_LEAST)
    accepted = (overlap.detach() * weight).sum()
    share = torch.exp(-KL_FALL * accepted)
    return (weight * (share * kl + (1 - share) * (1 - overlap))).sum(), accepted


def head(hidden: Tensor, weight: Tensor, ids: Tensor | None) -> Tensor:
    """Returns logits, float32 [P, S]. hidden: [P, H]; weight: [V, H], of the output head."""
    rows = weight if ids is None else weight[ids]
    return functional.linear(hidden.to(rows.dtype), rows).float()
