"""From what goes wrong behind the ingress to how the call fails. What the client is not told is logged."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from ray.exceptions import NodeDiedError, RayActorError, RayTaskError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.grpc_util import RayServegRPCContext

from actors.generation import RequestError, RequestIdInUse, SamplingFailed
from actors.ingress.call_failure import CallFailure, queue_full

logger = logging.getLogger("ray.serve.outrider.ingress")

IN_PROCESS_PEERS = ("handle", "http")
"""Peers of contexts that no proxy of Serve's stands behind."""

UNAVAILABLE = (
    RayActorError,
    NodeDiedError,
    WorkerCrashedError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    ConnectionError,
)


class UnknownService(Exception):
    """Whose health was asked for."""

    def __str__(self) -> str:
        return f"service: {self.args[0]!r} is not served here; leave it out to ask for the server as a whole"


@contextmanager
def errors_become_status(grpc_context: RayServegRPCContext, call: str, request_id: str | None = None) -> Iterator[None]:
    """Turn an exception into a status. Cancellation passes through untouched.

    call: what was asked, with its id, for messages and log lines.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the client gets a code and a sentence
        failure = failure_of(error, call, request_id)
        grpc_context.set_code(failure.code)
        over_grpc = isinstance(grpc_context, RayServegRPCContext) and grpc_context.peer() not in IN_PROCESS_PEERS
        grpc_context.set_details(failure.packed() if over_grpc else failure.message)
        grpc_context.set_trailing_metadata(failure.trailing_metadata())
        # Serve needs an exception to end a stream with a code. A built-in one: the proxy, which unpickles it, need not
        # be able to import this package. No cause: the traceback would only be logged again.
        raise RuntimeError(f"{failure.code.name}: {failure.message}") from None


def cause_of(error: BaseException) -> BaseException:
    """What was raised in the other actor, without what Ray wraps around it."""
    while isinstance(error, RayTaskError) and error.cause is not None:
        error = error.cause
    return error


def failure_of(error: Exception, call: str, request_id: str | None = None) -> CallFailure:
    """Logs what the failure leaves out."""
    cause = cause_of(error)
    code = grpc.StatusCode
    if isinstance(cause, RequestError):
        fields = {cause.field: f"{cause.problem}; {cause.fix}"}
        # What is not usable as an id cannot travel in metadata either: gRPC would make the call INTERNAL.
        named = None if cause.field == "request_id" else request_id
        return CallFailure(code.INVALID_ARGUMENT, str(cause), "INVALID_REQUEST", fields, named)
    if isinstance(cause, RequestIdInUse):
        return CallFailure(code.ALREADY_EXISTS, str(cause), "REQUEST_ID_IN_USE", request_id=request_id)
    if isinstance(cause, UnknownService):
        return CallFailure(code.NOT_FOUND, str(cause), "UNKNOWN_SERVICE")
    if isinstance(cause, TimeoutError):
        sentence = f"{call} was aborted when its deadline passed"
        return CallFailure(code.DEADLINE_EXCEEDED, sentence, "DEADLINE_EXCEEDED", request_id=request_id)
    if isinstance(cause, BackPressureError):
        return queue_full(request_id)
    if isinstance(cause, UNAVAILABLE):
        logger.warning("%s: target replica unavailable: %s", call, cause)
        sentence = f"{call}: the target replica is not available; retry"
        return CallFailure(code.UNAVAILABLE, sentence, "REPLICA_UNAVAILABLE", request_id=request_id)
    if isinstance(cause, SamplingFailed):
        logger.error("%s", cause)
        return CallFailure(code.INTERNAL, str(cause), "SAMPLING_FAILED", request_id=request_id)
    logger.error("%s failed", call, exc_info=error)
    sentence = f"{call} failed inside the server; its log says why"
    return CallFailure(code.INTERNAL, sentence, "INTERNAL", request_id=request_id)
