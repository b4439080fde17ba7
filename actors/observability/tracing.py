"""OpenTelemetry in a process of ours, and a span for each request: at the ingress, which began the call, and in the
target, which generates.

It is on when the environment names a collector, as OpenTelemetry has it. ``environment`` turns the configuration into
those variables, which every process of a deployment inherits, vLLM's too: its own spans then go to the same place,
sampled alike. While tracing is off nothing of OpenTelemetry is imported, and a span costs a look at one variable.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from outrider.actors.observability.logs import request_line
from outrider.cluster.config import ConfigError, ServingConfig

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanKind, Tracer

logger = logging.getLogger("ray.serve.outrider.ingress")

ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
"""``grpc`` where it is not set, as in vLLM, or ``http/protobuf``."""

TRACE_HEADERS = ("traceparent", "tracestate")

NO_HEADERS: dict[str, str] = {}

_current: ContextVar[dict[str, str]] = ContextVar("headers of the ingress's innermost span", default=NO_HEADERS)
"""A call made inside the ingress, such as an RPC for the page, carries no headers, and belongs to its HTTP request."""

_PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter")


def environment(serving: ServingConfig) -> dict[str, str]:
    """What processes of a deployment need to trace; {}: nothing is traced.

    Raises ConfigError when OpenTelemetry is not installed.
    """
    if serving.otlp_traces_endpoint is None:
        return {}
    if not all(_is_installed(package) for package in _PACKAGES):
        raise ConfigError(
            "serving.otlp_traces_endpoint: OpenTelemetry's SDK and OTLP exporter are not installed; install "
            "outrider[otel], or leave it out"
        )
    return {
        ENDPOINT: serving.otlp_traces_endpoint,
        PROTOCOL: os.environ.get(PROTOCOL, "grpc"),
        "OTEL_SERVICE_NAME": os.environ.get("OTEL_SERVICE_NAME", "outrider"),
        # Whoever calls decides for his own traces; of those that begin here a share is taken.
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": f"{serving.trace_sample_ratio:g}",
    }


@functools.cache
def process_tracer(component: str) -> Tracer | None:
    """This process's tracer, made once. component: ``ingress``, ``target`` or ``verifier``. None: tracing is off."""
    endpoint = os.environ.get(ENDPOINT)
    if not endpoint:
        return None
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # Not OpenTelemetry's global provider: in a target that one is vLLM's.
    provider = TracerProvider(resource=Resource.create({"outrider.component": component}))
    provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
    atexit.register(provider.shutdown)
    return provider.get_tracer("outrider")


def context_of(headers: Mapping[str, str]) -> Context:
    """The caller's trace, as W3C headers name it; an empty context when they name none, or wrongly."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {name: headers[name] for name in TRACE_HEADERS if name in headers}
    return TraceContextTextMapPropagator().extract(carrier, context=Context())


def headers_of(span: Span) -> dict[str, str]:
    """W3C headers that make what is called a child of the span."""
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, context=set_span_in_context(span, Context()))
    return carrier


class RequestSpan:
    """A request's open span, or nothing. headers: for whoever is called next; empty without a trace."""

    def __init__(self, span: Span | None, headers: dict[str, str]) -> None:
        self._span, self.headers = span, headers

    @property
    def is_recorded(self) -> bool:
        """False too for a trace that is passed on but not sampled."""
        return self._span is not None and self._span.is_recording()

    def set(self, **attributes: Any) -> None:
        """Attributes, ``outrider.`` before each name. None is left out."""
        if self._span is not None:
            for name, value in attributes.items():
                if value is not None:
                    self._span.set_attribute(f"outrider.{name}", value)


OFF = RequestSpan(None, NO_HEADERS)


@contextmanager
def ingress_span(name: str, headers: Mapping[str, str], **attributes: Any) -> Iterator[RequestSpan]:
    """name: of the call, such as the RPC's. headers: HTTP headers or gRPC metadata, names in lower case."""
    tracer = process_tracer("ingress")
    if tracer is None:
        yield OFF
        return
    from opentelemetry.trace import SpanKind

    if not any(header in headers for header in TRACE_HEADERS):
        headers = _current.get()
    with _span(tracer, name, headers, SpanKind.SERVER) as span:
        span.set(**attributes)
        before = _current.get()
        _current.set(span.headers)
        try:
            yield span
        finally:
            _current.set(before)  # no token: a generator may be closed in another context


@contextmanager
def rpc_span(rpc: str, grpc_context: Any, request_id: str | None) -> Iterator[RequestSpan]:
    """A request's RPC at the ingress: its span, and its line in the log. request_id None: a control call, which gets
    neither."""
    if request_id is None:
        yield OFF
        return
    with request_line(logger, request_id), _traced_rpc(rpc, grpc_context, request_id) as span:
        yield span


@contextmanager
def _traced_rpc(rpc: str, grpc_context: Any, request_id: str) -> Iterator[RequestSpan]:
    if process_tracer("ingress") is None:
        yield OFF
        return
    # The client's metadata, whose values may be bytes.
    headers = {key: value for key, value in grpc_context.invocation_metadata() if isinstance(value, str)}
    with ingress_span(f"outrider.v1.GenerationService/{rpc}", headers, api="grpc", request_id=request_id) as span:
        yield span


@contextmanager
def target_span(request_id: str, headers: Mapping[str, str]) -> Iterator[RequestSpan]:
    tracer = process_tracer("target")
    if tracer is None:
        yield OFF
        return
    from opentelemetry.trace import SpanKind

    with _span(tracer, "outrider.target", headers, SpanKind.INTERNAL) as span:
        span.set(request_id=request_id)
        yield span


@contextmanager
def _span(tracer: Tracer, name: str, headers: Mapping[str, str], kind: SpanKind) -> Iterator[RequestSpan]:
    from opentelemetry.trace import Status, StatusCode

    span = tracer.start_span(name, context_of(headers), kind=kind)
    try:
        yield RequestSpan(span, headers_of(span))
    except (asyncio.CancelledError, GeneratorExit):
        span.set_attribute("outrider.cancelled", True)
        raise
    except BaseException as error:
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, str(error)))
        raise
    finally:
        span.end()


def _exporter(endpoint: str) -> Any:
    protocol = os.environ.get(PROTOCOL, "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=endpoint)
    raise ConfigError(f"{PROTOCOL}: {protocol!r} is not known; set grpc or http/protobuf")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
