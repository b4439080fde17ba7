"""How long a round waits for drafts: what the drafter's step cost says, corrected by what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.length.origin import Origin

_PRIOR_ROUNDS = 2.0
_KEEP = 1.0 - 1.0 / 32.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request was told to expect and got. asked: tokens wanted from an answer of this origin, up to K."""

    origin: Origin
    asked: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class WaitCurves:
    """[K + 1] each, by tokens, in seconds. A hit waits max(0, ahead_s - the target's step) + late_s."""

    main_ahead_s: np.ndarray
    main_late_s: np.ndarray
    side_ahead_s: np.ndarray
    side_late_s: np.ndarray
    miss_s: np.ndarray
    """Never falls with more tokens."""

    def hit_s(self, tokens: np.ndarray | int, main_share: np.ndarray | float, step_s: np.ndarray | float) -> np.ndarray:
        """Mean wait of a hit on `tokens`, main_share of them on the main line."""
        main = np.maximum(0.0, np.maximum(0.0, self.main_ahead_s[tokens] - step_s) + self.main_late_s[tokens])
        side = np.maximum(0.0, np.maximum(0.0, self.side_ahead_s[tokens] - step_s) + self.side_late_s[tokens])
        return main_share * main + (1.0 - main_share) * side


class DraftWait:
    """Model: the main line needs k + 1 draft steps while the target verifies (one learns the bonus token), a side
    branch k, a miss k while the target waits. Measured minus model is kept by origin and length, decayed; a length
    without measurements takes its origin's: a miss's in proportion to its tokens, a hit's as it is."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        origins = [origin for origin in Origin if origin is not Origin.NONE]
        self._by_length: dict[Origin, np.ndarray] = {origin: np.zeros((2, max_tokens + 1)) for origin in origins}
        """Weight and sum of measured minus model, in seconds."""

        self._by_origin: dict[Origin, np.ndarray] = {origin: np.zeros(2) for origin in origins}
        """The same over all lengths; a miss's per token."""

    def observe(self, answers: Sequence[Answer], draft_step_s: float, step_s: float) -> None:
        """One round's answers. The round waits for the slowest: its wait is put down to the answer that the model, as
        corrected so far, holds for the slowest. A NONE counts as a miss."""
        if not answers:
            return
        expected_s = self._expected_s(draft_step_s, step_s)
        _, origin, asked = max((expected_s[a.origin][a.asked], a.origin, a.asked) for a in answers)
        origin = Origin.MISS if origin is Origin.NONE else origin
        measured_s = max(answer.wait_s for answer in answers)
        steps = {Origin.MAIN_LINE: asked + 1, Origin.SIDE_BRANCH: asked, Origin.MISS: asked}[origin]
        model_s = steps * draft_step_s if origin is Origin.MISS else max(0.0, steps * draft_step_s - step_s)
        by_length = self._by_length[origin]
        by_length[:, asked] = by_length[:, asked] * _KEEP + (1.0, measured_s - model_s)
        if origin is not Origin.MISS or asked:
            per = max(asked, 1) if origin is Origin.MISS else 1
            self._by_origin[origin] = self._by_origin[origin] * _KEEP + (1.0, (measured_s - model_s) / per)

    def corrections_s(self, origin: Origin) -> np.ndarray:
        """[K + 1] What to add to the model's wait."""
        weight, total = self._by_origin[origin]
        expected = total / (weight + _PRIOR_ROUNDS) * np.ones(self._max_tokens + 1)
        if origin is Origin.MISS:
            expected = expected * np.arange(self._max_tokens + 1)
        weights, totals = self._by_length[origin]
        return (totals + _PRIOR_ROUNDS * expected) / (weights + _PRIOR_ROUNDS)

    def curves(self, draft_step_s: float) -> WaitCurves:
        tokens = np.arange(self._max_tokens + 1)
        miss = np.maximum(0.0, tokens * draft_step_s + self.corrections_s(Origin.MISS))
        return WaitCurves(
            main_ahead_s=(tokens + 1) * draft_step_s,
            main_late_s=self.corrections_s(Origin.MAIN_LINE),
            side_ahead_s=tokens * draft_step_s,
            side_late_s=self.corrections_s(Origin.SIDE_BRANCH),
            miss_s=np.maximum.accumulate(miss),
        )

    def _expected_s(self, draft_step_s: float, step_s: float) -> dict[Origin, list[float]]:
        """By tokens asked for."""
        curves, tokens = self.curves(draft_step_s), np.arange(self._max_tokens + 1)
        miss_s = curves.miss_s.tolist()
        return {
            Origin.NONE: miss_s,
            Origin.MAIN_LINE: curves.hit_s(tokens, 1.0, step_s).tolist(),
            Origin.SIDE_BRANCH: curves.hit_s(tokens, 0.0, step_s).tolist(),
            Origin.MISS: miss_s,
        }
