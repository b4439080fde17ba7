"""The attempts of one call: which server each goes to, how long it may take, whether another follows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import grpc

from deploy.client.balance import Balancer, requests_held
from deploy.client.calls import Call
from deploy.client.error import Metadata, OutriderError
from deploy.client.retry import RetryPolicy


class Attempts:
    """Every ``begin`` is followed by one ``succeeded`` or ``failed``, or by ``abandoned`` at the end. Not shared.

    clock: monotonic, seconds.
    """

    def __init__(
        self, call: Call[Any], policy: RetryPolicy, balancer: Balancer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._call, self._policy, self._balancer, self._clock = call, policy, balancer, clock
        self._ends_s = None if call.timeout_s is None else clock() + call.timeout_s
        self._server: int | None = None
        self._tried: set[int] = set()
        self._begun = 0

    def begin(self) -> tuple[int, float | None]:
        """(server, seconds left for the attempt). The request's own time-out is brought down to these."""
        now_s = self._clock()
        self._begun += 1
        self._server = self._balancer.pick(now_s, self._tried)
        self._tried.add(self._server)
        left_s = None if self._ends_s is None else max(self._ends_s - now_s, 0.001)
        if left_s is not None and self._begun > 1 and "timeout_ms" in self._call.request.DESCRIPTOR.fields_by_name:
            self._call.request.timeout_ms = math.ceil(left_s * 1000)
        return self._server, left_s

    def succeeded(self, trailing: Metadata | None) -> None:
        self._done(trailing)

    def failed(self, error: OutriderError, trailing: Metadata | None, *, final: bool = False) -> float | None:
        """Seconds to wait before ``begin``; None: the call has failed for good.

        final: output has been seen, so there is no other attempt. With another server to go to there is no wait.
        """
        self._done(trailing, unreachable=error.code is grpc.StatusCode.UNAVAILABLE)
        if final:
            return None
        now_s = self._clock()
        left_s = None if self._ends_s is None else self._ends_s - now_s
        delay_s = self._policy.delay_s(error, self._begun, left_s)
        if delay_s is not None and self._balancer.other_is_up(now_s, self._tried):
            return 0.0
        return delay_s

    def abandoned(self) -> None:
        """Nobody waits any more. Without effect once the attempt is over."""
        self._done(None)

    def _done(self, trailing: Metadata | None, *, unreachable: bool = False) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            self._balancer.done(server, self._clock(), held=requests_held(trailing), unreachable=unreachable)
