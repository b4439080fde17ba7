"""How long a round may wait for its proposals: a fixed time, or as much as some of the target's steps take. Pure."""

from __future__ import annotations

_KEEP = 1 - 1 / 16
_MOST_AT_ONCE = 2.0
"""A step counts for at most so many times the mean: one stall says little, a lasting change is believed after some
dozens."""


class RoundDeadline:
    """longest_s: never exceeded, and all there is until a step has been measured. steps: of the target's, as long as
    they take lately; None: longest_s alone."""

    def __init__(self, longest_s: float, steps: float | None = None) -> None:
        self._longest_s, self._steps = longest_s, steps
        self._step_s = 0.0

    @property
    def longest_s(self) -> float:
        """A round's wait, now."""
        if self._steps is None or not self._step_s:
            return self._longest_s
        return min(self._longest_s, self._steps * self._step_s)

    def observe_step(self, step_s: float) -> None:
        """A step of the target's without prefill, waits for proposals taken off."""
        if step_s <= 0:
            return
        if not self._step_s:
            self._step_s = step_s
        self._step_s += (min(step_s, _MOST_AT_ONCE * self._step_s) - self._step_s) * (1 - _KEEP)

    def forget(self) -> None:
        """What was measured is no guide: a warm-up's steps pay for what is set up lazily."""
        self._step_s = 0.0
