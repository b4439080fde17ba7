"""Mounts what Outrider serves over gRPC on Serve's proxies: what ``grpc_servicer_functions`` should name.

The generated functions would do, but for six things, all of them in the proxy, before or behind the ingress:

- Serve passes a client's cancellation on only while the proxy waits for a message; one that arrives while the proxy
  writes a message is lost, and the engine goes on generating for nobody. So streams are read by a task of their own,
  which only ever waits for messages.
- That task would pile up what a slow client does not read. It gives such a client up (see _Unread).
- A request that does not decode would end as UNKNOWN, with protobuf's own words. One that is larger than
  MAX_REQUEST_BYTES would go all the way to be refused there.
- A client that ends its side without having sent a request would be left waiting for ever: gRPC's asyncio server
  forgets it. So requests are read here, as if they were streams of one.
- Failures lose their google.rpc details on the way (see outrider.actors.serving.failures).
- A full queue is told too late when many come at once (see outrider.actors.serving.gate).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2_grpc
from ray.serve._private.proxy_request_response import gRPCStreamingType

from outrider.actors.serve_seam import leans_on
from outrider.actors.serving.failures import (
    STATUS_DETAILS_METADATA,
    CallFailure,
    made_by_serve,
    queue_full,
    sentence_of,
    trailing_of,
    usable_request_id,
)
from outrider.actors.serving.gate import CAPACITY_METADATA, Gates
from outrider.v1 import generation_pb2_grpc

MAX_UNREAD_BYTES = 8 << 20
"""Of one call: thousands of rounds. More may wait for a moment, as long as it becomes less. The engine is never held up
by whoever reads its answers."""

MOST_UNREAD_BYTES = 4 * MAX_UNREAD_BYTES
"""No message is kept beyond these, the largest one not counted."""

PATIENCE_S = 10.0
"""In which a reader with more than MAX_UNREAD_BYTES before it must have caught up by something."""

MAX_REQUEST_BYTES = 32 << 20
"""Millions of token ids. Serve's own limit is 2 GiB."""

GATED = tuple(f"/outrider.v1.GenerationService/{name}" for name in ("Generate", "GenerateStream"))
"""Calls that take a place. The others are short, and to be answered when the queue is full too."""

_APPLICATION_METADATA = "application"
"""By which a client tells Serve which application it means, where there are several."""

_GATES = Gates("grpc")

_CODES = {code.value[0]: code for code in grpc.StatusCode}


def add_services(servicer: Any, server: Any) -> None:
    """GenerationService and grpc.health.v1.Health on one of Serve's gRPC servers."""
    leans_on.GRPC_PROXY.check()
    mount = _Mount(server)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, mount)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, mount)


class _Mount:
    """What the generated functions see in place of the server."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Done below: the same handlers come a second time, by name."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        tolerant = {
            name: handler._replace(request_streaming=True, request_deserializer=_tolerant(handler.request_deserializer))
            for name, handler in handlers.items()
        }
        make_handler = self._server.service_handler_factory

        def make_wrapped(service_method: str, streaming_type: gRPCStreamingType) -> Callable[..., Any]:
            call: Callable[..., Coroutine[Any, Any, Any]]
            if streaming_type in (gRPCStreamingType.UNARY_STREAM, gRPCStreamingType.STREAM_STREAM):
                call = _stream(make_handler(service_method, gRPCStreamingType.UNARY_STREAM))
            else:
                call = _unary(make_handler(service_method, gRPCStreamingType.UNARY_UNARY))
            return _gated(call, takes_a_place=service_method in GATED)

        self._server.service_handler_factory = make_wrapped
        try:
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, tolerant),))
            self._server.add_registered_method_handlers(service, tolerant)
        finally:
            self._server.service_handler_factory = make_handler


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Like deserialize, but what cannot be used becomes the failure that its call is to end with."""
    message_name: str = deserialize.__self__.DESCRIPTOR.full_name  # type: ignore[attr-defined]  # a class's FromString

    def decode(data: bytes) -> Any:
        if len(data) > MAX_REQUEST_BYTES:
            sentence = f"request: {len(data)} bytes are too many; send at most {MAX_REQUEST_BYTES}"
            return _refusal(sentence, "REQUEST_TOO_LARGE")
        try:
            return deserialize(data)
        except DecodeError:
            sentence = f"request: what was sent is no {message_name}; send one that the published .proto describes"
            return _refusal(sentence, "UNDECODABLE_REQUEST")

    return decode


def _refusal(sentence: str, reason: str) -> CallFailure:
    field, _, problem = sentence.partition(": ")
    return CallFailure(grpc.StatusCode.INVALID_ARGUMENT, sentence, reason, {field: problem})


async def _only(requests: AsyncIterator[Any]) -> Any:
    """The request that a client sent; a CallFailure for one that cannot be used, or is not there."""
    async for request in requests:
        return request
    return _refusal("request: nothing was sent; send one message", "UNDECODABLE_REQUEST")


def _gated(call: Callable[..., Coroutine[Any, Any, Any]], *, takes_a_place: bool) -> Callable[..., Any]:
    """Reads the request, and refuses a call that there is no room for. What is let through teaches how much room there
    is. A client that has not sent its request yet takes no place."""

    async def gated(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
        request = await _only(requests)
        if isinstance(request, CallFailure):
            _fail(context, request)
            return b""
        asked = dict(context.invocation_metadata() or ())
        gate = _GATES.of(str(asked.get(_APPLICATION_METADATA, "")))
        if takes_a_place and not gate.enter():
            _GATES.count_refusal()
            _fail(context, queue_full())
            return b""
        try:
            return await call(request, context)
        finally:
            if takes_a_place:
                gate.leave()
            for key, value in context.trailing_metadata() or ():
                if key == CAPACITY_METADATA:
                    gate.learn(value)

    return gated


def _unary(handler: Callable[..., Coroutine[Any, Any, bytes]]) -> Callable[..., Coroutine[Any, Any, bytes]]:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> bytes:
        response = await handler(request, context)
        _finish(context, getattr(request, "request_id", ""))
        return response

    return call


def _stream(handler: Callable[..., AsyncGenerator[bytes, None]]) -> Callable[..., Coroutine[Any, Any, None]]:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> None:
        def give_up() -> None:
            _fail(context, _slow_reader())
            # Serve tells the replica when its handler is cancelled while it waits for the next message.
            reading.cancel()

        unread = _Unread(give_up)

        async def read() -> None:
            try:
                async for message in handler(request, context):
                    unread.put(message)
            finally:
                unread.close()

        reading = asyncio.create_task(read())
        try:
            while (message := await unread.get()) is not None:
                await context.write(message)
            await asyncio.wait([reading])
            if not unread.given_up:
                reading.result()
            _finish(context, getattr(request, "request_id", ""))
        finally:
            unread.stop_watching()
            # The handler still uses the context on its way out, which crashes the process once the call is over.
            reading.cancel()
            await asyncio.wait([reading])

    return call


class _Unread:
    """Messages of one call that its client has not read.

    The client is slow when, over MAX_UNREAD_BYTES, they do not become fewer within PATIENCE_S, or when they
    are over MOST_UNREAD_BYTES without the largest of them. One message's size is never held against the client.
    """

    def __init__(self, on_slow: Callable[[], None]) -> None:
        """on_slow: called once; nothing is kept from then on."""
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._on_slow = on_slow
        self._sizes: deque[int] = deque()
        self._bytes = 0
        self._most_bytes = 0
        """At a time, since the backlog was last judged."""

        self._judging: asyncio.TimerHandle | None = None
        self._closed = False
        self.given_up = False

    def put(self, message: bytes) -> None:
        if self.given_up:
            return
        if self._bytes > MOST_UNREAD_BYTES and self._bytes - max(self._sizes) > MOST_UNREAD_BYTES:
            self._give_up()
            return
        self._bytes += len(message)
        self._sizes.append(len(message))
        self._most_bytes = max(self._most_bytes, self._bytes)
        self._messages.put_nowait(message)
        if self._bytes > MAX_UNREAD_BYTES and self._judging is None:
            self._watch()

    def stop_watching(self) -> None:
        if self._judging is not None:
            self._judging.cancel()

    def _watch(self) -> None:
        self._most_bytes = self._bytes
        self._judging = asyncio.get_running_loop().call_later(PATIENCE_S, self._judge)

    def _judge(self) -> None:
        self._judging = None
        if self._bytes <= MAX_UNREAD_BYTES:
            return
        if self._bytes < self._most_bytes:
            self._watch()
        else:
            self._give_up()

    def _give_up(self) -> None:
        self.given_up = True
        while not self._messages.empty():
            self._messages.get_nowait()
        self._sizes.clear()
        self._bytes = 0
        if self._closed:
            self._messages.put_nowait(None)
        self._on_slow()

    def close(self) -> None:
        """There will be no more."""
        self._closed = True
        self._messages.put_nowait(None)

    async def get(self) -> bytes | None:
        """None at the end."""
        message = await self._messages.get()
        if message is not None:
            self._bytes -= self._sizes.popleft()
        return message


def _slow_reader() -> CallFailure:
    sentence = (
        f"over {MAX_UNREAD_BYTES >> 20} MiB of the answer wait to be read and do not become fewer; "
        "read faster, or ask for less with each token"
    )
    return CallFailure(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence, "SLOW_READER")


def _fail(context: grpc.aio.ServicerContext, failure: CallFailure, given: Sequence[Any] = ()) -> None:
    trailing = failure.trailing_metadata()
    named = {key for key, _ in trailing}
    context.set_code(failure.code)
    context.set_details(failure.message)
    context.set_trailing_metadata((*((key, value) for key, value in given if key not in named), *trailing))


def _finish(context: grpc.aio.ServicerContext, request_id: str = "") -> None:
    """Give a call that Serve or the ingress let fail the details it should have. request_id: its sender's, if any."""
    code = context.code()
    code = _CODES.get(code) if isinstance(code, int) else code
    if code is None or code is grpc.StatusCode.OK:
        return
    details = context.details() or ""
    details = details.decode() if isinstance(details, bytes) else details
    given = context.trailing_metadata() or ()
    if any(key == STATUS_DETAILS_METADATA for key, _ in given):
        # Serve sends the ingress's context along with each message, as it is when the message leaves. A call that
        # fails right behind a message has its metadata kept after all, and its details packed all the same.
        context.set_details(sentence_of(details))
        return
    if (failure := made_by_serve(code, details, usable_request_id(request_id))) is not None:
        _fail(context, failure, given)
        return
    trailing = trailing_of(code, details)
    named = {key for key, _ in trailing}
    kept = [(key, value) for key, value in given if key not in named]
    context.set_details(sentence_of(details))
    context.set_trailing_metadata((*kept, *trailing))
