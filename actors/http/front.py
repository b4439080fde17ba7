"""The ingress deployment's class: gRPC servicer and HTTP app in one replica."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.http.app import HttpContext, build_http_app
from actors.ingress.servicer import Ingress


@serve.ingress()
class Front(Ingress):
    """Ingress answers gRPC; Serve gives HTTP requests to the app that is built here, in the replica."""

    def __init__(
        self,
        target: DeploymentHandle,
        served_model_name: str,
        num_speculative_tokens: int,
        *args: Any,
        max_request_bytes: int,
        **kwargs: Any,
    ) -> None:
        """args, kwargs: Ingress's own. max_request_bytes: longest HTTP body that is read."""
        super().__init__(target, served_model_name, num_speculative_tokens, *args, **kwargs)
        self._http = HttpContext(
            target,
            served_model_name,
            num_speculative_tokens,
            max_request_bytes,
            self._max_retries,
            self,
            kwargs.get("capacity"),
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_http_app(self._http)
