"""How Serve's proxies are started for a configuration, by whoever starts them: `outrider serve`, and tests."""

from __future__ import annotations

from typing import Any

from ray.serve.config import HTTPOptions, gRPCOptions

from outrider.actors.serve_seam import SERVICER
from outrider.actors.serving.access.settings import ProxyAccess
from outrider.cluster.config import ServingConfig
from outrider.cluster.limits import LimitsConfig


def proxy_options(serving: ServingConfig, limits: LimitsConfig | None = None) -> dict[str, Any]:
    """For ``serve.start``: ``http_options`` and ``grpc_options``. What these cannot say reaches the proxies by their
    environment: PROXY_ENVIRONMENT, ProxyAccess.environment and LimitsConfig.to_environment."""
    access, limits = ProxyAccess.of(serving), limits or LimitsConfig()
    return {
        "http_options": HTTPOptions(
            host=serving.host,
            port=serving.http_port,
            ssl_certfile=access.ssl_certfile,
            ssl_keyfile=access.ssl_keyfile,
            ssl_ca_certs=access.ssl_ca_certs,
            keep_alive_timeout_s=int(limits.connection_idle_timeout_s),
        ),
        "grpc_options": gRPCOptions(
            port=serving.grpc_port, grpc_servicer_functions=[SERVICER], enable_reflection=serving.reflection
        ),
    }
