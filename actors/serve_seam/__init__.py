"""All that leans on Ray Serve's private names: proxies, router, broadcasts, logs. Which ones: ``leans_on.py``.

What Serve must be told of them is here, for whoever starts it.
"""

from __future__ import annotations

SERVICER = "outrider.actors.serve_seam.grpc_proxy.add_services"
"""For ``grpc_servicer_functions``."""

PROXY_ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "outrider.actors.serve_seam.http_proxy.middlewares",
    # Serve replaces a proxy that has failed three checks, one that is dead among them: 30 s of no service by default.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
    "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": "outrider.actors.serve_seam.steady_time.go_by_steady_time",
}
"""For the proxies of a cluster that is started here, and the controller. Elsewhere it belongs in the environment of the
nodes."""
