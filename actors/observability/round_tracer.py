"""A span for each round of a traced request, made where rounds are known: beside the verifier, in rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.actors.observability.tracing import context_of
from outrider.cluster.link.messages import DraftOrigin

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

SPAN_NAME = "outrider.round"


@dataclass(slots=True)
class RoundTrace:
    """What is known of one traced request's rounds."""

    context: Context
    rounds: int = 0
    origin: DraftOrigin = DraftOrigin.NONE
    """Of the proposal that the next round verifies."""


class RoundTracer:
    """For the engine's step thread. A request that is traced holds its RoundTrace."""

    def __init__(self, tracer: Tracer, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._tracer, self._clock_ns = tracer, clock_ns
        self._step_started_ns = 0
        self._waited_s = 0.0

    def track(self, headers: dict[str, str]) -> RoundTrace:
        """headers: W3C, of the request's span in the target."""
        return RoundTrace(context_of(headers))

    def waited(self, seconds: float) -> None:
        """The engine stood still for so long, for the proposals that the next step verifies."""
        self._waited_s = seconds

    def step_starts(self) -> None:
        self._step_started_ns = self._clock_ns()

    def committed(self, traced: RoundTrace, num_drafted: int, num_committed: int, epoch: int) -> None:
        """A round ends. It began when the engine began to wait for its proposals. epoch: of the link, 0 without one."""
        attributes: dict[str, Any] = {
            "outrider.round": traced.rounds,
            "outrider.k": num_drafted,
            "outrider.accepted": num_committed - 1,
            "outrider.committed": num_committed,
            "outrider.wait_ms": self._waited_s * 1e3,
            "outrider.origin": (traced.origin if num_drafted else DraftOrigin.NONE).name.lower(),
            "outrider.hit": bool(num_drafted and traced.origin.is_hit),
            "outrider.epoch": epoch,
        }
        started_ns = self._step_started_ns - int(self._waited_s * 1e9)
        span = self._tracer.start_span(SPAN_NAME, context=traced.context, start_time=started_ns, attributes=attributes)
        span.end(self._clock_ns())
        traced.rounds += 1
        traced.origin = DraftOrigin.NONE
