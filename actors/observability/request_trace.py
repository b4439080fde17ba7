"""A span for each request: at the ingress, which began the call, and in the target, which generates.

Both are context managers that cost a look at one variable while tracing is off.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from actors.observability.logs import request_line
from actors.observability.tracing import TRACE_HEADERS, context_of, headers_of, process_tracer

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanKind, Tracer

logger = logging.getLogger("ray.serve.outrider.ingress")

NO_HEADERS: dict[str, str] = {}

_current: ContextVar[dict[str, str]] = ContextVar("headers of the ingress's innermost span", default=NO_HEADERS)
"""A call made inside the ingress, such as an RPC for the page, carries no headers, and belongs to its HTTP request."""


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
