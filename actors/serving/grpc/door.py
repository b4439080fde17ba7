"""What happens to a gRPC call in Serve's proxy, before and behind the ingress.

Serve's own handlers would do, but for these things:

- Serve passes a client's cancellation on only while the proxy waits for a message; one that arrives while the proxy
  writes a message is lost, and the engine goes on generating for nobody. So streams are read by a task of their own,
  which only ever waits for messages.
- That task would pile up what a slow client does not read, and a client that reads nothing would hold its place for
  ever. Both are given up (see Unread). gRPC has no time limit for the response of a call that is not a stream; so every
  call is answered as a stream is, which is the same on the wire.
- A request that does not decode would end as UNKNOWN, with protobuf's own words; one that takes too much memory would
  be decoded to find that out.
- A client that ends its side without having sent a request would be left waiting for ever: gRPC's asyncio server
  forgets it. One that sends nothing and stays would hold its call for ever. So requests are read here, as if they were
  streams of one, and within a time.
- Failures lose their google.rpc details on the way (see outrider.actors.serving.failures).
- A full queue is told too late when many come at once, and calls beside generations have no limit of their own (see
  outrider.actors.serving.gate).

``outrider.actors.serve_seam.grpc_proxy`` mounts this on Serve's proxies; nothing here knows of Serve.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from outrider.actors.serving.access.guard import caller_at, key_of_caller
from outrider.actors.serving.connections import address_of_call, peer_of_call, sentence
from outrider.actors.serving.failures import (
    STATUS_DETAILS_METADATA,
    CallFailure,
    made_by_serve,
    queue_full,
    sentence_of,
    trailing_of,
    usable_request_id,
)
from outrider.actors.serving.gate import (
    CAPACITY_METADATA,
    REFUSED,
    Arrival,
    Doors,
    Gate,
    Gates,
    Guest,
    NotAwaited,
    RequestLate,
    doors,
)
from outrider.actors.serving.grpc.wire import SMALL_BYTES, num_values
from outrider.actors.serving.lanes import Lane, LaneFull
from outrider.actors.serving.ways_out import PROXY, this_process

SHARE_OF_MOST = 4
"""So many times max_unread_bytes are never kept of one answer, the largest message not counted."""

SLOWEST_BYTES = 1 << 20
"""A larger message has unread_timeout_s once more for each so many bytes."""

STANDSTILL_S = 1.0
"""A message that has not left for so long waits for its reader rather than for the network."""

_SERVICE = "/outrider.v1.GenerationService/"
_GENERATIONS = (f"{_SERVICE}Generate", f"{_SERVICE}GenerateStream")
"""Calls that take a place. The others have turns of their own, and are to be answered when the queue is full too."""

FEW_BYTES = 1 << 12
"""Of a message that says next to nothing, decompressed."""


@dataclass(frozen=True)
class _Turns:
    """For calls beside generations. most_bytes: of their message, decompressed; None: as much as a generation's. What
    waits for its turn is kept, and fields that nobody knows are kept with it."""

    lane: Callable[[Doors], Lane]
    most_bytes: int | None = FEW_BYTES


_STATUS = _Turns(lambda doors: doors.status)
_TURNS = {
    "/grpc.health.v1.Health/Watch": _Turns(lambda doors: doors.watch),
    "/grpc.health.v1.Health/Check": _Turns(lambda doors: doors.health),
    "/grpc.health.v1.Health/List": _Turns(lambda doors: doors.health),
    f"{_SERVICE}Tokenize": _Turns(lambda doors: doors.tokenize, None),
    f"{_SERVICE}Detokenize": _Turns(lambda doors: doors.tokenize, None),
    f"{_SERVICE}AbortRequest": _Turns(lambda doors: doors.abort, SMALL_BYTES),
}
"""Of the others; whatever is not named is a call for status."""

_APPLICATION_METADATA = "application"
"""By which a client tells Serve which application it means, where there are several."""

_GATES = Gates("grpc")

_CODES = {code.value[0]: code for code in grpc.StatusCode}

Handler = Callable[..., Any]
"""Serve's, of one method: takes the request (as a Request) and the context. Returns a coroutine of bytes, or a
generator of them."""

ProxiedCall = Callable[[AsyncIterator[Any], Any], Coroutine[Any, Any, None]]
"""What the server calls: with the client's messages and the context. Responses are written to the context."""


def proxied_call(method: str, handler: Handler, *, streams: bool) -> ProxiedCall:
    """handler as the server should have it. method: ``/package.Service/Name``. streams: it gives several responses."""

    async def call(requests: AsyncIterator[Any], context: Any) -> None:
        metadata = dict(context.invocation_metadata() or ())  # all that is known of the call before its message is read
        here = doors()
        message = await received(requests, context, here)
        if isinstance(message, CallFailure):
            fail(context, message)
            return
        application = here.routes.by_name(str(metadata.get(_APPLICATION_METADATA, "")))
        gate = None if application is None else _GATES.of(application)
        request = Request(message)
        del message
        await aiter(requests).aclose()  # type: ignore[attr-defined]  # gRPC's generator keeps what it gave last
        place = await _place(method, gate, request, context, here)
        if isinstance(place, CallFailure):
            _GATES.count_refusal()
            fail(context, place)
            return
        told = _Told(context, _of_proxy(gate) if gate is not None and method in _GENERATIONS else {})
        try:
            await _Answer(handler, streams, told, here, place).give(request)
            for key, value in context.trailing_metadata() or ():
                if gate is not None and key == CAPACITY_METADATA:
                    gate.learn(value)
        finally:
            place.leave()

    return call


class Request:
    """A message that Serve pickles, once, and is then done with: it keeps what it was given for as long as the call is
    answered, which is this, and the message is gone."""

    def __init__(self, message: Any) -> None:
        self._message = message
        self.num_bytes: int = message.ByteSize()
        self.request_id: str = getattr(message, "request_id", "")

    def __reduce__(self) -> Any:
        """The message's own."""
        message, self._message = self._message, None
        return message.__reduce__()


def of_counted_connection(call: ProxiedCall) -> ProxiedCall:
    """call, but not for a connection that is one too many, which will be hung up on in a moment."""

    async def counted(requests: AsyncIterator[Any], context: Any) -> None:
        address, connections = address_of_call(context.peer()), doors().connections["grpc"]
        limit = connections.admit(address) if address is not None and connections.are_watched else None
        if limit is None:
            await call(requests, context)
        else:
            fail(context, CallFailure(grpc.StatusCode.UNAVAILABLE, sentence(limit), "TOO_MANY_CONNECTIONS"))

    return counted


def most_bytes_of(method: str) -> int | None:
    """Of its message, decompressed. None: limits.max_request_bytes."""
    return None if method in _GENERATIONS else _TURNS.get(method, _STATUS).most_bytes


def tolerant(deserialize: Callable[[bytes], Any], most_bytes: int | None) -> Callable[[bytes], Any]:
    """Like deserialize, but what cannot be used becomes the failure that its call is to end with. most_bytes: see
    most_bytes_of."""
    message = deserialize.__self__.DESCRIPTOR  # type: ignore[attr-defined]  # a class's FromString

    def decode(data: bytes) -> Any:
        limits = doors().limits
        if most_bytes is not None and len(data) > most_bytes:
            sentence = f"request: {len(data)} bytes are too many for a {message.full_name}; send at most {most_bytes}"
            return _refusal(sentence, "REQUEST_TOO_LARGE")
        if len(data) > limits.max_request_bytes:
            sentence = f"request: {len(data)} bytes are too many; send at most {limits.max_request_bytes}"
            return _refusal(f"{sentence} (limits.max_request_bytes)", "REQUEST_TOO_LARGE")
        most = limits.max_request_values
        if len(data) > SMALL_BYTES and num_values(data, message, most) > most:
            sentence = f"request: holds too many values; send at most {most} (limits.max_request_values)"
            return _refusal(sentence, "REQUEST_TOO_LARGE")
        try:
            return deserialize(data)
        except DecodeError:
            sentence = f"request: what was sent is no {message.full_name}; send one that the published .proto describes"
            return _refusal(sentence, "UNDECODABLE_REQUEST")

    return decode


def _refusal(sentence: str, reason: str) -> CallFailure:
    field, _, problem = sentence.partition(": ")
    return CallFailure(grpc.StatusCode.INVALID_ARGUMENT, sentence, reason, {field: problem})


async def received(requests: AsyncIterator[Any], context: Any, here: Doors) -> Any:
    """The message that a client sent; a CallFailure for one that cannot be used, or does not come."""
    reading = asyncio.ensure_future(anext(aiter(requests), None))
    try:
        await Arrival(here, _caller(context)).wait_for(reading)
    except RequestLate:
        timeout_s = here.limits.receive_timeout_s
        sentence = f"request: none came within {timeout_s:g} s; send it right after the call is opened"
        return CallFailure(grpc.StatusCode.DEADLINE_EXCEEDED, sentence, "REQUEST_TIMEOUT")
    except NotAwaited:
        sentence = "too many calls wait for their request to come; send it right after the call is opened"
        return CallFailure(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence, "REQUEST_TIMEOUT")
    if (request := reading.result()) is None:
        return _refusal("request: nothing was sent; send one message", "UNDECODABLE_REQUEST")
    return request


def _caller(context: Any) -> str:
    return caller_at(peer_of_call(context.peer()))


class _Told:
    """A call's context, with what the proxy tells the ingress beside its metadata, and without what is not its
    client's to send."""

    def __init__(self, context: Any, told: dict[str, str]) -> None:
        self._context, self._told = context, told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def invocation_metadata(self) -> tuple[tuple[str, Any], ...]:
        given = (each for each in self._context.invocation_metadata() or () if _is_clients(*each))
        return (*given, *self._told.items())


_OF_PROXY = (REFUSED, PROXY)
"""Metadata that is the proxy's alone to send."""

_STEERING = ("multiplexed_model_id", "session_id")
"""Metadata by which Serve is told which replicas to prefer."""

_SERVES_REQUEST_ID = "request_id"
"""By which Serve's log names a call."""


def _is_clients(key: str, value: str | bytes) -> bool:
    return key not in (*_OF_PROXY, *_STEERING) and (key != _SERVES_REQUEST_ID or usable_request_id(str(value)) == value)


def _of_proxy(gate: Gate) -> dict[str, str]:
    refused, process = gate.untold(), this_process()
    return {**({REFUSED: str(refused)} if refused else {}), **({PROXY: process} if process else {})}


class _Place:
    """What a call holds while it is answered: room for a generation, or the turn of any other call."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave: Callable[[], None] | None = leave

    def leave(self) -> None:
        """May be called again."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


async def _place(method: str, gate: Gate | None, request: Request, context: Any, here: Doors) -> _Place | CallFailure:
    """gate: of its application. Without one there is nothing to generate, and Serve says so."""
    if method in _GENERATIONS and gate is not None:
        key = key_of_caller()
        if not gate.enter(key):
            return queue_full(for_the_key=not gate.is_full)
        return _Place(lambda: gate.leave(key))
    lane, peer = _TURNS.get(method, _STATUS).lane(here), peer_of_call(context.peer())
    try:
        await lane.take(peer, request.num_bytes)
    except LaneFull as full:
        return too_many_calls(full)
    return _Place(lambda: lane.leave(peer))


def too_many_calls(full: LaneFull) -> CallFailure:
    return CallFailure(grpc.StatusCode.RESOURCE_EXHAUSTED, str(full), "TOO_MANY_CALLS")


class _Answer:
    """What Serve's handler answers, on its way to the client."""

    def __init__(self, handler: Handler, streams: bool, context: Any, here: Doors, place: _Place) -> None:
        self._handler, self._streams, self._context, self._place = handler, streams, context, place
        self._here = here
        self._unread = Unread(self._give_up, here, _caller(context))
        self._reading: asyncio.Task[None] | None = None

    async def give(self, request: Request) -> None:
        self._reading = asyncio.create_task(self._read(request))
        try:
            while (message := await self._unread.get()) is not None:
                with self._unread.leaving(message):
                    # Of a reader that has been given up gRPC keeps one message, until that is read or the reader has
                    # left. There is no way to take it back, nor to say anything before; nothing else is held for it.
                    await self._context.write(message)
            await asyncio.wait([self._reading])
            if not self._unread.given_up:
                self._reading.result()
            _finish(self._context, request.request_id)
        finally:
            self._unread.stop_watching()
            # The handler still uses the context on its way out, which crashes the process once the call is over.
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def _read(self, request: Request) -> None:
        try:
            if self._streams:
                async for message in self._handler(request, self._context):
                    self._unread.put(message)
            else:
                message = await self._handler(request, self._context)
                if not _code(self._context):
                    self._unread.put(message)
        finally:
            self._unread.close()
            self._place.leave()  # what is left to do is its reader's

    def _give_up(self) -> None:
        fail(self._context, _slow_reader(self._here))
        # Serve tells the replica when its handler is cancelled while it waits for the next message.
        assert self._reading is not None
        self._reading.cancel()


class Unread:
    """Messages of one call that its client has not read.

    The client is slow when one message has not left within unread_timeout_s; when, over max_unread_bytes, they do not
    become fewer within that; when they are over SHARE_OF_MOST times as many without the largest of them; and when all
    clients who stand still together leave too much unread, of whom it has most, and this has stood still for longest.
    One message's size is never held against the client.
    """

    def __init__(self, on_slow: Callable[[], None], here: Doors, caller: str) -> None:
        """on_slow: called once; nothing is kept from then on. caller: who should read, as for a Room."""
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._on_slow, self._room, self._limits, self._caller = on_slow, here.unread, here.limits, caller
        self._sizes: deque[int] = deque()
        self._bytes = 0
        self._most_bytes = 0
        """At a time, since the backlog was last judged."""

        self._judging: asyncio.TimerHandle | None = None
        self._standing: asyncio.TimerHandle | None = None
        self._guest: Guest | None = None
        self._closed = False
        self.given_up = False

    def put(self, message: bytes) -> None:
        if self.given_up:
            return
        most = SHARE_OF_MOST * self._limits.max_unread_bytes
        if self._bytes > most and self._bytes - max(self._sizes) > most:
            self._give_up()
            return
        self._bytes += len(message)
        self._sizes.append(len(message))
        self._most_bytes = max(self._most_bytes, self._bytes)
        self._messages.put_nowait(message)
        if self._bytes > self._limits.max_unread_bytes and self._judging is None:
            self._watch()
        if self._guest is not None:
            self._room.holds(self._guest, self._bytes)

    @contextmanager
    def leaving(self, message: bytes) -> Iterator[None]:
        """Around the writing of a message."""
        loop = asyncio.get_running_loop()
        self._standing = loop.call_later(STANDSTILL_S, self._stands_still, len(message))
        try:
            yield
        finally:
            self._standing.cancel()
            self._leave_room()

    def _stands_still(self, num_bytes: int) -> None:
        timeout_s = self._limits.unread_timeout_s * (1 + num_bytes / SLOWEST_BYTES)
        left_s = max(0.0, timeout_s - STANDSTILL_S)
        self._standing = asyncio.get_running_loop().call_later(left_s, self._give_up)
        self._guest = self._room.enter(self._caller, self._give_up)
        self._room.holds(self._guest, self._bytes + num_bytes)

    def _leave_room(self) -> None:
        if self._guest is not None:
            self._room.leave(self._guest)
            self._guest = None

    def stop_watching(self) -> None:
        for timer in (self._judging, self._standing):
            if timer is not None:
                timer.cancel()
        self._leave_room()

    def _watch(self) -> None:
        self._most_bytes = self._bytes
        self._judging = asyncio.get_running_loop().call_later(self._limits.unread_timeout_s, self._judge)

    def _judge(self) -> None:
        self._judging = None
        if self._bytes <= self._limits.max_unread_bytes:
            return
        if self._bytes < self._most_bytes:
            self._watch()
        else:
            self._give_up()

    def _give_up(self) -> None:
        if self.given_up:
            return
        self.given_up = True
        self._leave_room()
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


def _slow_reader(here: Doors) -> CallFailure:
    limits = here.limits
    sentence = (
        f"the answer is not read: more than {limits.max_unread_bytes} bytes wait (limits.max_unread_bytes), or nothing "
        f"was read for {limits.unread_timeout_s:g} s (limits.unread_timeout_s); read faster, or ask for less with each "
        "token"
    )
    return CallFailure(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence, "SLOW_READER")


def fail(context: grpc.aio.ServicerContext, failure: CallFailure, given: Sequence[Any] = ()) -> None:
    """given: trailing metadata to keep."""
    context.set_code(failure.code)
    context.set_details(failure.message)
    _trail(context, given, failure.trailing_metadata())


def _trail(
    context: grpc.aio.ServicerContext, given: Sequence[Any], trailing: Sequence[tuple[str, str | bytes]]
) -> None:
    """Trailing metadata: what is given, but for what trailing says anew."""
    named = {key for key, _ in trailing}
    context.set_trailing_metadata((*((key, value) for key, value in given if key not in named), *trailing))


def _finish(context: grpc.aio.ServicerContext, request_id: str = "") -> None:
    """Give a call that Serve or the ingress let fail the details it should have. request_id: its sender's, if any."""
    code = _code(context)
    if code is None:
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
        fail(context, failure, given)
        return
    context.set_details(sentence_of(details))
    _trail(context, given, trailing_of(code, details))


def _code(context: Any) -> grpc.StatusCode | None:
    """None when it has not failed."""
    code = context.code()
    code = _CODES.get(code) if isinstance(code, int) else code
    return None if code is grpc.StatusCode.OK else code
