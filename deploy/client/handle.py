"""Provides the client for other Serve applications on the same cluster, over Serve's DeploymentHandle."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import grpc.aio
from google.protobuf.message_factory import GetMessageClass
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from outrider.deploy.client.async_client import AsyncMethods
from outrider.deploy.client.requests import Call
from outrider.v1.handle_calls import RPCS, CallFailed

_FAILURES = (
    (TimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED, "timeout_s has passed"),
    (BackPressureError, grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full; retry later"),
    ((TaskCancelledError, RequestCancelledError), grpc.StatusCode.CANCELLED, "the call was cancelled"),
    ((RayServeException, RayError), grpc.StatusCode.UNAVAILABLE, "the ingress is not available; retry"),
    (Exception, grpc.StatusCode.INTERNAL, "the call failed; the ingress' log says why"),
)


class OutriderHandle(AsyncMethods):
    """Calls a running Outrider application, with the methods, options and answers of AsyncOutriderClient.

    handle: ``serve.get_app_handle(NAME)``. Can be pickled, so it may be an argument of a deployment's constructor.
    """

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    def _send(self, call: Call[Any]) -> Any:
        return _Sent(self._handle, call)

    def _fail(self, error: Any, call: Call[Any]) -> Any:
        while isinstance(error, RayTaskError):
            error = error.cause or ValueError(str(error))
        if isinstance(error, CallFailed):
            return call.fail(next(code for code in grpc.StatusCode if code.value[0] == error.code), error.details)
        code, message = next((code, message) for kind, code, message in _FAILURES if isinstance(error, kind))
        return call.fail(code, f"{message} ({call.rpc}: {type(error).__name__}: {error})")


class _Sent:
    """Makes one call through Serve's handle, with the interface of grpc.aio's calls."""

    def __init__(self, handle: DeploymentHandle, call: Call[Any]) -> None:
        rpc = RPCS[call.rpc]
        self._streams, self._ended = rpc.server_streaming, False
        self._parse: Any = GetMessageClass(rpc.output_type).FromString
        method = handle.handle_stream.options(stream=True) if self._streams else handle.handle_unary
        self._response = method.remote(call.rpc, call.request.SerializeToString())
        self._ends_s = None if call.timeout_s is None else asyncio.get_running_loop().time() + call.timeout_s

    def __await__(self) -> Generator[Any, None, Any]:
        return self.read().__await__()

    async def read(self) -> Any:
        try:
            async with asyncio.timeout_at(self._ends_s):
                message = self._parse(await (anext(self._response) if self._streams else self._response))
        except StopAsyncIteration:
            self._ended = True
            return grpc.aio.EOF
        except BaseException:
            self.cancel()
            raise
        self._ended = not self._streams
        return message

    def cancel(self) -> None:
        if not self._ended:
            self._ended = True
            self._response.cancel()
