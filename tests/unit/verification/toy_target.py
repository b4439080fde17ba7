"""A toy target and drafters whose distributions are known in full, and rounds of drafting and verifying with them.

A token's distribution depends on its position and on the two tokens before it. All samples run as one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.actors.verification.batch import VerificationBatch, VerificationResult
from outrider.actors.verification.constraints import Constraints
from outrider.actors.verification.draft_sampler import DraftSample, sample_drafts
from outrider.cluster.modes import Mode
from tests.unit.verification.arrays import build, uniform
from tests.unit.verification.whole_rows import processed_probs

V = 5
K = 2
LENGTH = K + 1
DEPTH = LENGTH + K + 1
PROMPT_LEN = 17
START = 0  # the token before the first, and the one before that

Length = Callable[[Tensor], Tensor]
"""How many drafts to verify, int64 [S], given the tokens before the first of them, int64 [S, 2]."""


def plain_constraints(rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Constraints:
    return Constraints(
        temperature=torch.full((rows,), temperature),
        top_k=torch.full((rows,), top_k),
        top_p=torch.full((rows,), top_p),
        min_p=torch.zeros(rows),
        max_top_k=top_k,
        all_top_k=top_k > 0,
        any_top_p=top_p < 1,
        any_min_p=False,
    )


@dataclass(frozen=True)
class Toy:
    """logits: float32 [DEPTH, V, V, V], by position, the two tokens before, and token."""

    logits: Tensor

    @classmethod
    def random(cls, seed: int, spread: float = 1.0) -> Toy:
        generator = torch.Generator().manual_seed(seed)
        return cls(torch.randn(DEPTH, V, V, V, generator=generator) * spread)

    def rows(self, at: Tensor, tokens: Tensor) -> Tensor:
        """Logits [S, V] for the tokens at index `at` [S]; tokens: int64 [S, 2 + DEPTH], two start tokens first."""
        before = tokens.gather(1, torch.stack([at, at + 1], dim=1))
        return self.logits[at, before[:, 0], before[:, 1]]

    def joint(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
        """float64 [V ** LENGTH]: the distribution of the first LENGTH tokens under plain sampling."""
        flat = self.logits.flatten(0, 2)
        p = processed_probs(flat, plain_constraints(len(flat), temperature, top_k, top_p)).to(torch.float64)
        p = p.view(self.logits.shape)
        joint = p[0, START, START]
        joint = joint.unsqueeze(1) * p[1, START]
        return (joint.unsqueeze(2) * p[2]).flatten()


def any_length(k: int = K) -> Length:
    return lambda before: torch.full((len(before),), k)


FULL_LENGTH = any_length()


def ragged(before: Tensor) -> Tensor:
    """0 to K drafts, decided by what stands before them."""
    return (before[:, 0] + 2 * before[:, 1]) % (K + 1)


@dataclass
class Rounds:
    """Everyone drafts and verifies until LENGTH tokens are committed."""

    target: Toy
    drafter: Toy | None
    """None drafts one-hot, always token 1: without a q."""

    mode: Mode
    verify: Callable[[VerificationBatch], VerificationResult]
    length: Length = FULL_LENGTH
    n: int = V
    real_sampler: bool = False
    """Draft with `sample_drafts` and the request's seed, else with torch's own generator."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    cut: Callable[[Tensor], Tensor] | None = None
    """A scheduler that cuts drafts at a token it does not like: forbidden tokens, bool [...], of ids. Wrong."""

    device: str | torch.device = "cpu"
    """Where rounds are verified."""

    def run(self, seeds: Tensor) -> Tensor:
        """int64 [S, LENGTH] for seeds int64 [S]."""
        samples = len(seeds)
        generator = torch.Generator().manual_seed(1234)
        tokens = torch.full((samples, 2 + DEPTH), START)
        committed = torch.zeros(samples, dtype=torch.int64)
        self.accepted, self.drafted = 0, 0
        while (open_ := (committed < LENGTH).nonzero().squeeze(1)).numel():
            mine, at, seed = tokens[open_], committed[open_], seeds[open_]
            drafts = [self._draft(mine, at, j, seed, generator) for j in range(K)]
            k = self.length(mine.gather(1, torch.stack([at, at + 1], dim=1)))
            if self.cut is not None:
                allowed = ~self.cut(torch.stack([d.ids for d in drafts], dim=1))
                k = torch.minimum(k, allowed.to(torch.int64).cumprod(1).sum(1))
            result = self._verify(mine, at, k, drafts, seed)
            assert (result.status == 0).all()
            num_committed = (result.token_ids >= 0).sum(-1)
            for j in range(K + 1):
                done = j < num_committed
                put = result.token_ids[:, min(j, result.token_ids.shape[1] - 1)].to(torch.int64)
                old = mine.gather(1, (at + j + 2).unsqueeze(1)).squeeze(1)
                mine.scatter_(1, (at + j + 2).unsqueeze(1), torch.where(done, put, old).unsqueeze(1))
            tokens[open_] = mine
            committed[open_] = at + num_committed
            self.accepted += int((num_committed - 1).sum())
            self.drafted += int(k.sum())
        return tokens[:, 2 : 2 + LENGTH]

    def _draft(self, mine: Tensor, at: Tensor, j: int, seed: Tensor, generator: torch.Generator) -> DraftSample:
        """The j-th draft of each, written into `mine` so that the next sees it."""
        if self.drafter is None:
            sample = DraftSample(torch.ones(len(mine), dtype=torch.int64))
        else:
            logits = self.drafter.rows(at + j, mine)
            if self.real_sampler or self.mode in (Mode.GREEDY, Mode.COUPLED):
                position, start = PROMPT_LEN + at + j, PROMPT_LEN + at
                constraints = plain_constraints(len(mine), self.temperature, self.top_k, self.top_p)
                sample = sample_drafts(logits, self.mode, constraints, seed, position, start, self.n)
            else:
                values, ids = logits.topk(self.n, dim=-1)
                q = values.softmax(-1)
                chosen = torch.multinomial(q, 1, generator=generator)
                sample = DraftSample(ids.gather(1, chosen).squeeze(1), ids, q)
        mine.scatter_(1, (at + j + 2).unsqueeze(1), sample.ids.unsqueeze(1))
        return sample

    def _verify(
        self, mine: Tensor, at: Tensor, k: Tensor, drafts: list[DraftSample], seed: Tensor
    ) -> VerificationResult:
        rows = torch.stack([self.target.rows(at + j, mine) for j in range(K + 1)], dim=1)
        column = torch.arange(K + 1)
        row_used, draft_used = column <= k.unsqueeze(1), column[:K] < k.unsqueeze(1)
        ids = torch.stack([d.ids for d in drafts], dim=1)[draft_used]
        q_ids = q_probs = None
        if drafts[0].q_ids is not None:
            q_ids = torch.stack([d.q_ids for d in drafts], dim=1)[draft_used]
            q_probs = torch.stack([d.q_probs for d in drafts], dim=1)[draft_used]
        sampling = uniform(self.mode, seed, PROMPT_LEN + at, self.temperature, self.top_k, self.top_p)
        there = (None if part is None else part.to(self.device) for part in (rows[row_used], ids, q_ids, q_probs))
        logits, ids, q_ids, q_probs = there
        assert logits is not None
        assert ids is not None
        result = self.verify(build(logits, k, ids, sampling, q_ids, q_probs))
        return VerificationResult(**{name: value.cpu() for name, value in vars(result).items()})


def p_value(tokens: Tensor, joint: Tensor) -> float:
    """Pearson's chi-square of tokens [S, LENGTH] against their joint distribution [V ** LENGTH]: how likely a statistic
    as large as this is if they agree. Cells that expect fewer than 10 are pooled."""
    cell = tokens[:, 0]
    for i in range(1, tokens.shape[1]):
        cell = cell * V + tokens[:, i]
    counts = torch.bincount(cell, minlength=len(joint)).to(torch.float64)
    expected = joint * len(tokens)
    assert not counts[expected == 0].any(), "a token that plain sampling never gives"
    few = (expected < 10) & (expected > 0)
    many = expected >= 10
    if few.any():
        expected = torch.cat([expected[many], expected[few].sum().view(1)])
        counts = torch.cat([counts[many], counts[few].sum().view(1)])
    else:
        expected, counts = expected[many], counts[many]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
