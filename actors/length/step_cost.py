"""What a step of a model costs, as a function of its tokens and requests, learnt while serving."""

from __future__ import annotations

import numpy as np

_ELASTICITY = 0.1
_ELASTICITY_WEIGHT = 0.001
"""Before it is known: twice the tokens cost 2^0.1 as much, in weight a thousandth of a measured step: steps scatter by
a few per cent, and the truth may be off by all of it. Low on purpose: what looks cheap is tried, and measured."""

_CURVATURE_WEIGHT = 0.02
"""For a straight line, against a bend between octaves."""

_OTHER_WEIGHT = 0.1
"""Against a cost of requests apart from their tokens, and of uneven steps."""

_LEAST_SHARE = 0.02
_FIRST_SPREAD, _LEAST_SPREAD, _SPREAD_MEMORY = 0.1, 0.01, 20.0
_OUTLIER = 2.5
"""Spreads from the line beyond which a step counts less (Huber 1964)."""


class StepCost:
    """seconds(tokens, requests) = a line with a knee at every power of two + extra a request + extra if uneven.

    Straight where nothing says otherwise (fixed + per token), bent where measured: a GPU's steps are flat until they
    are compute-bound. Penalised least squares (P-splines, Eilers and Marx 1996); each octave of tokens keeps sums of
    its own that fade only with new steps of that size, so a load that comes back is known. Outliers count less.
    """

    def __init__(self, max_tokens: int, memory: int) -> None:
        num_knots = max(2, int(max_tokens - 1).bit_length() + 1)
        self._knots = 2.0 ** np.arange(num_knots)
        self._num_terms = num_knots + 2
        self._keep = 1.0 - 1.0 / memory
        self._normal = np.zeros((num_knots - 1, self._num_terms, self._num_terms))
        self._right = np.zeros((num_knots - 1, self._num_terms))
        self._smooth = self._penalties()
        self._terms: np.ndarray | None = None
        self._spread = _FIRST_SPREAD
        self._stale = False
        self._requests = 1
        self._least_s = 0.0
        self.observed = 0

    def observe(self, num_requests: int, num_tokens: int, seconds: float, uneven: bool = False) -> None:
        """One step, prefill-free. Raises ValueError for fewer tokens than one, or a time that is none."""
        if num_tokens < 1 or not 0 <= seconds < float("inf"):
            raise ValueError(f"a step of {num_tokens} tokens in {seconds} s")
        row = np.zeros(self._num_terms)
        tokens = min(float(num_tokens), self._knots[-1])
        octave = min(int(tokens).bit_length() - 1, len(self._normal) - 1)
        row[octave + 1] = tokens / self._knots[octave] - 1.0
        row[octave] = 1.0 - row[octave + 1]
        row[-2:] = num_requests, uneven
        weight = 1.0
        if self._terms is not None:
            off = abs(seconds / max(float(row @ self._terms), 1e-9) - 1.0)
            weight = min(1.0, _OUTLIER * self._spread / max(off, 1e-9))
            # Bounded growth: one stall stays an outlier, a lasting change is believed after some twenty steps.
            self._spread += (min(off, 4.0 * self._spread) - self._spread) / _SPREAD_MEMORY
            self._spread = max(self._spread, _LEAST_SPREAD)
        self._normal[octave] *= self._keep
        self._right[octave] *= self._keep
        self._normal[octave] += weight * row[:, None] * row
        self._right[octave] += weight * seconds * row
        self._requests = num_requests
        # What extrapolation may not fall below: no step is quicker than a share of the quickest that was seen.
        self._least_s = min(self._least_s, _LEAST_SHARE * seconds) if self.observed else _LEAST_SHARE * seconds
        self._stale = True
        self.observed += 1
        if self._terms is None:
            self._solve()

    def seconds(self, num_requests: int, num_tokens: np.ndarray | float) -> np.ndarray:
        """Of an uneven step, shape of num_tokens; never falls with more tokens. 0 before anything was observed."""
        terms = self._solved()
        if terms is None:
            return np.zeros(np.shape(num_tokens))
        values = np.maximum.accumulate(terms[:-2]) + terms[-2] * num_requests + self.uneven_s
        return np.interp(num_tokens, self._knots, np.maximum(values, self._least_s))

    @property
    def uneven_s(self) -> float:
        """What a step costs more when its requests do not all have 1 + K tokens."""
        terms = self._solved()
        return max(0.0, float(terms[-1])) if terms is not None else 0.0

    def _solved(self) -> np.ndarray | None:
        if self._stale:
            self._solve()
        return self._terms

    def _solve(self) -> None:
        normal = self._normal.sum(axis=0) + self._smooth
        normal[-2, -2] += _OTHER_WEIGHT * self._requests**2
        normal[-1, -1] += _OTHER_WEIGHT
        self._terms = np.linalg.solve(normal, self._right.sum(axis=0))
        self._stale = False

    def _penalties(self) -> np.ndarray:
        """Squared differences that are 0 for the expected shape, whatever the scale: [terms, terms]."""
        rows = []
        for j in range(len(self._knots) - 1):
            row = np.zeros(self._num_terms)
            row[j : j + 2] = -(2.0**_ELASTICITY), 1.0
            rows.append(np.sqrt(_ELASTICITY_WEIGHT) * row)
        for j in range(len(self._knots) - 2):
            row = np.zeros(self._num_terms)
            # (slope after - slope before) * knot: slopes are over 2^j and 2^(j+1) tokens.
            row[j : j + 3] = 2.0, -3.0, 1.0
            rows.append(np.sqrt(_CURVATURE_WEIGHT) * row)
        matrix = np.array(rows)
        return matrix.T @ matrix
