"""The one ASGI app of the ingress deployment. Every part of it adds its own routes here."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import FastAPI
from ray.serve.handle import DeploymentHandle

from actors.http.errors import add_error_handlers
from actors.http.generation_routes import GenerationRpcs, add_generation_routes
from actors.http.metrics import add_metrics_routes
from actors.http.openai_routes import add_openai_routes
from actors.http.page import add_page_routes
from actors.http.proxy_gate import TellCapacity


@dataclass(frozen=True)
class HttpContext:
    """What routes may use."""

    target: DeploymentHandle
    """The Target deployment; its methods are ``generate``, ``openai``, ``status`` …"""

    served_model_name: str
    num_speculative_tokens: int
    """K, 0 without a drafter."""

    max_request_bytes: int
    """Longest body that is read."""

    max_retries: int
    """How often a request is sent again whose replica is lost before it has begun to answer."""

    rpcs: GenerationRpcs
    """The gRPC servicer."""

    capacity: int | None = None
    """Requests that targets and queue hold together, which proxies are told; None: unknown."""


def build_http_app(context: HttpContext) -> FastAPI:
    """Routes of all parts. Errors have OpenAI's shape on all of them. No pages of FastAPI's: they load scripts from
    the network."""
    app = FastAPI(title="Outrider", openapi_url=None, docs_url=None, redoc_url=None)
    add_error_handlers(app)
    add_openai_routes(app, context)
    add_generation_routes(app, context.rpcs, context.target.token_texts.remote, context.max_request_bytes)
    add_page_routes(app)
    add_metrics_routes(app, context.target)
    if context.capacity is not None:
        app.add_middleware(TellCapacity, capacity=context.capacity)
    return app
