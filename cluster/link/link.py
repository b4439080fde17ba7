"""A link: two threads and two queues around one transport, so that nobody else ever waits on the wire.

A frame that finds nothing before it is put on the wire by whoever posts it: a thread that has to be woken first would
take longer than all the rest of a hit. What may take time, until the peer has read it, is the send thread's; where the
wire has taken all of the frame at once, that thread sleeps on.

The one rule about failure: a link breaks once, for one reason, for good. From then on `broken` is that reason, `post`
and `ping` raise LinkBroken, and `poll` hands out what had arrived whole before the break and then None, at once.
`poll` never raises: whoever gets None from it looks at `broken`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from outrider.cluster.link.frame import Frame, FrameError, FrameKind, decode, encode, next_sequence

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_CLOSE_REASON_BYTES = 512

HANG = "drafter hangs"
"""How the reason of a link begins that was given up because its drafter lives but answers nothing."""

_JOIN_TIMEOUT_S = 5.0


class LinkError(RuntimeError):
    """A link could not be made or used. Costs speculation, never a request."""


class LinkBroken(LinkError):
    """The link has ended; only a new one, with a new epoch, can replace it."""


class TransportError(LinkError):
    """The wire failed. The transport is of no further use."""


class TransportClosed(TransportError):
    """The peer is gone, or this side aborted."""


class TransportTimeout(TransportError):
    """Nothing arrived, or nothing could be sent, in time."""


class Transport(Protocol):
    """A wire to one peer that moves frames, each as long as it is, in order.

    One thread may send while another receives. Buffers are C-contiguous int32; both ends agree on a capacity, which one
    to receive has, and none to send exceeds. After any TransportError, and after abort, every call raises a
    TransportError.
    """

    @property
    def backend(self) -> str:
        """Which wire: local, gloo, or one of backends.DEVICE_BACKENDS."""

    def start_send(self, buffer: np.ndarray) -> Callable[[], None] | None:
        """Begin to send a frame, or leave all of it to the function returned; never blocks. That function, which
        another thread may call, blocks until `buffer` may be reused; None says that it may be by now. Both raise
        TransportClosed, the function TransportTimeout too.
        """

    def recv(self, buffer: np.ndarray, timeout_s: float) -> None:
        """Block until the next frame is at the head of `buffer`, int32 [capacity words]. Words behind it are whatever
        they were, a longer frame before among it: the frame's own header says how long it is, and its checksum whether
        that came. Raises TransportClosed or TransportTimeout.
        """

    def abort(self) -> None:
        """Unblock both directions and free the wire. From any thread, any number of times; never raises."""


@dataclass(frozen=True, slots=True)
class Received(Generic[T]):
    """One DATA frame, decoded."""

    messages: T
    work_us: int
    """The sender's compute time. Of the frames of one `post` only the last carries it: sums are right."""

    sequence: int
    nbytes: int
    """Bytes in use, header and payload."""


@dataclass(frozen=True, slots=True)
class PingStats:
    """Round trips through both links' threads, microseconds."""

    min_us: float
    median_us: float
    max_us: float


@dataclass(slots=True)
class LinkCounters:
    """Frames of every kind; bytes in use (header and payload). What was sent is written by whoever sends it, one at a
    time; what was received by the receive thread."""

    frames_sent: int = 0
    bytes_sent: int = 0
    frames_received: int = 0
    bytes_received: int = 0
    data_frames_received: int = 0
    last_receive_monotonic_s: float | None = None


NO_WORDS = np.empty(0, dtype=np.int32)


class Outgoing(NamedTuple):
    """A frame to send. payload: int32 [words]."""

    kind: FrameKind
    payload: np.ndarray
    work_us: int = 0


HEARTBEAT = Outgoing(FrameKind.HEARTBEAT, NO_WORDS)


class Begun(NamedTuple):
    """A frame on its way. finish: blocks until the next one may begin, and raises what went wrong; None when it may by
    now. nbytes: without padding."""

    kind: FrameKind
    finish: Callable[[], None] | None
    nbytes: int


class Sending:
    """One frame at a time: the next begins when the last is finished. By one thread at a time."""

    def __init__(self, transport: Transport, epoch: int, capacity_words: int) -> None:
        self._transport, self._epoch = transport, epoch
        self._buffer = np.zeros(capacity_words, dtype=np.int32)
        self._sequence = 0

    def begin(self, frame: Outgoing) -> Begun:
        """Never blocks, never raises: who finishes the frame learns of what went wrong."""
        used = 0
        finish: Callable[[], None] | None
        try:
            used = encode(
                self._buffer,
                epoch=self._epoch,
                sequence=self._sequence,
                kind=frame.kind,
                payload=frame.payload,
                work_us=frame.work_us,
            )
            self._sequence = next_sequence(self._sequence)
            finish = self._transport.start_send(self._buffer[:used])
        except Exception as error:  # noqa: BLE001 - raised again by finish
            finish = _raising(error)
        return Begun(frame.kind, finish, 4 * used)


def _raising(error: Exception) -> Callable[[], None]:
    def finish() -> None:
        raise error

    return finish


class Link(Generic[T]):
    """One end of a link. Every method may be called from any thread; `poll` from one consumer at a time."""

    def __init__(
        self,
        transport: Transport,
        *,
        epoch: int,
        capacity_words: int,
        link_deadline_s: float,
        decode: Callable[[np.ndarray], T],
        name: str,
        on_broken: Callable[[str], None] | None = None,
        on_receive: Callable[[Received[T]], None] | None = None,
        max_queued_frames: int = 4096,
    ) -> None:
        """
        epoch: stamped on every frame sent, demanded of every frame received.
        capacity_words: length of a frame, header included; the peer's is the same.
        link_deadline_s: silence after which the link is broken. Heartbeats go out every quarter of it.
        decode: turns a payload, a view that it must not keep, into what `poll` hands out. A ValueError from it
            breaks the link.
        on_broken: called once with the reason, from the thread that noticed, unless this side closed or aborted.
        on_receive: takes every received frame instead of the inbox, on the receive thread: return quickly. Lets one
            consumer wait for many links on a queue of its own. Not called after close, or a join that says True, has
            returned.
        max_queued_frames: more than this many, unsent or (in the inbox) unread, break the link.
        """
        self.name = name
        self.epoch = epoch
        self.counters = LinkCounters()
        self._transport = transport
        self.capacity_words = capacity_words
        self._deadline_s = link_deadline_s
        self._decode_payload = decode
        self._on_broken = on_broken
        self._on_receive = on_receive
        self._max_queued_frames = max_queued_frames
        # None in a queue wakes whoever waits there: the link is broken.
        self._outgoing: queue.SimpleQueue[Outgoing | Begun | None] = queue.SimpleQueue()
        self._idle = False
        """Nothing is on its way or queued, and the send thread waits: whoever posts may send, under the lock."""

        self._sending = Sending(transport, epoch, capacity_words)
        self._inbox: queue.SimpleQueue[Received[T] | None] = queue.SimpleQueue()
        self._pongs: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._ping_lock = threading.Lock()
        self._pings = 0
        self._lock = threading.Lock()
        self._broken: str | None = None
        self._ending_here: str | None = None
        self._reaper: threading.Thread | None = None
        """Frees the wire and sees both threads out, once the link is broken."""

        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=f"{name}-{way}", daemon=True)
            for way, loop in (("send", self._send_loop), ("recv", self._recv_loop))
        ]

    def start(self) -> None:
        """Start both threads. The peer has one link deadline to say something."""
        for thread in self._threads:
            thread.start()

    @property
    def broken(self) -> str | None:
        """Why the link has ended, or None."""
        return self._broken

    def post(self, payloads: Sequence[np.ndarray], work_us: int = 0) -> None:
        """Queue one DATA frame a payload, int32 [words]; never blocks. The arrays must not change afterwards.

        Raises LinkBroken when the link has ended or is closing, or ends now because too much is queued.
        """
        last = len(payloads) - 1
        for index, payload in enumerate(payloads):
            self._enqueue(Outgoing(FrameKind.DATA, payload, work_us if index == last else 0))

    def poll(self, timeout_s: float = 0.0) -> Received[T] | None:
        """The next received frame, or None: nothing within `timeout_s` (0 never blocks), or the link has ended."""
        try:
            received = self._inbox.get(timeout_s > 0, timeout_s)
        except queue.Empty:
            return None
        if received is None:
            self._inbox.put(None)
        return received

    def ping(self, count: int = 16, timeout_s: float = 5.0) -> PingStats:
        """Time `count` round trips, one after the other.

        Raises LinkBroken when the link ends, LinkError when they are not all back within `timeout_s`.
        """
        round_trips_us = []
        deadline = time.monotonic() + timeout_s
        with self._ping_lock:
            for _ in range(count):
                self._pings += 1
                start_ns = time.perf_counter_ns()
                self._enqueue(Outgoing(FrameKind.PING, np.array([self._pings], dtype=np.int32)))
                self._await_pong(self._pings, deadline, timeout_s)
                round_trips_us.append((time.perf_counter_ns() - start_ns) / 1000)
        return PingStats(min(round_trips_us), statistics.median(round_trips_us), max(round_trips_us))

    def close(self, reason: str, timeout_s: float = 1.0) -> None:
        """Send what is queued, tell the peer why, and end. Waits `timeout_s` at most for a peer that does not read, and
        then as join does."""
        sender = self._threads[0]
        if self._say_goodbye(reason) and sender.is_alive() and sender is not threading.current_thread():
            sender.join(timeout_s)
        self.abort(reason)
        self.join()

    def retire(self, reason: str) -> None:
        """As close, but returns at once: the rest happens on a thread of its own."""
        threading.Thread(target=self.close, args=(reason,), name=f"{self.name}-retire", daemon=True).start()

    def _say_goodbye(self, reason: str) -> bool:
        """Returns whether this is the first word of an end."""
        encoded = reason.encode()[:MAX_CLOSE_REASON_BYTES]
        words = np.frombuffer(encoded + b"\0" * (-len(encoded) % 4), dtype=np.int32)
        with self._lock:
            first = self._broken is None and self._ending_here is None
            if first:
                self._ending_here = f"closed on this side: {reason}"
                self._idle = False
                self._outgoing.put(Outgoing(FrameKind.CLOSE, words))
        return first

    def abort(self, reason: str) -> None:
        """End without telling the peer. Returns at once, whatever the wire does; see join."""
        with self._lock:
            if self._ending_here is None:
                self._ending_here = f"aborted on this side: {reason}"
        self._break(reason)

    def join(self, timeout_s: float = 2 * _JOIN_TIMEOUT_S) -> bool:
        """Wait until a link that has ended has freed its wire and both its threads are gone. Returns whether that is
        so. Returns at once where it cannot be waited for: from the link's own callbacks, and before the end."""
        with self._lock:  # under which it is started
            reaper = self._reaper
        if reaper is None or threading.current_thread() in self._threads:
            return False
        reaper.join(timeout_s)
        return not any(thread.is_alive() for thread in (reaper, *self._threads))

    def _enqueue(self, item: Outgoing) -> None:
        if self._outgoing.qsize() >= self._max_queued_frames:
            self._break(f"send queue overflow: {self._max_queued_frames} frames unsent")
        # Under the lock, so that nothing is queued behind a CLOSE, where it would silently stay.
        with self._lock:
            if self._broken is None and self._ending_here is None:
                self._send_or_queue(item)
                return
        raise LinkBroken(f"link {self.name}: {self._broken or self._ending_here}")

    def _send_or_queue(self, item: Outgoing) -> None:
        """Under the lock."""
        if not self._idle:
            self._outgoing.put(item)
            return
        begun = self._sending.begin(item)
        if begun.finish is None:
            self._count(begun)
            return
        self._idle = False
        self._outgoing.put(begun)

    def _count(self, sent: Begun) -> None:
        self.counters.frames_sent += 1
        self.counters.bytes_sent += sent.nbytes

    def _await_pong(self, ping: int, deadline: float, timeout_s: float) -> None:
        while True:
            try:
                pong = self._pongs.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                raise LinkError(f"link {self.name}: no answer to a ping within {timeout_s:.1f} s") from None
            if pong is None:
                self._pongs.put(None)
                raise LinkBroken(f"link {self.name}: {self._broken}")
            if pong == ping:  # else the answer to an earlier ping that was given up
                return

    def _run(self, loop: Callable[[], None]) -> None:
        """A thread's end is always a broken link, whatever ended it."""
        try:
            loop()
        except TransportTimeout as error:
            self._break(f"link deadline of {self._deadline_s:g} s passed: {error}")
        except TransportError as error:
            self._break(f"connection lost: {error}")
        except FrameError as error:
            self._break(f"bad frame: {error}")
        except Exception as error:
            logger.exception("link %s: %s", self.name, threading.current_thread().name)
            self._break(f"internal error: {error!r}")

    def _send_loop(self) -> None:
        while True:
            with self._lock:
                self._idle = self._outgoing.empty()
            item: Outgoing | Begun | None
            try:
                item = self._outgoing.get(timeout=self._deadline_s / 4)
            except queue.Empty:
                with self._lock:
                    if not self._idle:
                        continue  # something came just now
                    self._idle = False
                item = HEARTBEAT
            if item is None:
                return
            begun = item if isinstance(item, Begun) else self._sending.begin(item)
            if begun.finish is not None:
                begun.finish()
            self._count(begun)
            if begun.kind is FrameKind.CLOSE:
                return

    def _recv_loop(self) -> None:
        buffer = np.zeros(self.capacity_words, dtype=np.int32)
        sequence = 0
        while self._broken is None:
            self._transport.recv(buffer, self._deadline_s)
            frame = decode(buffer, self.epoch, sequence)
            sequence = next_sequence(sequence)
            self.counters.frames_received += 1
            self.counters.bytes_received += frame.nbytes
            self.counters.last_receive_monotonic_s = time.monotonic()
            self._handle(frame)

    def _handle(self, frame: Frame) -> None:
        if frame.kind is FrameKind.DATA:
            self.counters.data_frames_received += 1
            try:
                messages = self._decode_payload(frame.payload)
            except ValueError as error:
                raise FrameError(f"payload: {error}") from error
            self._deliver(Received(messages, frame.work_us, frame.sequence, frame.nbytes))
        elif frame.kind is FrameKind.PING:
            # A link that has just ended owes no answer.
            with contextlib.suppress(LinkBroken):
                self._enqueue(Outgoing(FrameKind.PONG, frame.payload.copy()))
        elif frame.kind is FrameKind.PONG:
            if len(frame.payload) != 1:
                raise FrameError(f"length: a PONG carries 1 word, found {len(frame.payload)}")
            self._pongs.put(int(frame.payload[0]))
        elif frame.kind is FrameKind.CLOSE:
            reason = frame.payload.tobytes()[:MAX_CLOSE_REASON_BYTES].rstrip(b"\0").decode(errors="replace")
            self._break(f"closed by peer: {reason}")

    def _deliver(self, received: Received[T]) -> None:
        if self._on_receive is not None:
            self._on_receive(received)
        elif self._inbox.qsize() >= self._max_queued_frames:
            self._break(f"inbox overflow: {self._max_queued_frames} frames unread")
        else:
            self._inbox.put(received)

    def _break(self, reason: str) -> None:
        with self._lock:
            if self._broken is not None:
                return
            ended_here = self._ending_here is not None
            self._broken = self._ending_here or reason
            # To free a wire may take long, and whoever breaks the link may be the engine's step.
            self._reaper = threading.Thread(target=self._reap, name=f"{self.name}-reap", daemon=True)
            self._reaper.start()
        self._outgoing.put(None)
        self._inbox.put(None)
        self._pongs.put(None)
        if ended_here:
            return
        logger.warning("link %s, epoch %d, broken: %s", self.name, self.epoch, self._broken)
        if self._on_broken is not None:
            self._on_broken(self._broken)

    def _reap(self) -> None:
        self._transport.abort()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_JOIN_TIMEOUT_S)
                if thread.is_alive():
                    logger.error("link %s: thread %s did not end", self.name, thread.name)
