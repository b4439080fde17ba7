"""A rank of the draft model: vLLM's worker, plus a lean step over rows that the drafter plans. See paged_forward.py."""

from __future__ import annotations

import math

import torch

from actors.drafting.cut_head import CutHead
from actors.drafting.draw import DrawnRow, Draws
from actors.drafting.draw_group import DrawRow
from actors.drafting.line import Drawn
from actors.drafting.paged_forward import PagedForward
from actors.drafting.step_plan import StepPlan
from actors.verification.draft_sampler import greedy_ranking
from actors.verification.mode import Mode
from actors.verification.token_subset import TokenSubset
from cluster.platform import worker_class


class DraftWorker(worker_class()):  # type: ignore[misc]
    _paged: PagedForward | None = None
    _head: CutHead | None = None

    @torch.inference_mode()
    def draft(self, plan: StepPlan) -> list[list[Drawn]]:
        """Run one step. Rank 0 returns what was drawn after each row, up to the first draw that is not what was
        guessed; the others return nothing: what they feed next comes with the next plan, so ranks cannot disagree."""
        forward = self._paged
        if forward is None:
            forward = self._paged = PagedForward(self.model_runner)
        for copies in (plan.restores, plan.copies):
            if copies:
                forward.copy_blocks(copies)
        head = self._head
        if head is not None:
            head.replace(plan.vocabulary_changes)
        hidden = forward(plan.rows)
        if not len(hidden):
            return [[] for _ in plan.rows] if self.rank == 0 else []
        logits = self.model_runner.model.compute_logits(hidden) if head is None else head.logits(hidden)
        return _draw(plan, logits, None if head is None else head.subset) if self.rank == 0 else []

    def cut_head(self, token_ids: list[int]) -> None:
        """From now on draft from these tokens alone."""
        self._head = CutHead(self.model_runner.model, token_ids)


def _draw(plan: StepPlan, logits: torch.Tensor, subset: TokenSubset | None) -> list[list[Drawn]]:
    draws = [draw for row in plan.rows for draw in row.draws]
    alternatives = max(draw.alternatives for draw in draws)
    if all(draw.sampling.mode is Mode.GREEDY and not draw.sampling.biases for draw in draws):
        drawn = _greedy(logits, subset, alternatives)
    else:
        rows = [DrawRow(index, draw.sampling, draw.position, draw.round_start) for index, draw in enumerate(draws)]
        drawer, order = Draws(rows, subset), list(range(len(rows)))
        ids = drawer.draw(logits, order, alternatives=alternatives).flatten().tolist()
        results = drawer.results({index: [token] for index, token in enumerate(ids)})
        drawn = [_drawn(results[index]) for index in order]
    answers, at = [], 0
    for row in plan.rows:
        matched = 0
        while matched < len(row.guesses) and drawn[at + matched].token == row.guesses[matched]:
            matched += 1
        answers.append(drawn[at : at + matched + 1] if row.draws else [])
        at += len(row.draws)
    return answers


def _greedy(logits: torch.Tensor, subset: TokenSubset | None, alternatives: int) -> list[Drawn]:
    """What Draws gives where every row is greedy and none biased, in a fraction of the time: there is nothing to set
    up."""
    ranking, shares_of = greedy_ranking(logits.to(torch.float32), subset, alternatives)
    if not alternatives:
        return [Drawn(token) for (token,) in ranking]
    drawn = []
    for (token, *others), (confidence, *shares) in zip(ranking, shares_of, strict=True):
        if not math.isfinite(confidence):
            drawn.append(Drawn(-1, usable=False, bad_logits=True))
            continue
        named = tuple((other, share) for other, share in zip(others, shares, strict=True) if other >= 0)
        drawn.append(Drawn(token, confidence=confidence, alternatives=named))
    return drawn


def _drawn(row: DrawnRow) -> Drawn:
    if not row.token_ids:
        return Drawn(-1, usable=False, bad_logits=row.bad_logits)
    others = row.alternatives[0].tolist() if row.alternatives is not None else []
    shares = row.confidence[0].tolist() if row.confidence is not None else [1.0]
    return Drawn(
        row.token_ids[0],
        None if row.q_ids is None else row.q_ids[0],
        None if row.q_probs is None else row.q_probs[0],
        shares[0],
        tuple((token, share) for token, share in zip(others, shares[1:], strict=True) if token >= 0),
    )
