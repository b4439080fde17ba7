"""How the ingress is called: over gRPC, from Serve's proxies, and without a connection, by its own routes of HTTP and,
through its DeploymentHandle, by other Serve applications. Checks, errors and details are the same."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from ray.serve.grpc_util import RayServegRPCContext

from outrider.actors.observability.metrics import CANCELLED, METRICS
from outrider.actors.observability.tracing import RequestSpan, rpc_span
from outrider.actors.serving.access.calls import let_in
from outrider.actors.serving.connections import Address
from outrider.actors.serving.failures import errors_become_status
from outrider.actors.serving.gate import REFUSED
from outrider.actors.serving.ways_out import COMES_THROUGH, PROXY
from outrider.v1.handle_calls import RPCS, CallFailed


@contextmanager
def answering(grpc_context: RayServegRPCContext, rpc: str, request_id: str | None = None) -> Iterator[RequestSpan]:
    """Around an RPC: it needs a key where keys are asked for, errors become its status, how it ended is counted, and a
    request's is traced."""
    over_grpc = isinstance(grpc_context, RayServegRPCContext)
    with ExitStack() as keyed:
        if over_grpc:
            _heed_proxy(grpc_context)
            with errors_become_status(grpc_context, rpc):
                keyed.enter_context(let_in(grpc_context, rpc))
        with _counted("grpc" if over_grpc else "in_process", grpc_context, rpc, request_id) as span:
            yield span


def _heed_proxy(grpc_context: RayServegRPCContext) -> None:
    """What the proxy which the call came through tells of itself: what it has refused, and which one it is."""
    for key, value in grpc_context.invocation_metadata():
        if key == REFUSED and str(value).isdecimal():
            METRICS.refused_generations("proxy", int(value))
        elif key == PROXY:
            COMES_THROUGH.set(str(value))


@contextmanager
def _counted(api: str, grpc_context: RayServegRPCContext, rpc: str, request_id: str | None) -> Iterator[RequestSpan]:
    code = CANCELLED
    try:
        with (
            METRICS.in_flight(api),
            rpc_span(rpc, grpc_context, request_id) as span,
            errors_become_status(grpc_context, rpc if request_id is None else f"request {request_id}", request_id),
        ):
            yield span
        code = grpc.StatusCode.OK.name
    except RuntimeError:
        code = (grpc_context.code() or grpc.StatusCode.INTERNAL).name
        raise
    finally:
        METRICS.ended(api, rpc, code)
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED.name:
            METRICS.rejected("queue_full")


class InProcessCall:
    """An RPC's gRPC context where no proxy of Serve's stands behind it. Keeps what the caller is told."""

    def __init__(self, peer: str = "handle") -> None:
        """peer: as gRPC names one, where it is an address."""
        self._peer = peer
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._trailing_metadata: list[tuple[str, str | bytes]] = []

    @classmethod
    def over_http(cls, address: Address | None = None) -> InProcessCall:
        """address: whose call it is."""
        if address is None:
            return cls("http")
        host, port = address
        return cls(f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}")

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
        return self._peer


class HandleCalls:
    """A base of the ingress deployment, which has the methods named like the RPCs: the API for other Serve
    applications, which call the ingress through its DeploymentHandle.

    They run through the very methods that gRPC calls, with a context that has no connection behind it, so checks,
    errors and details are the same. Messages travel serialised: both sides then agree on them by their numbers, as
    over gRPC. ``outrider.deploy.client.handle.OutriderHandle`` is the other side.
    """

    async def handle_unary(self, rpc: str, request: bytes) -> bytes:
        """The serialised response. Raises CallFailed."""
        context = InProcessCall()
        try:
            response = await getattr(self, rpc)(_parsed(rpc, request), context)
        except Exception as error:  # noqa: BLE001 - raised again, as what the caller is to know
            raise _failed(error, context) from None
        return bytes(response.SerializeToString())

    async def handle_stream(self, rpc: str, request: bytes) -> AsyncGenerator[bytes, None]:
        """The serialised responses, as they come. Raises CallFailed."""
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
    """error itself when the method has not said what the caller is to know."""
    if (code := context.code()) is None:
        return error
    return CallFailed(code.value[0], context.details(), tuple(context.trailing_metadata()))
