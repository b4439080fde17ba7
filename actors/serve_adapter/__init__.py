"""Contains all code that uses private names of Ray Serve: proxies, router, broadcasts, logs.

This module has the settings that Serve reads from its environment.
"""

from __future__ import annotations

SERVICES, REFLECTION = (f"outrider.actors.serve_adapter.proxy.{name}" for name in ("add_services", "add_reflection"))
"""Import paths for Serve's ``grpc_servicer_functions``."""

GRPC_HOST_VARIABLE = "OUTRIDER_GRPC_HOST"
"""Environment variable with the address that Serve's gRPC proxies listen on. Without it they listen on every one."""

SERVE_ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "outrider.actors.serve_adapter.proxy.middlewares",
    # Serve replaces a proxy that has failed three checks, a dead one among them: 30 s without service by default.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
    # An unhealthy replica is killed. Serve would wait serving.drain_s for requests that nobody answers.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}
"""Environment of Serve in a cluster that `outrider serve` starts. Nodes of another cluster need it themselves."""
