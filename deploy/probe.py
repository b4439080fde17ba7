"""Asks a server that was just started for its health, from outside, as a client does."""

from __future__ import annotations

import http.client
import socket
import ssl

from outrider.cluster.config import ServingConfig
from outrider.cluster.gateway_config import GatewayConfig
from outrider.deploy.ports import reachable

TIMEOUT_S = 10.0
HEALTH = "/health"


def missing(serving: ServingConfig) -> str | None:
    """Returns what a client would still miss; None: nothing. Where clients need certificates, open ports are enough."""
    host, http_port, grpc_port = serving.public
    host = reachable(host)
    tls = serving.gateway.tls if isinstance(serving.gateway, GatewayConfig) else None
    try:
        for port in (grpc_port, http_port):
            socket.create_connection((host, port), timeout=TIMEOUT_S).close()
        if tls is not None and tls.client_ca is not None:
            return None
        connection: http.client.HTTPConnection
        if tls is None:
            connection = http.client.HTTPConnection(host, http_port, timeout=TIMEOUT_S)
        else:
            # The certificate is for other names than this address. What is asked is whether the server answers.
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = http.client.HTTPSConnection(host, http_port, timeout=TIMEOUT_S, context=context)
        connection.request("GET", HEALTH)
        status = connection.getresponse().status
        connection.close()
    except (OSError, http.client.HTTPException) as error:
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    return None if status == http.client.OK else f"{HEALTH} answers {status}"
