"""How a call fails: OutriderError, and how it is read from what a server sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

STATUS_DETAILS = "grpc-status-details-bin"
"""Trailing metadata with a serialised google.rpc.Status: gRPC's own name for it."""

REQUEST_ID = "outrider-request-id"
"""Trailing metadata with the id of a generation request, as sent or as chosen by the server."""

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True)
class FieldViolation:
    """One field of a request that the server refused: its name in the public API, and what is wrong with it."""

    field: str
    description: str


class OutriderError(Exception):
    """A call that failed: with what status, and why.

    field_violations: the fields at fault, when the code is INVALID_ARGUMENT. retry_after_s: when the server says to
    try again; None when it does not say. request_id: to look for in the server's log; None when none was given out.
    reason: the server's stable name for what went wrong, in capitals; None when it gives none.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        field_violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
        request_id: str | None = None,
        reason: str | None = None,
    ) -> None:
        # All of them, so that the error survives pickling.
        super().__init__(code, message, field_violations, retry_after_s, request_id, reason)
        self.code, self.message = code, message
        self.field_violations, self.retry_after_s = field_violations, retry_after_s
        self.request_id, self.reason = request_id, reason

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


def invalid(field: str, problem: str) -> OutriderError:
    """The error the server would answer with, for what cannot even be sent."""
    return OutriderError(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {problem}", (FieldViolation(field, problem),))


def error_of_status(
    code: grpc.StatusCode, message: str | None, metadata: Metadata | None, request_id: str | None = None
) -> OutriderError:
    """From how a call ended. Details that do not decode are left out: the code and the message stand on their own.

    metadata: the trailing one. request_id: as the client sent it, None when the server chooses.
    """
    trailing: dict[str, str | bytes] = dict(metadata or ())
    named = trailing.get(REQUEST_ID)
    violations: list[FieldViolation] = []
    retry_after_s = reason = None
    for detail in _details(trailing.get(STATUS_DETAILS)):
        if isinstance(detail, error_details_pb2.BadRequest):
            violations += [FieldViolation(each.field, each.description) for each in detail.field_violations]
        elif isinstance(detail, error_details_pb2.RetryInfo):
            retry_after_s = detail.retry_delay.seconds + detail.retry_delay.nanos / 1e9
        elif isinstance(detail, error_details_pb2.ErrorInfo):
            reason = detail.reason or None
    return OutriderError(
        code,
        message or "no details",
        tuple(violations),
        retry_after_s,
        named if isinstance(named, str) else request_id,
        reason,
    )


class Failed(Exception):
    """One attempt that failed, with what the server sent at its end."""

    def __init__(self, error: Any, request_id: str | None) -> None:
        """error: gRPC's, of either kind of client."""
        self.trailing = error.trailing_metadata()
        self.failure = error_of_status(error.code(), error.details(), self.trailing, request_id)
        super().__init__(self.failure)


def closed() -> OutriderError:
    return OutriderError(grpc.StatusCode.CANCELLED, "the client was closed")


def _details(status: str | bytes | None) -> list[Any]:
    if not isinstance(status, bytes):
        return []
    found: list[Any] = []
    try:
        packed = status_pb2.Status.FromString(status).details
        for any_message in packed:
            for kind in (error_details_pb2.BadRequest, error_details_pb2.RetryInfo, error_details_pb2.ErrorInfo):
                detail = kind()
                if any_message.Unpack(detail):
                    found.append(detail)
    except DecodeError:
        return []
    return found
