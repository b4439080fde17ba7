"""The front door: a Serve deployment that speaks ``outrider.v1.GenerationService`` to clients and to target replicas
through their handle.

It checks, translates and forwards, one message a round, and holds no policy about tokens. Every error leaves with a
status code and one sentence; what the sentence leaves out is in the log, under the request id.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
from google.protobuf import json_format
from ray.exceptions import NodeDiedError, RayActorError, RayTaskError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from actors.generation import GenerationRequest, RequestError, RoundOutput, SamplingFailed
from actors.request_validation import GenerationMessage, ServedModel, to_generation_request
from actors.responses import Answers, stream_message
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc

logger = logging.getLogger("ray.serve.outrider.ingress")

REQUEST_ID_METADATA = "outrider-request-id"
"""Trailing metadata of a generation call. Plain ``request_id`` is taken: Serve puts an id of its own there."""

STATUS_TIMEOUT_S = 5.0
"""A replica that is starting or stuck must not make a status call hang."""

_UNAVAILABLE = (
    RayActorError,
    NodeDiedError,
    WorkerCrashedError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    ConnectionError,
)


class Ingress:
    """Serve calls the method named like the RPC. The target handle must offer

    - ``generate(GenerationRequest)``: streams RoundOutput, each answer's last one with finish_reason. Raises
      RequestError for a request it refuses, TimeoutError when its deadline passed, SamplingFailed when no next token
      can be chosen, ConnectionError when its engine is gone.
    - ``status()``: GetServerStatusResponse as a nested dict with the proto's field names; model may be left out.
    """

    def __init__(
        self,
        target: DeploymentHandle,
        served_model_name: str,
        num_speculative_tokens: int,
        vocab_size: int | None = None,
    ) -> None:
        """num_speculative_tokens: K, 0 without a drafter. vocab_size None: the target checks token ids."""
        self._generate = target.generate.options(stream=True)
        self._status = target.status
        self._served = ServedModel(served_model_name, num_speculative_tokens, vocab_size)

    async def Generate(self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext) -> pb.GenerateResponse:
        request_id = _request_id(request)
        with _errors_become_status(grpc_context, f"request {request_id}"):
            checked = self._check(request, request_id)
            grpc_context.set_trailing_metadata([(REQUEST_ID_METADATA, request_id)])
            answers = Answers(request_id, checked.num_answers)
            async with aclosing(self._rounds(checked)) as rounds:
                async for output in rounds:
                    answers.add(output)
            return answers.response()

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        request_id = _request_id(request)
        with _errors_become_status(grpc_context, f"request {request_id}"):
            checked = self._check(request, request_id)
            grpc_context.set_trailing_metadata([(REQUEST_ID_METADATA, request_id)])
            async with aclosing(self._rounds(checked)) as rounds:
                async for output in rounds:
                    yield stream_message(request_id, output)

    async def GetServerStatus(
        self, request: pb.GetServerStatusRequest, grpc_context: RayServegRPCContext
    ) -> pb.GetServerStatusResponse:
        with _errors_become_status(grpc_context, "GetServerStatus"):
            call = self._status.remote()
            try:
                async with asyncio.timeout(STATUS_TIMEOUT_S):
                    status = await call
            except TimeoutError:
                call.cancel()
                raise ConnectionError(f"no target replica answered within {STATUS_TIMEOUT_S:g} s") from None
            response = json_format.ParseDict(status, pb.GetServerStatusResponse(), ignore_unknown_fields=False)
            response.model = self._served.name
            return response

    def _check(self, request: GenerationMessage, request_id: str) -> GenerationRequest:
        return to_generation_request(request, self._served, request_id=request_id, now_unix_s=time.time())

    async def _rounds(self, request: GenerationRequest) -> AsyncGenerator[RoundOutput, None]:
        """The target's outputs.

        However this ends early (client gone, deadline, error on our side), the target's generator is cancelled: that
        is what makes its engine abort the request. The deadline is watched here too, since a request may spend it
        waiting for a replica.
        """
        stream: DeploymentResponseGenerator[RoundOutput] = self._generate.remote(request)
        try:
            unfinished = set(range(request.num_answers))
            while True:
                async with asyncio.timeout(request.seconds_left()):
                    output = await anext(stream, None)
                if output is None:
                    break
                if output.index not in unfinished:
                    raise RuntimeError(f"the target sent a round of answer {output.index}, which is over or unknown")
                if output.finish_reason is not None:
                    unfinished.remove(output.index)
                yield output
            if unfinished:
                raise RuntimeError(f"the target's stream ended without a finish reason for answers {unfinished}")
        except BaseException:  # whatever ended it, nobody listens any more
            stream.cancel()
            raise


def add_generation_service(servicer: Any, server: Any) -> None:
    """Mount the service on Serve's gRPC proxy: what ``grpc_servicer_functions`` should name.

    The generated function would do, but for one thing. Serve passes a client's cancellation on only while the proxy
    waits for a message; one that arrives while the proxy writes a message is lost, and the engine goes on generating
    for nobody. So streams are read by a task of their own, which only ever waits for messages.
    """
    make_handler = server.service_handler_factory

    def make_cancellable_handler(**options: Any) -> Callable[..., Any]:
        handler = make_handler(**options)
        return _cancellable(handler) if inspect.isasyncgenfunction(handler) else handler

    server.service_handler_factory = make_cancellable_handler
    try:
        rpc.add_GenerationServiceServicer_to_server(servicer, server)
    finally:
        server.service_handler_factory = make_handler


def _cancellable(handler: Callable[..., AsyncGenerator[bytes, None]]) -> Callable[..., Coroutine[Any, Any, None]]:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> None:
        messages: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def read() -> None:
            try:
                async for message in handler(request, context):
                    messages.put_nowait(message)
            finally:
                messages.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            while (message := await messages.get()) is not None:
                await context.write(message)
            await reading
        finally:
            # The handler still uses the context on its way out, which crashes the process once the call is over.
            reading.cancel()
            await asyncio.wait([reading])

    return call


def _request_id(request: GenerationMessage) -> str:
    return request.request_id if request.HasField("request_id") else uuid.uuid4().hex


@contextmanager
def _errors_become_status(grpc_context: RayServegRPCContext, call: str) -> Iterator[None]:
    """Turn an exception into status code and details. Cancellation passes through untouched.

    call: what was asked, with its id, for messages and log lines.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the client gets a code and a sentence
        code, details = _status_of(error, call)
        grpc_context.set_code(code)
        grpc_context.set_details(details)
        # Serve needs an exception to end a stream with a code. A built-in one: the proxy, which unpickles it, need not
        # be able to import this package. No cause: the traceback would only be logged again.
        raise RuntimeError(f"{code.name}: {details}") from None


def _status_of(error: Exception, call: str) -> tuple[grpc.StatusCode, str]:
    """Status code and the sentence the client gets. Logs what the sentence leaves out."""
    cause: BaseException = error
    while isinstance(cause, RayTaskError) and cause.cause is not None:
        cause = cause.cause
    if isinstance(cause, RequestError):
        return grpc.StatusCode.INVALID_ARGUMENT, str(cause)
    if isinstance(cause, TimeoutError):
        return grpc.StatusCode.DEADLINE_EXCEEDED, f"{call} was aborted when its deadline passed"
    if isinstance(cause, BackPressureError):
        return grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full; retry later"
    if isinstance(cause, _UNAVAILABLE):
        logger.warning("%s: target replica unavailable: %s", call, cause)
        return grpc.StatusCode.UNAVAILABLE, f"{call}: the target replica is not available; retry"
    if isinstance(cause, SamplingFailed):
        logger.error("%s", cause)
        return grpc.StatusCode.INTERNAL, str(cause)
    logger.error("%s failed", call, exc_info=error)
    return grpc.StatusCode.INTERNAL, f"{call} failed inside the server; its log says why"
