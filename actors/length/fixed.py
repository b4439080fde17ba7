"""Lengths, and the same ones for every request in every round: what ``speculation.adaptive: false`` asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from actors.messages import Origin


class Lengths(NamedTuple):
    """Of one request in one round. k: tokens wanted on a hit, 0 for no drafting at all. k_miss: tokens worth waiting
    for on a miss, 0 to k."""

    k: int
    k_miss: int


class FixedLengths:
    """Takes the place of a LengthController and learns nothing."""

    def __init__(self, num_tokens: int) -> None:
        self._lengths = Lengths(num_tokens, num_tokens)

    def track(self, request_id: str, max_tokens: int) -> None: ...

    def untrack(self, request_id: str) -> None: ...

    def observe_round(self, request_id: str, drafted: int, accepted: int) -> None: ...

    def observe_step(self, num_requests: int, num_tokens: int, step_s: float) -> None: ...

    def observe_answer(
        self, request_id: str, origin: Origin, num_tokens: int, draft_step_s: float, wait_s: float
    ) -> None: ...

    def choose(self, request_ids: Sequence[str]) -> dict[str, Lengths]:
        return dict.fromkeys(request_ids, self._lengths)

    def snapshot(self) -> dict[str, Any]:
        return {}
