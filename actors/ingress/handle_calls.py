"""The RPCs of the API for other Serve applications, which call the ingress through its DeploymentHandle.

They run through the very methods that gRPC calls, with a context that has no connection behind it, so checks, errors
and details are the same. Messages travel serialised: both sides then agree on them by their numbers, as over gRPC.
``deploy.handle.OutriderHandle`` is the other side.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from ray.serve.grpc_util import RayServegRPCContext

from outrider.v1 import generation_pb2 as pb

RPCS = {
    rpc.name: rpc
    for service in (
        pb.DESCRIPTOR.services_by_name["GenerationService"],
        health_pb2.DESCRIPTOR.services_by_name["Health"],
    )
    for rpc in service.methods
}
"""Everything that can be called, by name."""


class CallFailed(Exception):
    """A call through a handle that failed: what gRPC would have sent at its end.

    code: number of the gRPC status. trailing: metadata.
    """

    def __init__(self, code: int, details: str, trailing: tuple[tuple[str, str | bytes], ...]) -> None:
        super().__init__(code, details, trailing)
        self.code, self.details, self.trailing = code, details, trailing

    def __str__(self) -> str:
        return f"status {self.code}: {self.details}"


class HandleCalls:
    """A base of the ingress deployment, which has the methods named like the RPCs."""

    async def handle_unary(self, rpc: str, request: bytes) -> bytes:
        """The serialised response. Raises CallFailed."""
        context = _context()
        try:
            response = await getattr(self, rpc)(_parsed(rpc, request), context)
        except Exception as error:  # noqa: BLE001 - raised again, as what the caller is to know
            raise _failed(error, context) from None
        return bytes(response.SerializeToString())

    async def handle_stream(self, rpc: str, request: bytes) -> AsyncGenerator[bytes, None]:
        """The serialised responses, as they come. Raises CallFailed."""
        context = _context()
        try:
            async with aclosing(getattr(self, rpc)(_parsed(rpc, request), context)) as responses:
                async for response in responses:
                    yield response.SerializeToString()
        except Exception as error:  # noqa: BLE001 - raised again, as what the caller is to know
            raise _failed(error, context) from None


def _parsed(rpc: str, request: bytes) -> Any:
    return GetMessageClass(RPCS[rpc].input_type).FromString(request)


def _failed(error: Exception, context: RayServegRPCContext) -> Exception:
    """error itself when the method has not said what the caller is to know."""
    code = context.code()
    if code is None:
        return error
    return CallFailed(code.value[0], context.details() or "", tuple(context.trailing_metadata()))


def _context() -> RayServegRPCContext:
    return RayServegRPCContext(_NoConnection())


class _NoConnection:
    """What a context copies from a gRPC connection, when there is none."""

    def auth_context(self) -> dict[str, Any]:
        return {}

    def code(self) -> grpc.StatusCode | None:
        return None

    def details(self) -> str | None:
        return None

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return []

    def peer(self) -> str:
        return "handle"

    def peer_identities(self) -> None:
        return None

    def peer_identity_key(self) -> None:
        return None

    def trailing_metadata(self) -> list[tuple[str, str]]:
        return []
