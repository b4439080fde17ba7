"""Converts the configuration of tracing and logging to environment variables of a deployment's processes."""

from __future__ import annotations

import importlib.util
import os
from contextlib import suppress

from outrider.actors.observability.logs import CONFIG_PATH_VARIABLE, JSON_LINES
from outrider.actors.observability.tracing import ENDPOINT, PROTOCOL
from outrider.cluster.config import ConfigError, ServingConfig

_PACKAGES = ("sdk.trace", "exporter.otlp.proto.grpc.trace_exporter", "instrumentation.fastapi")


def process_environment(serving: ServingConfig) -> dict[str, str]:
    """Returns variables of OpenTelemetry and vLLM, {} by default. Raises ConfigError where tracing lacks packages."""
    found = {CONFIG_PATH_VARIABLE: str(JSON_LINES)} if serving.log_format == "json" else {}
    if serving.otlp_traces_endpoint is None:
        return found
    is_installed = False
    with suppress(ModuleNotFoundError):  # of a package's parent
        is_installed = all(importlib.util.find_spec(f"opentelemetry.{package}") for package in _PACKAGES)
    if not is_installed:
        raise ConfigError(
            "serving.otlp_traces_endpoint: OpenTelemetry's SDK, exporter or FastAPI instrumentation is not installed; "
            "install outrider[otel], or leave it out"
        )
    return {
        **found,
        ENDPOINT: serving.otlp_traces_endpoint,
        PROTOCOL: os.environ.get(PROTOCOL, "grpc"),
        "OTEL_SERVICE_NAME": os.environ.get("OTEL_SERVICE_NAME", "outrider"),
        # A caller's sampling decision stands.
        "OTEL_TRACES_SAMPLER": os.environ.get("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"),
        "OTEL_TRACES_SAMPLER_ARG": os.environ.get("OTEL_TRACES_SAMPLER_ARG", "1"),
    }
