"""Errors as OpenAI's clients read them: ``{"error": {"message", "type", "param", "code"}}``, in vLLM's words."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field

from fastapi import FastAPI, Request
from ray.serve.exceptions import BackPressureError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from outrider.actors.replica_calls import RequestError, SamplingFailed
from outrider.actors.serving.grpc.failures import UNAVAILABLE, cause_of

logger = logging.getLogger("ray.serve.outrider.http")

RETRY_AFTER_S = 1
"""A full queue moves within a second or so; clients add backoff of their own."""

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


@dataclass(frozen=True)
class HttpFailure:
    """How a request ends that is not answered. param: the request field at fault."""

    status: int
    message: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, dict[str, str | int | None]]:
        kind = TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)

    def event(self) -> str:
        """For a stream that has begun: the event in place of the next one, and the end."""
        return f"data: {json.dumps(self.body())}\n\ndata: [DONE]\n\n"


class HttpError(Exception):
    """Refused for what HTTP says, rather than for a field."""

    def __init__(self, failure: HttpFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def refused(error: RequestError) -> HttpFailure:
    return HttpFailure(400, str(error), error.field)


def queue_full() -> HttpFailure:
    """Wherever it is found out."""
    return HttpFailure(429, "the queue is full; retry later", headers={"Retry-After": str(RETRY_AFTER_S)})


def timed_out(request_id: str) -> HttpFailure:
    """408, which OpenAI's clients know; a gateway's 504 would blame the server."""
    return HttpFailure(408, f"request {request_id} was aborted when its deadline passed")


def server_error(request_id: str) -> HttpFailure:
    return HttpFailure(500, f"request {request_id} failed inside the server; its log says why")


def failure_of(error: BaseException, request_id: str) -> HttpFailure:
    """What the client is told. Logs what it is not told."""
    cause = cause_of(error)
    if isinstance(cause, HttpError):
        return cause.failure
    if isinstance(cause, RequestError):
        return refused(cause)
    if isinstance(cause, TimeoutError):
        return timed_out(request_id)
    if isinstance(cause, BackPressureError):
        return queue_full()
    if isinstance(cause, UNAVAILABLE):
        logger.warning("request %s: target replica unavailable: %s", request_id, cause)
        message = f"request {request_id}: the target replica is not available; retry"
        return HttpFailure(503, message, headers={"Retry-After": str(RETRY_AFTER_S)})
    if isinstance(cause, SamplingFailed):
        logger.error("%s", cause)
        return HttpFailure(500, str(cause))
    logger.error("request %s failed", request_id, exc_info=error)
    return server_error(request_id)


def add_error_handlers(app: FastAPI) -> None:
    """OpenAI's shape for what routes raise and for paths and methods that do not exist."""

    async def of_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return HttpFailure(error.status_code, message, headers=dict(error.headers or {})).response()

    async def of_any(request: Request, error: Exception) -> JSONResponse:
        return failure_of(error, request.headers.get("x-request-id", "")).response()

    app.add_exception_handler(HTTPException, of_http)
    for kind in (RequestError, HttpError, Exception):
        app.add_exception_handler(kind, of_any)
