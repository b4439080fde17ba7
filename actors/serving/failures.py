"""From what goes wrong behind the ingress to how the call fails: a status code, a sentence, and google.rpc details for
programs. HTTP derives its own from that (outrider.actors.serving.openai.errors). What clients are not told is logged.

Serve forgets the trailing metadata of a gRPC call that fails and keeps its details text alone. So the text takes the
rest along, behind a separator, up to Serve's proxy, where ``outrider.actors.serving.grpc.door`` takes it apart.
"""

from __future__ import annotations

import base64
import binascii
import logging
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from ray.exceptions import (
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
    gRPCStatusError,
)
from ray.serve.grpc_util import RayServegRPCContext

from outrider.actors.replica_calls import ReplicaLost, RequestError, RequestIdInUse, SamplingFailed
from outrider.actors.request_checks import check_request_id

_SERVES_LOG = "ray.serve"
logger = logging.getLogger(f"{_SERVES_LOG}.outrider.serving")

STATUS_DETAILS_METADATA = "grpc-status-details-bin"
"""Trailing metadata with a serialised google.rpc.Status: gRPC's own name for it."""

REQUEST_ID_METADATA = "outrider-request-id"
"""Trailing metadata of a generation call. Plain ``request_id`` is taken: Serve puts an id of its own there."""

ERROR_DOMAIN = "outrider.v1"
RETRY_AFTER_S = 1

_SEPARATOR = "\x1e"
_MOST_TEXT = 1024
"""Serve cuts the details at 4096 characters; what follows the separator is about 400."""

_REASONS = {
    grpc.StatusCode.INVALID_ARGUMENT: "INVALID_REQUEST",
    grpc.StatusCode.NOT_FOUND: "NOT_FOUND",
    grpc.StatusCode.DEADLINE_EXCEEDED: "DEADLINE_EXCEEDED",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "QUEUE_FULL",
    grpc.StatusCode.UNAVAILABLE: "REPLICA_UNAVAILABLE",
    grpc.StatusCode.CANCELLED: "CANCELLED",
}
_RETRIED = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)

REPLICA_LOST = (
    RayActorError,
    NodeDiedError,
    WorkerCrashedError,
    OutOfMemoryError,
    LocalRayletDiedError,
    ReplicaUnavailableError,
    ReplicaLost,
)
"""Raised by a call whose replica is gone, or cannot serve any more. Another one may take the request."""

_TOLD = (gRPCStatusError, RequestError, RequestIdInUse, TimeoutError)
"""gRPCStatusError: what Serve makes of a call of the ingress's that has its status."""

_UNAVAILABLE = (*REPLICA_LOST, DeploymentUnavailableError, ConnectionError, MemoryError)


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
        over_grpc = isinstance(grpc_context, RayServegRPCContext)
        grpc_context.set_details(failure.packed() if over_grpc else failure.message)
        grpc_context.set_trailing_metadata(failure.trailing_metadata())
        # Serve needs an exception to end a stream with a code. A built-in one: the proxy, which unpickles it, need not
        # be able to import this package. No cause: the traceback would only be logged again.
        raise RuntimeError(f"{failure.code.name}: {failure.message}") from None


def leave_out_what_is_told() -> None:
    """Serve's log of a replica, and of a proxy, has a traceback of some forty lines for each request that fails, be it
    the request's own fault: what its client is told, and a line of ours says, is left out."""
    logging.getLogger(_SERVES_LOG).addFilter(_is_news)


def leave_out_who_left() -> None:
    """Of a proxy's log: Serve leaves a task behind for each client that leaves, and asyncio logs that nobody asked what
    became of it."""
    logging.getLogger("asyncio").addFilter(_is_of_this_process)


def _is_news(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    cause = None if error is None else cause_of(error)
    return not isinstance(cause, _TOLD) or isinstance(cause, GetTimeoutError)  # the latter: our own, of Ray


def _is_of_this_process(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], RequestCancelledError))


def failure_of(error: BaseException, call: str, request_id: str | None = None) -> CallFailure:
    """Logs what the failure leaves out."""
    cause = cause_of(error)
    code = grpc.StatusCode
    if isinstance(cause, Refusal):
        return cause.failure()
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
        return deadline_passed(call, request_id)
    if isinstance(cause, BackPressureError):
        return queue_full(request_id)
    # What Ray itself has to say (no memory, no disk, an object or its owner lost) is about the cluster, in words that
    # name nodes and addresses; a RayTaskError that has no cause here is an exception of our own.
    if isinstance(cause, _UNAVAILABLE) or (isinstance(cause, RayError) and not isinstance(cause, RayTaskError)):
        logger.warning("%s: target replica unavailable: %s", call, cause)
        sentence = f"{call}: the target replica is not available; retry"
        return CallFailure(code.UNAVAILABLE, sentence, "REPLICA_UNAVAILABLE", request_id=request_id)
    if isinstance(cause, SamplingFailed):
        logger.error("%s", cause)
        return CallFailure(code.INTERNAL, str(cause), "SAMPLING_FAILED", request_id=request_id)
    logger.error("%s failed", call, exc_info=error)
    return failed_inside(call, request_id)


class Refusal(Exception):
    """Raised by who knows itself how the call is to end, and has logged it."""

    def failure(self) -> CallFailure:
        raise NotImplementedError


class UnknownService(Exception):
    """Whose health was asked for."""

    def __str__(self) -> str:
        return f"service: {self.args[0]!r} is not served here; leave it out to ask for the server as a whole"


def cause_of(error: BaseException) -> BaseException:
    """What was raised in the other actor, without what Ray wraps around it."""
    while isinstance(error, RayTaskError) and error.cause is not None:
        error = error.cause
    return error


@dataclass(frozen=True)
class CallFailure:
    """message: one sentence. reason: what programs may go by, in capitals; it does not change between releases.
    fields: what is wrong with each field of the request that is at fault. retry_after_s: of a code that may be tried
    again."""

    code: grpc.StatusCode
    message: str
    reason: str
    fields: Mapping[str, str] = field(default_factory=dict)
    request_id: str | None = None
    retry_after_s: int = RETRY_AFTER_S

    @classmethod
    def of_code(cls, code: grpc.StatusCode, message: str) -> CallFailure:
        """One that Serve made."""
        return cls(code, message, _REASONS.get(code, "INTERNAL"))

    def status(self) -> status_pb2.Status:
        """Always with ErrorInfo; with BadRequest or RetryInfo where they help."""
        metadata = {} if self.request_id is None else {"request_id": self.request_id}
        details: list[Message] = [
            error_details_pb2.ErrorInfo(reason=self.reason, domain=ERROR_DOMAIN, metadata=metadata)
        ]
        if self.fields:
            violations = [
                error_details_pb2.BadRequest.FieldViolation(field=name, description=_cut(problem))
                for name, problem in self.fields.items()
            ]
            details.append(error_details_pb2.BadRequest(field_violations=violations))
        if self.code in _RETRIED:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.seconds = self.retry_after_s
            details.append(retry)
        packed = []
        for detail in details:
            packed.append(any_pb2.Any())
            packed[-1].Pack(detail)
        return status_pb2.Status(code=self.code.value[0], message=_cut(self.message), details=packed)

    def trailing_metadata(self) -> list[tuple[str, str | bytes]]:
        trailing: list[tuple[str, str | bytes]] = [(STATUS_DETAILS_METADATA, self.status().SerializeToString())]
        return trailing if self.request_id is None else [(REQUEST_ID_METADATA, self.request_id), *trailing]

    def packed(self) -> str:
        """Everything, as the text that Serve passes on."""
        status = self.status()
        status.ClearField("message")  # it is in front
        return _cut(self.message) + _SEPARATOR + base64.b64encode(status.SerializeToString()).decode()


def queue_full(request_id: str | None = None, *, for_the_key: bool = False) -> CallFailure:
    """Wherever it is found out. for_the_key: there is room, but not for more of this key's."""
    sentence = "the queue is full; retry later"
    if for_the_key:
        sentence = "the queue has no room for more requests of this key; retry when one of them has ended"
    return CallFailure(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence, "QUEUE_FULL", request_id=request_id)


def deadline_passed(call: str, request_id: str | None = None) -> CallFailure:
    sentence = f"{call} was aborted when its deadline passed"
    return CallFailure(grpc.StatusCode.DEADLINE_EXCEEDED, sentence, "DEADLINE_EXCEEDED", request_id=request_id)


def failed_inside(call: str, request_id: str | None = None) -> CallFailure:
    """For what has been logged."""
    sentence = f"{call} failed inside the server; its log says why"
    return CallFailure(grpc.StatusCode.INTERNAL, sentence, "INTERNAL", request_id=request_id)


def usable_request_id(sent: str) -> str:
    """sent, or one of our own where a client sent none, or one that can travel in no header."""
    try:
        check_request_id(sent)
    except RequestError:
        return uuid.uuid4().hex
    return sent


def made_by_serve(code: grpc.StatusCode, details: str, request_id: str) -> CallFailure | None:
    """What the client is told in place of Serve's own words, which are Ray's, with node ids and addresses, where a
    replica or an ingress was lost: those are logged. None for a failure that the ingress has packed, and for words
    about the request itself."""
    if _SEPARATOR in details:
        return None
    unavailable = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE)
    if code in unavailable:
        logger.warning("request %s: failed before or behind the ingress: %s", request_id, details)
        sentence = f"request {request_id}: the server lost what was answering it; retry"
        return CallFailure(grpc.StatusCode.UNAVAILABLE, sentence, "REPLICA_UNAVAILABLE", request_id=request_id)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return deadline_passed(f"request {request_id}", request_id)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return queue_full(request_id)
    return None


def sentence_of(details: str) -> str:
    """What a person is to read of a packed text, or of any other."""
    return details.partition(_SEPARATOR)[0]


def trailing_of(code: grpc.StatusCode, details: str) -> list[tuple[str, str | bytes]]:
    """Trailing metadata for a call that failed with this code and text, packed or not."""
    sentence, _, packed = details.partition(_SEPARATOR)
    try:
        status = status_pb2.Status.FromString(base64.b64decode(packed, validate=True))
    except (binascii.Error, DecodeError):
        status = status_pb2.Status()
    if not status.details:
        return CallFailure.of_code(code, sentence).trailing_metadata()
    status.message = sentence
    trailing: list[tuple[str, str | bytes]] = [(STATUS_DETAILS_METADATA, status.SerializeToString())]
    info = error_details_pb2.ErrorInfo()
    if status.details[0].Unpack(info) and (request_id := info.metadata.get("request_id")):
        trailing.insert(0, (REQUEST_ID_METADATA, request_id))
    return trailing


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 1] + "…"
