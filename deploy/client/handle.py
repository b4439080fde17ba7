"""Outrider for other Serve applications on the same cluster: methods, options and answers of AsyncOutriderClient, by
Serve's own way between deployments.

    @serve.deployment
    class Summariser:
        def __init__(self) -> None:
            self._outrider = OutriderHandle.get()

        async def __call__(self, request: Request) -> str:
            return (await self._outrider.generate(f"In short: {request.query_params['text']}", max_tokens=64)).text
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from ray import serve
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from outrider.deploy.client import calls
from outrider.deploy.client.async_client import AsyncCompletionStream, AsyncMethods, Response
from outrider.deploy.client.attempts import Attempts, Balancer, RetryPolicy
from outrider.deploy.client.calls import CONTROL_TIMEOUT_S, Call
from outrider.deploy.client.error import OutriderError, error_of_status
from outrider.v1 import generation_pb2 as pb
from outrider.v1.handle_calls import RPCS, CallFailed

__all__ = ["AsyncCompletionStream", "OutriderError", "OutriderHandle"]

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class OutriderHandle(AsyncMethods):
    """Handle of a running Outrider application. Serve chooses the replica; requests are checked as gRPC's are.

    handle: of the application's ingress deployment, as ``serve.get_app_handle`` gives it. retries: as those of
    OutriderClient. Can be pickled, so it may be an argument of a deployment's constructor.
    """

    def __init__(self, handle: DeploymentHandle, *, retries: int = 0) -> None:
        self._handle, self._policy = handle, RetryPolicy(retries)

    @classmethod
    def get(cls, app_name: str = "outrider", *, retries: int = 0) -> OutriderHandle:
        """By the name of the application (``serving.app_name``). Waits for Serve's controller, so call it where
        waiting is no harm, such as in a constructor.

        Raises OutriderError (NOT_FOUND) when no such application runs.
        """
        try:
            return cls(serve.get_app_handle(app_name), retries=retries)
        except RayServeException as error:
            raise OutriderError(
                grpc.StatusCode.NOT_FOUND, f"no application {app_name!r} runs on this cluster; deploy it first: {error}"
            ) from None

    async def healthy(self, *, timeout_s: float | None = CONTROL_TIMEOUT_S) -> bool:
        """Whether requests can be sent now: what grpc.health.v1 says over gRPC. False when nobody says it in time."""
        try:
            return calls.serves(await self._unary(calls.health(timeout_s)))
        except OutriderError as error:
            if calls.means_not_serving(error):
                return False
            raise

    async def _unary(self, call: Call[Response]) -> Response:
        attempts = self._attempts(call)
        while True:
            _, left_s = attempts.begin()
            response = self._handle.handle_unary.remote(call.rpc, call.request.SerializeToString())
            try:
                async with asyncio.timeout(left_s):
                    serialised = await response
            except Exception as error:  # noqa: BLE001 - whatever it is, callers handle one kind of error
                response.cancel()
                failure = _failure(error, call)
                delay_s = attempts.failed(failure, None)
                if delay_s is None:
                    raise failure from None
                await asyncio.sleep(delay_s)
            except BaseException:
                response.cancel()
                raise
            else:
                response_type: Any = GetMessageClass(RPCS[call.rpc].output_type)
                return response_type.FromString(serialised)

    def _rounds(self, call: Call[pb.GenerateStreamResponse]) -> AsyncCompletionStream:
        return _Rounds(self, call)

    def _attempts(self, call: Call[Any]) -> Attempts:
        return Attempts(call, self._policy, Balancer(1))


class _Rounds(AsyncCompletionStream):
    def __init__(self, handle: OutriderHandle, call: Call[pb.GenerateStreamResponse]) -> None:
        self._stream_method = handle._handle.handle_stream.options(stream=True)
        self._attempts, self._pending = handle._attempts(call), call
        self._closed = False
        self._settled = False  # output has been seen: there is no other attempt
        self._open()

    async def __anext__(self) -> pb.GenerateStreamResponse:
        while True:
            if self._closed:
                raise StopAsyncIteration
            try:
                async with asyncio.timeout(self._left_s()):
                    serialised = await anext(self._responses)
            except StopAsyncIteration:
                self._closed = True
                raise
            except Exception as error:  # noqa: BLE001 - as above
                if self._closed:
                    raise StopAsyncIteration from None
                self._responses.cancel()
                failure = _failure(error, self._pending)
                delay_s = self._attempts.failed(failure, None, final=self._settled)
                if delay_s is None:
                    self._closed = True
                    raise failure from None
                await asyncio.sleep(delay_s)
                if not self._closed:
                    self._open()
            except BaseException:
                await self.aclose()
                raise
            else:
                self._settled = True
                return pb.GenerateStreamResponse.FromString(serialised)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._responses.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_responses") and not self._closed:
            self._responses.cancel()

    def _open(self) -> None:
        _, left_s = self._attempts.begin()
        self._ends_s = None if left_s is None else time.monotonic() + left_s
        self._responses = self._stream_method.remote(self._pending.rpc, self._pending.request.SerializeToString())

    def _left_s(self) -> float | None:
        return None if self._ends_s is None else self._ends_s - time.monotonic()


def _failure(error: Exception, call: Call[Any]) -> OutriderError:
    """The error of the API for one that came out of a handle."""
    cause: BaseException = error
    while isinstance(cause, RayTaskError) and cause.cause is not None:
        cause = cause.cause
    if isinstance(cause, CallFailed):
        return error_of_status(_CODES[cause.code], cause.details, cause.trailing, call.request_id)
    code, message = _of_the_way(cause, call)
    return OutriderError(code, message, request_id=call.request_id)


def _of_the_way(cause: BaseException, call: Call[Any]) -> tuple[grpc.StatusCode, str]:
    """For what happened before or beside the ingress, which has said nothing."""
    if isinstance(cause, TimeoutError):
        return grpc.StatusCode.DEADLINE_EXCEEDED, f"{call.rpc} took longer than its timeout_s"
    if isinstance(cause, BackPressureError):
        return grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full; retry later"
    if isinstance(cause, TaskCancelledError | RequestCancelledError):
        return grpc.StatusCode.CANCELLED, "the call was cancelled"
    if isinstance(cause, RayServeException | RayError) and not isinstance(cause, RayTaskError):
        return grpc.StatusCode.UNAVAILABLE, f"the ingress is not available; retry: {cause}"
    return grpc.StatusCode.INTERNAL, f"{call.rpc} failed: {type(cause).__name__}: {cause}"
