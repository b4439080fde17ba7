"""Chooses which paths of the draft trees a step verifies beside their main lines. Pure.

The paths of all requests compete: one is verified where the tokens that it is expected to bring are worth the time of
the tokens that it adds to the step. So trees narrow to chains as a batch grows, and then they are no longer asked for,
since only a chain is worth drafting ahead. The choice never sees whether a draft will be accepted, so it cannot bias
what is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.cluster.link.messages import DraftPath

_PRIOR_TOKENS = 64.0
_KEEP = 1 - 1 / 256
_KNOWN_KEEP = 1 - 1 / 16
_RETRY_AFTER, _RETRY_AFTER_MAX = 64, 2048
"""Steps without paths, after which one asks for them, to see whether they have become better. They double with every
try, until paths stay for as many steps."""

_BEGIN_GAIN, _STAY_GAIN = 1.2, 1.0


class PathBudget:
    """Chooses further paths by their expected tokens, which it corrects by what paths have brought so far."""

    def __init__(self) -> None:
        self._expected = self._gained = 0.0
        """Tokens, faded."""

        self._extra_tokens = self._extra_rows = 0.0
        """Moving averages, per request, of the chosen paths' expected tokens and scheduled tokens."""

        self._is_known, self._wanted = False, True
        self._steps, self._retry_after = 0, _RETRY_AFTER
        """Steps for which paths have been wanted, or not."""

    @property
    def calibration(self) -> float:
        """Returns by how much paths bring more than the drafter expects of them."""
        return (self._gained + _PRIOR_TOKENS) / (self._expected + _PRIOR_TOKENS)

    def choose(self, proposed: Mapping[str, Sequence[DraftPath]], token_price: float) -> list[tuple[str, DraftPath]]:
        """Returns (request id, path) of the paths to verify, the best first.

        Args:
            proposed: each request's further paths, the best first.
            token_price: tokens that the batch makes in the time that one more scheduled token adds to a step.
        """
        calibration = self.calibration
        worth = [
            (calibration * path.gain / (1 + len(path.token_ids)), request_id, path)
            for request_id, paths in proposed.items()
            for path in paths
        ]
        chosen = sorted((entry for entry in worth if entry[0] > token_price), key=lambda entry: -entry[0])
        weight = 1 - _KNOWN_KEEP if self._wanted and self._extra_rows else 1.0
        tokens = sum(path.gain for _, _, path in chosen)
        rows = sum(1 + len(path.token_ids) for _, _, path in chosen)
        self._extra_tokens += weight * (tokens / len(proposed) - self._extra_tokens)
        self._extra_rows += weight * (rows / len(proposed) - self._extra_rows)
        self._is_known = True
        return [(request_id, path) for _, request_id, path in chosen]

    def wants_paths(self, token_price: float, round_price: float) -> bool:
        """Decides whether the next proposals are to carry paths. It is asked once a step.

        They must bring more than what they add to the step costs, and more than drafting ahead does, since the drafter
        drafts nothing ahead of a tree.

        Args:
            token_price: as in `choose`.
            round_price: tokens that a request makes in the time by which drafting after the outcome prolongs a round.
        """
        brought = self.calibration * self._extra_tokens - token_price * self._extra_rows
        least = round_price * (_STAY_GAIN if self._wanted else _BEGIN_GAIN)
        wanted = not self._is_known or brought > least
        self._steps = self._steps + 1 if wanted == self._wanted else 1
        self._wanted = wanted
        if wanted:
            if self._steps == self._retry_after:
                self._retry_after = _RETRY_AFTER
            return True
        if self._steps < self._retry_after:
            return False
        self._steps, self._retry_after = 0, min(2 * self._retry_after, _RETRY_AFTER_MAX)
        self._expected, self._gained = self._expected / 2, self._gained / 2  # it must not decide alone
        return True

    def observe(self, expected: float, gained: int) -> None:
        """Takes in how many more tokens a request committed by its further paths, and how many were expected."""
        self._expected = _KEEP * self._expected + expected
        self._gained = _KEEP * self._gained + gained
