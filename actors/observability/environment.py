"""What the processes of a deployment find in their environment, so that they trace and log as configured."""

from __future__ import annotations

from outrider.actors.observability import logs, tracing
from outrider.cluster.config import ServingConfig


def process_environment(serving: ServingConfig) -> dict[str, str]:
    """{} by default. Raises ConfigError for tracing without OpenTelemetry."""
    return {**tracing.environment(serving), **logs.environment(serving)}
