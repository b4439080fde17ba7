"""An OpenTelemetry collector of a few lines: keeps every span that it is sent over OTLP/gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        """(component, span): the component is its process's, empty for vLLM's own."""

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            component = attributes(resource.resource).get("outrider.component", "")
            self.spans += [(component, span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> list[tuple[str, Any]]:
        return [(component, span) for component, span in list(self.spans) if span.trace_id.hex() == trace_id]


def attributes(has_attributes: Any) -> dict[str, Any]:
    values = {}
    for attribute in has_attributes.attributes:
        kind = attribute.value.WhichOneof("value")
        values[attribute.key] = getattr(attribute.value, kind) if kind else None
    return values


@contextmanager
def collecting(port: int) -> Iterator[Collector]:
    """port: 0 for any; the collector's is then in collector.port."""
    collector, server = Collector(), grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.port = server.add_insecure_port(f"127.0.0.1:{port}")  # type: ignore[attr-defined]
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()
