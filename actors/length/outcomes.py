"""How often the drafter has the right continuation ready, and how much of what was asked for comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.length.limits import LengthLimits
from actors.length.origin import Origin

_AHEAD = {Origin.MAIN_LINE: 0.6, Origin.SIDE_BRANCH: 0.25, Origin.MISS: 0.15}
_AT_ONCE = {Origin.MAIN_LINE: 0.0, Origin.SIDE_BRANCH: 0.0, Origin.MISS: 1.0}
_PRIOR_ANSWERS = 8.0
_REQUEST_ANSWERS = 8.0
"""Weight of the deployment's average against a request's own answers."""

_REQUEST_TOKENS = 16.0
"""The same for tokens asked for."""

_LEAST_HIT = 1e-6


@dataclass(slots=True)
class _Answers:
    hits: float = 0.0
    answers: float = 0.0
    asked: float = 0.0
    came: float = 0.0

    def add(self, hit: bool, counts: bool, asked: int, came: int, keep: float) -> None:
        if counts:
            self.hits = self.hits * keep + hit
            self.answers = self.answers * keep + 1.0
        if asked:
            self.asked = self.asked * keep + asked
            self.came = self.came * keep + came


class Outcomes:
    """Decayed counts per request, shrunk towards the deployment's."""

    def __init__(self, limits: LengthLimits) -> None:
        self._keep_request = 1.0 - 1.0 / limits.request_memory
        self._keep_deployment = 1.0 - 1.0 / limits.deployment_memory
        prior = _AHEAD if limits.draft_ahead else _AT_ONCE
        self._origins = {origin: share * _PRIOR_ANSWERS for origin, share in prior.items()}
        self._asked = self._came = _REQUEST_TOKENS
        self._requests: dict[str, _Answers] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def track(self, request_id: str) -> None:
        self._requests[request_id] = _Answers()

    def untrack(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def observe(self, request_id: str, origin: Origin, was_drafting: bool, asked: int, came: int) -> None:
        """was_drafting: the drafter had a reason to draft ahead for this answer; the first one after a pause is always
        a miss and says nothing about its guesses. asked: tokens wanted from an answer of this origin."""
        request = self._requests.get(request_id)
        if request is None:
            return
        came = min(came, asked)
        request.add(
            origin is Origin.MAIN_LINE or origin is Origin.SIDE_BRANCH, was_drafting, asked, came, self._keep_request
        )
        if was_drafting:
            origins, keep = self._origins, self._keep_deployment
            for other in origins:
                origins[other] *= keep
            origins[Origin.MISS if origin is Origin.NONE else origin] += 1.0
        if asked:
            self._asked = self._asked * self._keep_deployment + asked
            self._came = self._came * self._keep_deployment + came

    def shares(self) -> dict[Origin, float]:
        """The deployment's, over MAIN_LINE, SIDE_BRANCH and MISS. A NONE counts as a miss."""
        total = sum(self._origins.values())
        return {origin: count / total for origin, count in self._origins.items()}

    @property
    def main_line_share(self) -> float:
        """Of hits."""
        main, side = self._origins[Origin.MAIN_LINE], self._origins[Origin.SIDE_BRANCH]
        return main / (main + side) if main + side > 0 else 1.0

    def hit_rates(self, request_ids: Sequence[str]) -> np.ndarray:
        """[requests]"""
        average = 1.0 - self.shares()[Origin.MISS]
        rows = [self._requests[request_id] for request_id in request_ids]
        hits = np.array([(r.hits + _REQUEST_ANSWERS * average) / (r.answers + _REQUEST_ANSWERS) for r in rows])
        return np.clip(hits, _LEAST_HIT, 1.0 - _LEAST_HIT)

    def delivery(self, request_ids: Sequence[str]) -> np.ndarray:
        """[requests] Tokens that come for one asked for: below 1 for answers that are late, or shorter than wanted."""
        average = self._came / self._asked
        rows = [self._requests[request_id] for request_id in request_ids]
        return np.array([(r.came + _REQUEST_TOKENS * average) / (r.asked + _REQUEST_TOKENS) for r in rows])
