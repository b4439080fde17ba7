"""A rank of the draft model: vLLM's worker, plus a lean step over rows that the drafter plans. See paged_forward.py."""

from __future__ import annotations

import torch

from actors.drafting.cut_head import CutHead
from actors.drafting.draw import draw, up_to_first_miss
from actors.drafting.line import Drawn
from actors.drafting.paged_forward import PagedForward
from actors.drafting.step_plan import StepPlan
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
        if self.rank != 0:
            return []
        draws = [one for row in plan.rows for one in row.draws]
        return up_to_first_miss(plan, draw(logits, draws, None if head is None else head.subset))

    def cut_head(self, token_ids: list[int]) -> None:
        """From now on draft from these tokens alone."""
        self._head = CutHead(self.model_runner.model, token_ids)
