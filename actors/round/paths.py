"""Chooses which paths of the draft trees a step verifies beside their main lines. Pure.

The rows of all requests compete: a path is verified where the tokens that it is expected to bring are worth the time of
its rows, so that trees narrow to chains as a batch grows. The choice never sees whether a draft will be accepted, so it
cannot bias what is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.cluster.link.messages import DraftPath

_PRIOR_TOKENS = 8.0
_KEEP = 1 - 1 / 256
_RECOVER = 1 - 1 / 64


class PathBudget:
    """Chooses further paths by their expected tokens, which it corrects by what paths have brought so far."""

    def __init__(self) -> None:
        self._expected = self._gained = 0.0
        """Tokens, faded."""

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
        if worth and not chosen:  # so that paths are tried again
            self._expected, self._gained = _RECOVER * self._expected, _RECOVER * self._gained
        return [(request_id, path) for _, request_id, path in chosen]

    def observe(self, expected: float, gained: int) -> None:
        """Takes in how many more tokens a request committed by its further paths, and how many were expected."""
        self._expected = _KEEP * self._expected + expected
        self._gained = _KEEP * self._gained + gained
