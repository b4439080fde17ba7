"""How a failed call is told: a status code, a sentence, and google.rpc details for programs. Pure.

Serve forgets the trailing metadata of a call that fails and keeps its details text alone. So the text takes the rest
along, behind a separator, up to Serve's proxy, where ``actors.ingress.grpc_services`` takes it apart again.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

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


@dataclass(frozen=True)
class CallFailure:
    """message: one sentence. reason: what programs may go by, in capitals; it does not change between releases.
    fields: what is wrong with each field of the request that is at fault."""

    code: grpc.StatusCode
    message: str
    reason: str
    fields: Mapping[str, str] = field(default_factory=dict)
    request_id: str | None = None

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
            retry.retry_delay.seconds = RETRY_AFTER_S
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


def queue_full(request_id: str | None = None) -> CallFailure:
    """Wherever it is found out."""
    sentence = "the queue is full; retry later"
    return CallFailure(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence, "QUEUE_FULL", request_id=request_id)


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
