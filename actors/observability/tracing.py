"""Traces requests: by OpenTelemetry's own instrumentation for HTTP, and by spans of ours from the replica inward.

gRPC calls get a span of ours too: Serve's proxy has the gRPC server, in another process, and hands the ingress no
context of an interceptor there. Tracing is on when the environment names a collector (environment.py); vLLM reads the
same variable, and its spans go there as well.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context, get_current
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from outrider.actors.observability.logs import request_line
from outrider.cluster.link.messages import DraftOrigin

if TYPE_CHECKING:
    from fastapi import FastAPI
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger("ray.serve.outrider.ingress")

ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
"""``grpc`` where it is not set, as in vLLM, or ``http/protobuf``."""

UNTRACED = r"/(livez|readyz|health|ping|version|metrics|outrider/v1/status|outrider/page/.*)?$"
"""Probes, scrapes and the page's files."""

_PROPAGATOR = TraceContextTextMapPropagator()


@functools.cache
def process_provider(component: str) -> TracerProvider | None:
    """Returns this process's tracer provider, made once; None while tracing is off.

    component: ``ingress``, ``target`` or ``verifier``, which all its spans name.
    """
    if not os.environ.get(ENDPOINT):
        return None
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if os.environ.get(PROTOCOL) == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    else:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # type: ignore[assignment]
    # Not OpenTelemetry's global provider: in a target that one is vLLM's. The exporter reads the environment itself.
    provider = TracerProvider(resource=Resource.create({"outrider.component": component}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    atexit.register(provider.shutdown)
    return provider


def process_tracer(component: str) -> Tracer | None:
    provider = process_provider(component)
    return None if provider is None else provider.get_tracer("outrider")


def instrument(app: FastAPI) -> None:
    """Has OpenTelemetry trace the app's requests, where tracing is on."""
    if (provider := process_provider("ingress")) is not None:
        from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor

        FastAPIInstrumentor.instrument_app(
            app, tracer_provider=provider, excluded_urls=UNTRACED, exclude_spans=["receive", "send"]
        )


def context_of(headers: Mapping[str, str]) -> Context:
    """Returns the caller's trace as W3C headers name it; an empty context when they name none, or wrongly."""
    return _PROPAGATOR.extract(headers, context=Context())


def headers_of(span: Span) -> dict[str, str]:
    """Returns W3C headers that make what is called a child of the span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=set_span_in_context(span, Context()))
    return carrier


def forwarded(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Returns HTTP headers that make what is called a child of the current span; without one, as they are."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    kept = [(name, value) for name, value in headers if not carrier or name.decode("latin-1") not in _PROPAGATOR.fields]
    return [*kept, *((name.encode(), value.encode()) for name, value in carrier.items())]


@contextmanager
def open_span(
    tracer: Tracer, name: str, context: Context, kind: SpanKind = SpanKind.INTERNAL, **attributes: Any
) -> Iterator[Span]:
    """Surrounds a call with a span, which says how it ended. Attributes get ``outrider.`` before their names.

    It does not become the current span: a generator may be closed in another context than it began in.
    """
    span = tracer.start_span(name, context, kind, {f"outrider.{key}": value for key, value in attributes.items()})
    try:
        yield span
    except (asyncio.CancelledError, GeneratorExit):
        span.set_attribute("outrider.cancelled", True)
        raise
    except BaseException as error:
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, str(error)))
        raise
    finally:
        span.end()


@contextmanager
def rpc_span(rpc: str, grpc_context: Any, request_id: str | None) -> Iterator[dict[str, str]]:
    """Surrounds a request's RPC at the ingress with a span and a line in the log. Yields headers for the replica.

    request_id: None for a control call, which gets neither.
    """
    tracer = None if request_id is None else process_tracer("ingress")
    with nullcontext() if request_id is None else request_line(logger, request_id):
        if tracer is None:
            yield {}
            return
        metadata = {key: value for key, value in grpc_context.invocation_metadata() if isinstance(value, str)}
        # A call of the page brings none, and belongs to its HTTP request.
        parent, name = context_of(metadata) or get_current(), f"outrider.v1.GenerationService/{rpc}"
        with open_span(tracer, name, parent, SpanKind.SERVER, api="grpc", request_id=request_id) as span:
            yield headers_of(span)


@dataclass(slots=True)
class RoundTrace:
    """Holds what is known of a traced request's rounds. origin: of the proposal that the next round verifies."""

    context: Context
    rounds: int = 0
    origin: DraftOrigin = DraftOrigin.NONE


class RoundTracer:
    """Makes a span for each round of a traced request, which holds its RoundTrace. On the engine's step thread."""

    def __init__(self, tracer: Tracer, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._tracer, self._clock_ns = tracer, clock_ns
        self._step_started_ns, self._waited_s = 0, 0.0

    def track(self, headers: dict[str, str]) -> RoundTrace:
        """Begins to trace a request. headers: W3C headers of the request's span in the target."""
        return RoundTrace(context_of(headers))

    def waited(self, seconds: float) -> None:
        """Notes how long the engine waited for the proposals that the next step verifies."""
        self._waited_s = seconds

    def step_starts(self) -> None:
        self._step_started_ns = self._clock_ns()

    def committed(self, traced: RoundTrace, num_drafted: int, num_committed: int, epoch: int) -> None:
        """Ends a round, which began when the wait for its proposals did. epoch: of the link, 0 without one."""
        origin = traced.origin if num_drafted else DraftOrigin.NONE
        attributes: dict[str, Any] = {
            "outrider.round": traced.rounds,
            "outrider.k": num_drafted,
            "outrider.accepted": num_committed - 1,
            "outrider.committed": num_committed,
            "outrider.wait_ms": self._waited_s * 1e3,
            "outrider.origin": origin.name.lower(),
            "outrider.hit": origin.is_hit,
            "outrider.epoch": epoch,
        }
        started_ns = self._step_started_ns - int(self._waited_s * 1e9)
        span = self._tracer.start_span("outrider.round", traced.context, start_time=started_ns, attributes=attributes)
        span.end(self._clock_ns())
        traced.rounds, traced.origin = traced.rounds + 1, DraftOrigin.NONE
