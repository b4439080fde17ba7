"""Records the target's likeliest tokens for a drafter that learns.

A step's logits are kept until its round has nothing more urgent to do: tokens are chosen and committed, the drafter is
at work on the next ones. Only then the likeliest tokens are looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.actors.round.request import Request, carried
from outrider.cluster.link.messages import TrainingSample

if TYPE_CHECKING:
    from outrider.actors.round.round import Step


Likeliest = Callable[[Any, Sequence[int]], tuple[np.ndarray, np.ndarray]]
"""Finds the likeliest tokens of some rows of logits, see `search.target_top_k`."""


@dataclass(slots=True)
class _Kept:
    """Holds a step's logits, the first of them by row id, and its commits: request, first row, position, count."""

    logits: Any
    first_rows: dict[str, int]
    committed: list[tuple[Request, int, int, int]] = field(default_factory=list)


class LearningRecorder:
    """Collects training samples: what the target predicted where it committed tokens."""

    def __init__(self, likeliest: Likeliest) -> None:
        self._likeliest = likeliest
        self._kept: _Kept | None = None
        """The step's, until its samples are taken."""

    def enter(self, request: Request, adapter: str = "", *, shows_pictures: bool = False) -> None:
        """Decides whether samples are taken of a request.

        Its logits are read after they were changed in place for the choice, so requests whose parameters change them
        are left out.

        Args:
            adapter: that the target answers with; its answers are another model's.
            shows_pictures: the target sees pictures that the drafter does not.
        """
        request.teaches = (
            request.max_drafts > 0
            and not adapter
            and not shows_pictures
            and not carried(request.params).get("tenant", 0)
            and not changes_logits(request.params)
        )

    def record_logits(self, step: Step, row_ids: Sequence[str], requests: Sequence[Request], logits: Any) -> None:
        """Keeps a step's logits: for each of row_ids one for each draft and one more. requests: of the same rows."""
        self._kept = None
        if not any(request.teaches for request in requests):
            return
        first_rows, row = {}, 0
        for row_id in row_ids:
            first_rows[row_id] = row
            row += len(step.draft(row_id).ids) + 1
        self._kept = _Kept(logits, first_rows)

    def record_commit(self, step: Step, request: Request, count: int) -> None:
        """Notes that the step chose the last `count` tokens of a request."""
        if request.teaches and self._kept is not None:
            first_row = self._kept.first_rows[step.best_rows.get(request.request_id, request.request_id)]
            self._kept.committed.append((request, first_row, len(request.token_ids) - count, count))

    def take_samples(self) -> list[TrainingSample]:
        """Returns the samples since the last call, of requests that are still open at the drafter."""
        kept, self._kept = self._kept, None
        entries = [] if kept is None else [entry for entry in kept.committed if entry[0].handle is not None]
        if kept is None or not entries:
            return []
        rows = [first_row + j for _, first_row, _, count in entries for j in range(count)]
        ids, log_p = self._likeliest(kept.logits, rows)
        samples, at = [], 0
        for request, _, position, count in entries:
            assert request.handle is not None
            part = slice(at, at + count)
            samples.append(TrainingSample(request.handle, position, ids[part], log_p[part]))
            at += count
        return samples


def changes_logits(params: Any) -> bool:
    """Returns whether a request changes its logits before temperature. params: vLLM's SamplingParams."""
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.min_tokens
        or params.logit_bias
        or params.bad_words_token_ids
        or params.allowed_token_ids
        or params.structured_outputs is not None
    )
