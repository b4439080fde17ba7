"""How likely the next draft of a request is accepted, position by position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.length.limits import LengthLimits

_PRIOR, _PRIOR_TRIES = 0.7, 4.0
"""Before anything was verified; fades with the first rounds."""

_DEPTH_TRIES = 8.0
"""A position the deployment seldom reaches is taken to be like the one before it, with the weight of so many tries."""

_LEVEL_TRIES = 8.0
_POSITION_TRIES = 16.0
"""Weight of the average against a request's own tries: for its level over all positions, then for each position."""

_PROBED_REQUEST_TRIES = 2.0
_PROBED_DEPLOYMENT_TRIES = 12.0
"""What older evidence weighs at most when a probe begins: a probe is short and must be able to say something new."""


class _Counts:
    """Decayed tries and acceptances at each position."""

    __slots__ = ("accepted", "tried")

    def __init__(self, num_positions: int) -> None:
        self.tried = [0.0] * num_positions
        self.accepted = [0.0] * num_positions

    def add(self, drafted: int, accepted: int, keep: float) -> None:
        """Position j was tried if all before it were accepted."""
        reached = min(drafted, accepted + 1)
        self.tried = [n * keep + (j < reached) for j, n in enumerate(self.tried)]
        self.accepted = [n * keep + (j < accepted) for j, n in enumerate(self.accepted)]

    def fade(self, most_tries: float) -> None:
        factor = min(1.0, most_tries / self.tried[0]) if self.tried[0] > 0 else 1.0
        self.tried = [n * factor for n in self.tried]
        self.accepted = [n * factor for n in self.accepted]


class Acceptance:
    """a_ij, the probability that draft j of request i is accepted given that those before it were.

    Three levels, each filled up from the one above where it has seen little: the deployment by position (the first
    starts at 0.7), the request's own level against the deployment's, the request by position. Counts decay with rounds
    that were verified, so an estimate stays while nothing is drafted.
    """

    def __init__(self, limits: LengthLimits) -> None:
        self._num_positions = limits.max_tokens
        self._keep_request = 1.0 - 1.0 / limits.request_memory
        self._keep_deployment = 1.0 - 1.0 / limits.deployment_memory
        self._requests: dict[str, _Counts] = {}
        self._deployment = _Counts(limits.max_tokens)
        self._deployment.tried[0] = _PRIOR_TRIES
        self._deployment.accepted[0] = _PRIOR * _PRIOR_TRIES

    def __len__(self) -> int:
        return len(self._requests)

    def track(self, request_id: str) -> None:
        self._requests[request_id] = _Counts(self._num_positions)

    def untrack(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def observe(self, request_id: str, drafted: int, accepted: int) -> None:
        """Raises ValueError for more accepted than drafted."""
        if not 0 <= accepted <= drafted:
            raise ValueError(f"accepted ({accepted}) must be from 0 to drafted ({drafted})")
        counts = self._requests.get(request_id)
        if counts is not None and drafted:
            drafted, accepted = min(drafted, self._num_positions), min(accepted, self._num_positions)
            counts.add(drafted, accepted, self._keep_request)
            self._deployment.add(drafted, accepted, self._keep_deployment)

    def begin_probe(self, request_ids: Sequence[str], nobody_drafts: bool) -> None:
        """Old evidence of these requests must not outweigh the probe; the average's only if it is all that there is."""
        for request_id in request_ids:
            if request_id in self._requests:
                self._requests[request_id].fade(_PROBED_REQUEST_TRIES)
        if nobody_drafts:
            self._deployment.fade(_PROBED_DEPLOYMENT_TRIES)

    def by_position(self) -> list[float]:
        """[K] The deployment's."""
        estimates: list[float] = []
        counts, before = self._deployment, _PRIOR
        for tried, accepted in zip(counts.tried, counts.accepted, strict=True):
            # The first position brings its prior along in its counts; there it must fade and not pull for ever.
            weight = _DEPTH_TRIES if estimates else 1e-9
            before = (accepted + weight * before) / (tried + weight)
            estimates.append(before)
        return estimates

    def survival(self, request_ids: Sequence[str]) -> np.ndarray:
        """[requests, K] Probability that drafts 1..j are all accepted."""
        counts = [self._requests[request_id] for request_id in request_ids]
        tried = np.array([c.tried for c in counts]).reshape(-1, self._num_positions)
        accepted = np.array([c.accepted for c in counts]).reshape(-1, self._num_positions)
        average = np.array(self.by_position())
        level = (accepted.sum(1) - tried @ average) / (tried.sum(1) + _LEVEL_TRIES)
        expected = np.clip(average + level[:, None], 0.0, 0.995)
        a = (accepted + _POSITION_TRIES * expected) / (tried + _POSITION_TRIES)
        return np.cumprod(a, axis=1)
