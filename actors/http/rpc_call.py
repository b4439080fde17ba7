"""An RPC of the ingress called over HTTP: its checks and its errors, told the way HTTP tells them."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from google.rpc import error_details_pb2, status_pb2

from actors.http.errors import RETRY_AFTER_S, HttpFailure
from actors.ingress.call_failure import STATUS_DETAILS_METADATA

HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 408,
}
"""As google.rpc.Code maps them, but for a passed deadline, which is 408 on every route. Every other code is 500."""

_RETRY = frozenset({429, 503})


class RpcCall:
    """What an RPC method of the ingress takes as its gRPC context. Keeps what a response needs of it."""

    def __init__(self) -> None:
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._trailing_metadata: list[tuple[str, str | bytes]] = []

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode | None:
        return self._code

    def set_details(self, details: str) -> None:
        self._details = details

    def details(self) -> str:
        return self._details

    def set_trailing_metadata(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        self._trailing_metadata = list(metadata)

    def trailing_metadata(self) -> list[tuple[str, str | bytes]]:
        return self._trailing_metadata

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return []

    def peer(self) -> str:
        return "http"

    def failure(self) -> HttpFailure | None:
        """The error the RPC ended with; None: it set none."""
        if self._code is None or self._code is grpc.StatusCode.OK:
            return None
        status = HTTP_STATUS.get(self._code, 500)
        headers = {"Retry-After": str(RETRY_AFTER_S)} if status in _RETRY else {}
        return HttpFailure(status, self._details, self._field(), headers)

    def _field(self) -> str | None:
        """The request field at fault, from the google.rpc details beside the status."""
        packed = dict(self._trailing_metadata).get(STATUS_DETAILS_METADATA, b"")
        assert isinstance(packed, bytes)
        refusal = error_details_pb2.BadRequest()
        for detail in status_pb2.Status.FromString(packed).details:
            if detail.Unpack(refusal) and refusal.field_violations:
                return refusal.field_violations[0].field
        return None
