"""What a step of the drafter takes, and what another row adds to it: a straight line through recent steps. Pure."""

from __future__ import annotations

_FADE = 0.98
_MIN_SHARE, _MAX_SHARE = 0.004, 0.2
_PRIOR_SHARE = 0.02


class StepCost:
    """An exponentially faded least-squares fit of seconds over rows."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_squared = self._product = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        self._weight = self._weight * _FADE + 1
        self._rows = self._rows * _FADE + rows
        self._seconds = self._seconds * _FADE + seconds
        self._rows_squared = self._rows_squared * _FADE + rows * rows
        self._product = self._product * _FADE + rows * seconds

    @property
    def mean_s(self) -> float:
        """Of a recent step; 0 before the first."""
        return self._seconds / self._weight if self._weight else 0.0

    @property
    def row_share(self) -> float:
        """What one more row adds, as a share of a step: a branch less likely than this costs more than it saves."""
        mean = self.mean_s
        variance = self._rows_squared * self._weight - self._rows**2
        if mean <= 0 or variance < 0.05 * self._weight**2:
            return _PRIOR_SHARE
        slope = (self._product * self._weight - self._rows * self._seconds) / variance
        return min(max(slope / mean, _MIN_SHARE), _MAX_SHARE)
