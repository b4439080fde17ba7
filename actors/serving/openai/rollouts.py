"""Carries vLLM's routes for rollouts, which pause generation and bring new weights, to every target replica.

The gateway has them on its admin port only. They exist where ``target.engine_args.weight_transfer_config`` is set.
"""

from __future__ import annotations

import uuid

from fastapi import FastAPI, Request
from ray.serve.handle import DeploymentHandle
from starlette.responses import JSONResponse, Response

from outrider.actors.replica_calls import Broadcast, HttpCall, RequestError
from outrider.actors.serving.failures import HttpError, failure_of
from outrider.actors.serving.openai.forward import body_of

ROUTES = (
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("POST", "/init_weight_transfer_engine"),
    ("POST", "/start_weight_update"),
    ("POST", "/update_weights"),
    ("POST", "/finish_weight_update"),
    ("POST", "/update_weight_version"),
    ("GET", "/weight_info"),
)
"""Methods and paths of vLLM's router, vllm.entrypoints.rl.online. deploy/gateway/haproxy.cfg names them, too."""


def add_rollout_routes(app: FastAPI, target: DeploymentHandle, broadcast: Broadcast, timeout_s: float) -> None:
    """Adds the routes. timeout_s: limit of the slowest replica."""

    async def ask_all(request: Request) -> Response:
        if "origin" in request.headers:  # a web page can send a request without a body to any address
            raise RequestError("origin", "is a web page's", "call this path from a program")
        kept = tuple((name, value) for name, value in request.scope["headers"] if name == b"content-type")
        body = await body_of(request)
        call = HttpCall(
            request.method,
            request.url.path,
            request.scope.get("query_string", b""),
            (*kept, (b"content-length", str(len(body)).encode())),
            body,
            request_id=uuid.uuid4().hex,
            routed=None,
        )
        try:
            replies = await broadcast(target, "whole_http", call, timeout_s=timeout_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets a status and a sentence
            raise HttpError(failure_of(error, call.path)) from None
        answers: dict[bytes, str] = {}
        for reply in replies:
            name = reply.replica_id or "that did not say its name"
            status, content = reply.value if reply.ok else (502, str(reply.error).encode())
            if status >= 400:
                return _failure(status, f"replica {name}: {content.decode(errors='replace')}")
            answers.setdefault(content, name)
        if len(answers) > 1:
            differ = "; ".join(f"replica {name}: {content.decode()}" for content, name in answers.items())
            return _failure(409, f"the replicas differ: {differ}")
        return Response(next(iter(answers)), media_type="application/json")

    for method, path in ROUTES:
        app.add_route(path, ask_all, methods=[method])


def _failure(status: int, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)
