"""Chooses which paths of the draft trees a step verifies beside their main lines. Pure.

The rows of all requests compete: a path is verified where the tokens that it is expected to bring are worth the time of
its rows. So trees narrow to chains as a batch grows, and then they are no longer asked for, since only a chain is worth
drafting ahead. The choice never sees whether a draft will be accepted, so it cannot bias what is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.cluster.link.messages import DraftPath

_PRIOR_TOKENS = 8.0
_KEEP = 1 - 1 / 256
_KNOWN_KEEP = 1 - 1 / 16
_RETRY_AFTER = 64
"""Steps without paths, after which one asks for them, to see whether they have become better."""

_BEGIN_GAIN, _STAY_GAIN = 1.2, 1.0


class PathBudget:
    """Chooses further paths by their expected tokens, which it corrects by what paths have brought so far."""

    def __init__(self) -> None:
        self._expected = self._gained = 0.0
        """Tokens, faded."""

        self._tokens = self._rows = 0.0
        """A request's further paths, as they were proposed lately: expected tokens and rows, faded."""

        self._is_known, self._wanted, self._steps_without = False, True, 0

    @property
    def calibration(self) -> float:
        """Returns by how much paths bring more than the drafter expects of them."""
        return (self._gained + _PRIOR_TOKENS) / (self._expected + _PRIOR_TOKENS)

    def choose(self, proposed: Mapping[str, Sequence[DraftPath]], row_price: float) -> list[tuple[str, DraftPath]]:
        """Returns (request id, path) of the paths to verify, the best first.

        Args:
            proposed: each request's further paths, the best first.
            row_price: tokens that the batch makes in the time that one more row takes.
        """
        calibration = self.calibration
        worth = [
            (calibration * path.gain / (1 + len(path.token_ids)), request_id, path)
            for request_id, paths in proposed.items()
            for path in paths
        ]
        chosen = sorted((entry for entry in worth if entry[0] > row_price), key=lambda entry: -entry[0])
        weight = 1 - _KNOWN_KEEP if self._wanted and self._rows else 1.0
        tokens, rows = sum(path.gain for _, _, path in chosen), sum(1 + len(path.token_ids) for _, _, path in chosen)
        self._tokens += weight * (tokens / len(proposed) - self._tokens)
        self._rows += weight * (rows / len(proposed) - self._rows)
        self._is_known = True
        return [(request_id, path) for _, request_id, path in chosen]

    def pay(self, row_price: float, round_price: float) -> bool:
        """Returns whether the next step is to have paths: they bring more than their rows cost, and more than drafting
        ahead does, which they rule out.

        Args:
            row_price: as in `choose`.
            round_price: tokens that a request makes in the time in which its round is drafted.
        """
        brought = self.calibration * self._tokens - row_price * self._rows
        least = round_price * (_STAY_GAIN if self._wanted else _BEGIN_GAIN)
        self._wanted = not self._is_known or brought > least
        self._steps_without = 0 if self._wanted else self._steps_without + 1
        return self._wanted or self._steps_without % _RETRY_AFTER == 0

    def observe(self, expected: float, gained: int) -> None:
        """Takes in how many more tokens a request committed by its further paths, and how many were expected."""
        self._expected = _KEEP * self._expected + expected
        self._gained = _KEEP * self._gained + gained
