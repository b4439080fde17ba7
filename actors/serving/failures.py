"""Converts exceptions to the end of a call: a gRPC status and a sentence, or an HTTP status and OpenAI's error type.

The log gets what the client is not told: the request's id, the exception's type and where it was raised, but nothing
that a client sent.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from ray import exceptions as ray_errors
from ray.exceptions import RayError, RayTaskError
from ray.serve import exceptions as serve_errors
from ray.serve.grpc_util import RayServegRPCContext

from outrider.actors.replica_calls import ReplicaLost, RequestError, RequestIdInUse, SamplingFailed

_SERVE_LOG = "ray.serve"
logger = logging.getLogger(f"{_SERVE_LOG}.outrider.serving")

REQUEST_ID_METADATA = "outrider-request-id"
"""Trailing metadata of a generation call. Plain ``request_id`` is taken: Serve puts an id of its own there."""

REPLICA_LOST = (
    ray_errors.RayActorError,
    ray_errors.NodeDiedError,
    ray_errors.WorkerCrashedError,
    ray_errors.OutOfMemoryError,
    ray_errors.LocalRayletDiedError,
    serve_errors.ReplicaUnavailableError,
    ReplicaLost,
)
"""Raised by a call whose replica is gone, or cannot serve any more. Another one may take the request."""

_HTTP = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "BadRequestError"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "AuthenticationError"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "PermissionDeniedError"),
    grpc.StatusCode.NOT_FOUND: (404, "NotFoundError"),
    # 408, which OpenAI's clients know; 504 would blame the server.
    grpc.StatusCode.DEADLINE_EXCEEDED: (408, "RequestTimeoutError"),
    grpc.StatusCode.ALREADY_EXISTS: (409, "ConflictError"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "RateLimitError"),
    grpc.StatusCode.CANCELLED: (499, "RequestCancelledError"),
    grpc.StatusCode.UNIMPLEMENTED: (501, "NotImplementedError"),
    grpc.StatusCode.UNAVAILABLE: (503, "ServiceUnavailableError"),
}
"""HTTP status and OpenAI error type by gRPC code; every other code is 500."""


class Refused(Exception):
    """Ends a call with this code and sentence."""

    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(code, sentence)
        self.code, self.sentence = code, sentence

    def __str__(self) -> str:
        return self.sentence


_UNAVAILABLE = "{call}: the target replica is not available; retry"
_INSIDE = " failed inside the server; its log says why"
_FAILED_INSIDE = "{call}" + _INSIDE

_TABLE: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], grpc.StatusCode, str | None], ...] = (
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT, None),
    (RequestIdInUse, grpc.StatusCode.ALREADY_EXISTS, None),
    (SamplingFailed, grpc.StatusCode.INTERNAL, None),
    (TimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED, "{call} was aborted when its deadline passed"),
    (serve_errors.BackPressureError, grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full; retry later"),
    ((*REPLICA_LOST, serve_errors.DeploymentUnavailableError), grpc.StatusCode.UNAVAILABLE, _UNAVAILABLE),
    ((ConnectionError, MemoryError), grpc.StatusCode.UNAVAILABLE, _UNAVAILABLE),
    (RayTaskError, grpc.StatusCode.INTERNAL, _FAILED_INSIDE),  # an exception of ours that could not be unpickled
    (RayError, grpc.StatusCode.UNAVAILABLE, _UNAVAILABLE),  # what Ray says of the cluster
    (BaseException, grpc.StatusCode.INTERNAL, _FAILED_INSIDE),
)
"""The first row that fits: exceptions, code, and the sentence; None: the exception's own."""

_CLIENTS_OWN = (serve_errors.gRPCStatusError, RequestError, RequestIdInUse, Refused, TimeoutError)


@dataclass(frozen=True)
class Failure:
    """Holds how a call ends. message: one sentence for the client. field: the request's field at fault."""

    code: grpc.StatusCode
    message: str
    field: str | None = None

    @property
    def http_status(self) -> int:
        return _HTTP.get(self.code, (500, ""))[0]

    @property
    def http_headers(self) -> dict[str, str]:
        if self.http_status == 408:  # the rest of a body that came too slowly may still be on its way
            return {"Connection": "close"}
        return {"Retry-After": "1"} if self.http_status in (429, 503) else {}

    def body(self) -> dict[str, dict[str, str | int | None]]:
        """Returns OpenAI's shape of an error."""
        kind = _HTTP.get(self.code, (500, "InternalServerError"))[1]
        return {"error": {"message": self.message, "type": kind, "param": self.field, "code": self.http_status}}


class HttpError(Exception):
    """Ends an HTTP request with this failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.code)
        self.failure = failure


def failure_of(error: BaseException, call: str) -> Failure:
    """Returns what the client is told, and logs what it is not told. call: the kind of call with its id."""
    cause = cause_of(error)
    if isinstance(cause, HttpError):
        return cause.failure
    if isinstance(cause, Refused):
        return Failure(cause.code, cause.sentence)
    code, sentence = next((code, sentence) for kinds, code, sentence in _TABLE if isinstance(cause, kinds))
    if code is grpc.StatusCode.UNAVAILABLE:
        logger.warning("%s: target replica unavailable: %s", call, type(cause).__name__)
    elif code is grpc.StatusCode.INTERNAL:
        frames = "".join(traceback.format_tb(cause.__traceback__))
        logger.error("%s failed: %s\n%s", call, type(cause).__name__, frames)
    message = str(cause) if sentence is None else sentence.format(call=call)
    return Failure(code, message, cause.field if isinstance(cause, RequestError) else None)


@contextmanager
def errors_become_status(grpc_context: RayServegRPCContext, call: str) -> Iterator[None]:
    """Turns an exception into the call's status. Cancellation passes through untouched."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the client gets a code and a sentence
        failure = failure_of(error, call)
        grpc_context.set_code(failure.code)
        grpc_context.set_details(failure.message)
        # Serve needs an exception to end a stream with a code. A built-in one: the proxy, which unpickles it, need not
        # be able to import this package. Without the sentence, which may hold the client's own words: it is logged.
        raise RuntimeError(failure.code.name) from None


def is_message_of_serve(code: grpc.StatusCode | None, sentence: str) -> bool:
    """Returns whether the sentence is from Serve: Ray's about a lost process, with addresses and node ids."""
    return code is grpc.StatusCode.INTERNAL and not sentence.endswith((_INSIDE, SamplingFailed.WHY))


def cause_of(error: BaseException) -> BaseException:
    """Returns what was raised in the other actor, without what Ray wraps around it."""
    while isinstance(error, RayTaskError) and error.cause is not None:
        error = error.cause
    return error


def silence_refusal_logs() -> None:
    """Keeps Serve from logging a traceback for each request that its client is at fault for."""
    logging.getLogger(_SERVE_LOG).addFilter(_is_server_fault)


def silence_client_disconnect_logs() -> None:
    """Keeps asyncio from logging, in a proxy, a task that Serve leaves behind for each client that disconnects."""
    logging.getLogger("asyncio").addFilter(
        lambda record: not (record.exc_info and isinstance(record.exc_info[1], serve_errors.RequestCancelledError))
    )


def _is_server_fault(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    cause = None if error is None else cause_of(error)
    return not isinstance(cause, _CLIENTS_OWN) or isinstance(cause, ray_errors.GetTimeoutError)  # the latter: ours
