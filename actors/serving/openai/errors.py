"""Errors as OpenAI's clients read them: ``{"error": {"message", "type", "param", "code"}}``, in vLLM's words.

What goes wrong, and the sentence for it, is outrider.actors.serving.failures' to say, for every API alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import grpc
from starlette.responses import JSONResponse

from outrider.actors.openai_calls import Endpoint
from outrider.actors.replica_calls import RequestError
from outrider.actors.serving import failures
from outrider.actors.serving.access.guard import Refused
from outrider.actors.serving.failures import RETRY_AFTER_S, CallFailure, cause_of

DONE = "data: [DONE]\n\n"
"""The event that ends a stream."""

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
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

HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 408,
}
"""As google.rpc.Code maps them, but for a passed deadline: 408, which OpenAI's clients know; a gateway's 504 would
blame the server. Every other code is 500."""

_RETRIED = (429, 503)


@dataclass(frozen=True)
class HttpFailure:
    """How a request ends that is not answered. param: the request field at fault."""

    status: int
    message: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_code(
        cls, code: grpc.StatusCode, message: str, param: str | None = None, retry_after_s: int = RETRY_AFTER_S
    ) -> HttpFailure:
        """code: of the same failure over gRPC."""
        status = HTTP_STATUS.get(code, 500)
        return cls(status, message, param, {"Retry-After": str(retry_after_s)} if status in _RETRIED else {})

    @classmethod
    def of_call(cls, failure: CallFailure) -> HttpFailure:
        return cls.of_code(failure.code, failure.message, next(iter(failure.fields), None), failure.retry_after_s)

    def body(self) -> dict[str, dict[str, str | int | None]]:
        kind = TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)

    def event(self) -> str:
        """For a stream that has begun: the event in place of the next one, and the end."""
        return f"data: {json.dumps(self.body())}\n\n{DONE}"

    def event_of(self, endpoint: Endpoint, number: int) -> str:
        """In that endpoint's stream, as its event of that number, from 0."""
        if endpoint != "responses":
            return self.event()
        # OpenAI's event for it, and beside its fields those by which clients tell an error in any stream.
        body = {"type": "error", "sequence_number": number, "message": self.message, "code": str(self.status)}
        return f"event: error\ndata: {json.dumps({**body, 'param': self.param, **self.body()})}\n\n"


class HttpError(Exception):
    """Refused for what HTTP says, rather than for a field."""

    def __init__(self, failure: HttpFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def refused(error: RequestError) -> HttpFailure:
    return HttpFailure(400, str(error), error.field)


def queue_full(*, for_the_key: bool) -> HttpFailure:
    return HttpFailure.of_call(failures.queue_full(for_the_key=for_the_key))


def refused_by_key(refused: Refused, headers: dict[str, str]) -> JSONResponse:
    """headers: as the refusal has them."""
    failure = HttpFailure.of_call(refused.failure())
    return replace(failure, headers={**failure.headers, **headers}).response()


def timed_out(request_id: str) -> HttpFailure:
    return HttpFailure.of_call(failures.deadline_passed(f"request {request_id}"))


def failed_inside(request_id: str) -> HttpFailure:
    """For what has been logged."""
    return HttpFailure.of_call(failures.failed_inside(f"request {request_id}"))


def failure_of(error: BaseException, request_id: str) -> HttpFailure:
    """What the client is told. Logs what it is not told."""
    cause = cause_of(error)
    if isinstance(cause, HttpError):
        return cause.failure
    return HttpFailure.of_call(failures.failure_of(error, f"request {request_id}"))
