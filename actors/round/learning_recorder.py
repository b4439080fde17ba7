"""What the target thought of what it committed, told to a drafter that learns. Pure.

A step's logits are kept until its round has nothing more urgent to do: tokens are chosen and committed, the drafter is
at work on the next ones. Only then the likeliest tokens are looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from outrider.actors.round.request import Request, carried
from outrider.cluster.link.messages import TrainingSample

if TYPE_CHECKING:
    from outrider.actors.round.round import Step


class Likeliest(Protocol):
    def __call__(self, logits: Any, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """ids int32 [n, TAUGHT_TOP] and log_p float16, likewise, of rows of logits [R, V]; the likeliest first."""


class LearningRecorder:
    """Collects what the target says of the tokens that it commits."""

    def __init__(self, likeliest: Likeliest) -> None:
        self._likeliest = likeliest
        self._logits: dict[int, Any] = {}
        """By step."""

        self._first_rows: dict[int, dict[str, int]] = {}
        self._committed: list[tuple[int, Request, int, int]] = []
        """Step, whose, position and number of the tokens."""

    def enter(self, request: Request, adapter: str = "", *, shows_pictures: bool = False) -> None:
        """Decide whether it is taught from. adapter: that the target answers it with. shows_pictures: to the target;
        what it says of them nobody could learn who does not see them.

        Its logits are looked at after they were changed in place for the choice, so that nothing but the model may have
        had a say in them.
        """
        request.teaches = (
            request.max_drafts > 0
            and not adapter
            and not shows_pictures
            and carried(request.params).get("learn", True)
            and not carried(request.params).get("tenant", 0)
            and not changes_logits(request.params)
        )

    def saw(self, step: Step, requests: Sequence[Request], logits: Any) -> None:
        """The rows of a step, before anything is chosen: request after request, one for each draft and one more."""
        # No more than the steps in flight: what was never asked for is forgotten.
        for number in sorted(self._logits)[:-1]:
            self._forget(number)
        if not any(request.teaches for request in requests):
            return
        first_rows, row = {}, 0
        for request in requests:
            first_rows[request.request_id] = row
            row += len(step.drafts.get(request.request_id, ())) + 1
        self._logits[step.number], self._first_rows[step.number] = logits, first_rows

    def committed(self, step: Step, request: Request, count: int) -> None:
        """Its last count tokens were chosen by the step."""
        if request.teaches and step.number in self._logits:
            self._committed.append((step.number, request, len(request.token_ids) - count, count))

    def take(self) -> list[tuple[Request, TrainingSample]]:
        """What there is to be told, each of a request that still has a handle."""
        lessons: list[tuple[Request, TrainingSample]] = []
        for number in sorted({entry[0] for entry in self._committed}):
            logits, first_rows = self._logits[number], self._first_rows[number]
            entries = [entry for entry in self._committed if entry[0] == number and entry[1].handle is not None]
            rows = [first_rows[request.request_id] + j for _, request, _, count in entries for j in range(count)]
            if rows:
                ids, log_p = self._likeliest(logits, rows)
                at = 0
                for _, request, position, count in entries:
                    assert request.handle is not None
                    part = slice(at, at + count)
                    lessons.append((request, TrainingSample(request.handle, position, ids[part], log_p[part])))
                    at += count
            self._forget(number)
        self._committed.clear()
        return lessons

    def _forget(self, number: int) -> None:
        del self._logits[number], self._first_rows[number]
        self._committed = [entry for entry in self._committed if entry[0] != number]


def changes_logits(params: Any) -> bool:
    """Whether anything of a request's changes its logits before temperature. params: vLLM's SamplingParams."""
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
