"""OpenTelemetry in a process of ours: on when the environment names a collector, as OpenTelemetry has it.

``environment`` turns the configuration into those variables, which every process of a deployment inherits, vLLM's too:
its own spans then go to the same place, sampled alike. Nothing of OpenTelemetry is imported while tracing is off.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cluster.config import ConfigError, ServingConfig

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
"""``grpc`` where it is not set, as in vLLM, or ``http/protobuf``."""

TRACE_HEADERS = ("traceparent", "tracestate")

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
