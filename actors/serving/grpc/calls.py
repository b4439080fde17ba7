"""Surrounds every RPC at the ingress: errors become a status, calls are counted and traced.

RPCs come over gRPC from Serve's proxies, and in process: from the ingress' own HTTP routes and, through its
DeploymentHandle, from other Serve applications.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from ray.serve.grpc_util import RayServegRPCContext

from outrider.actors.observability.metrics import CANCELLED, IN_FLIGHT, REJECTIONS, REQUESTS
from outrider.actors.observability.tracing import rpc_span
from outrider.actors.serving.failures import errors_become_status
from outrider.v1.handle_calls import RPCS, CallFailed


@contextmanager
def handled_rpc(grpc_context: RayServegRPCContext, rpc: str, request_id: str | None = None) -> Iterator[dict[str, str]]:
    """Surrounds an RPC: errors become its status, its end is counted, and a request is traced. Yields trace headers.

    request_id: of a generation; None for other calls.
    """
    api = "grpc" if isinstance(grpc_context, RayServegRPCContext) else "in_process"
    code = CANCELLED
    try:
        with (
            IN_FLIGHT.labels(api).track_inprogress(),
            rpc_span(rpc, grpc_context, request_id) as trace_headers,
            errors_become_status(grpc_context, rpc if request_id is None else f"request {request_id}"),
        ):
            yield trace_headers
        code = grpc.StatusCode.OK.name
    except RuntimeError:
        code = (grpc_context.code() or grpc.StatusCode.INTERNAL).name
        raise
    finally:
        REQUESTS.labels(api, rpc, code).inc()
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED.name:
            REJECTIONS.labels("queue_full").inc()


class InProcessCall:
    """Is the gRPC context of an RPC without a connection."""

    def __init__(self, owner: int = 0) -> None:
        """Starts without a code. owner: number of the caller; 0: not known."""
        self.owner = owner
        self._code: grpc.StatusCode | None = None
        self._details = ""

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode | None:
        return self._code

    def set_details(self, details: str) -> None:
        self._details = details

    def details(self) -> str:
        return self._details

    def set_trailing_metadata(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Drops the metadata, which nobody reads in process."""

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return []


class HandleCalls:
    """Answers other Serve applications, which call the ingress through its DeploymentHandle.

    The ingress derives from it, and has a method named like each RPC. Messages are serialised, so that both sides agree
    on them by their field numbers, as over gRPC.
    """

    async def handle_unary(self, rpc: str, request: bytes) -> bytes:
        """Returns the serialised response. Raises CallFailed."""
        context = InProcessCall()
        try:
            response = await getattr(self, rpc)(_parsed(rpc, request), context)
        except Exception as error:  # noqa: BLE001 - raised again, as what the caller is to know
            raise _failed(error, context) from None
        return bytes(response.SerializeToString())

    async def handle_stream(self, rpc: str, request: bytes) -> AsyncGenerator[bytes, None]:
        """Yields the serialised responses, as they come. Raises CallFailed."""
        context = InProcessCall()
        try:
            async with aclosing(getattr(self, rpc)(_parsed(rpc, request), context)) as responses:
                async for response in responses:
                    yield response.SerializeToString()
        except Exception as error:  # noqa: BLE001 - raised again, as what the caller is to know
            raise _failed(error, context) from None


def _parsed(rpc: str, request: bytes) -> Any:
    return GetMessageClass(RPCS[rpc].input_type).FromString(request)


def _failed(error: Exception, context: InProcessCall) -> Exception:
    if (code := context.code()) is None:
        return error
    return CallFailed(code.value[0], context.details())
