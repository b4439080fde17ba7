"""Everything that uses Ray Serve's private names: proxies, router, broadcasts, logs.

Settings that Serve takes from its environment are here, for whoever starts it.
"""

from __future__ import annotations

SERVICES, REFLECTION = (f"outrider.actors.serve_adapter.proxy.{name}" for name in ("add_services", "add_reflection"))
"""For ``grpc_servicer_functions``."""

GRPC_HOST_VARIABLE = "OUTRIDER_GRPC_HOST"
"""Environment variable with the address that Serve's gRPC proxies listen on. Without it they listen on every one."""

PROXY_ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "outrider.actors.serve_adapter.proxy.middlewares",
    # Serve replaces a proxy that has failed three checks, a dead one among them: 30 s without service by default.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
}
"""For the proxies of a cluster that is started here. Elsewhere it belongs in the environment of the nodes."""
