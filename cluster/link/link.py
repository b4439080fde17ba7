"""A link: one thread that receives from a wire, beats and watches for silence. Whoever posts sends, without waiting.

A link breaks once, for one reason, for good. From then on `broken` is that reason, `post` and `ping` raise LinkBroken,
and `poll` hands out what had arrived whole before the break and then None, at once. `poll` never raises: whoever gets
None from it looks at `broken`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import statistics
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from outrider.cluster.link.frame import Frame, FrameError, FrameKind, decode, encode
from outrider.cluster.link.wire import LinkError, Wire, WireError

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_CLOSE_REASON_BYTES = 512

HANG = "drafter hangs"
"""How the reason of a link begins that was given up because its drafter lives but answers nothing."""

HEARTBEATS_PER_DEADLINE = 4

_JOIN_TIMEOUT_S = 5.0
_PING = struct.Struct("<I")


class LinkBroken(LinkError):
    """The link has ended; only a new one, with a new epoch, can replace it."""


@dataclass(frozen=True, slots=True)
class Received(Generic[T]):
    """One DATA frame, decoded."""

    messages: T
    work_us: int = 0
    """The sender's compute time. Of the frames of one `post` only the last carries it: sums are right."""

    nbytes: int = 0
    """Bytes of the frame, header and payload."""


@dataclass(frozen=True, slots=True)
class PingStats:
    """Round trips through both links' threads, in microseconds."""

    min_us: float
    median_us: float
    max_us: float


@dataclass(slots=True)
class LinkCounters:
    """Counts frames of every kind, and their bytes."""

    frames_sent: int = 0
    bytes_sent: int = 0
    frames_received: int = 0
    bytes_received: int = 0
    data_frames_received: int = 0
    last_receive_monotonic_s: float | None = None


class Link(Generic[T]):
    """One end of a link. Every method may be called from any thread; `poll` from one consumer at a time."""

    def __init__(
        self,
        wire: Wire,
        *,
        epoch: int,
        link_deadline_s: float,
        decode: Callable[[bytes], T],
        name: str,
        on_broken: Callable[[str], None] | None = None,
        on_receive: Callable[[Received[T]], None] | None = None,
        max_queued_frames: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a link that does nothing before `start`.

        Args:
            epoch: stamped on every frame sent, demanded of every frame received.
            link_deadline_s: silence after which the link is broken. Heartbeats go out every quarter of it.
            decode: turns a payload into what `poll` hands out. A ValueError from it breaks the link.
            on_broken: called once with the reason, from the thread that noticed, unless this side closed or aborted.
            on_receive: takes every received frame instead of the inbox, on the receive thread: return quickly. It is
                not called after close, or a join that returns True, has returned.
            max_queued_frames: the link breaks when more than this many are unread in the inbox.
        """
        self.name = name
        self.epoch = epoch
        self.counters = LinkCounters()
        self._wire = wire
        self._deadline_s = link_deadline_s
        self._decode_payload = decode
        self._on_broken = on_broken
        self._on_receive = on_receive
        self._max_queued_frames = max_queued_frames
        self._clock = clock
        # None in a queue wakes whoever waits there: the link is broken.
        self._inbox: queue.SimpleQueue[Received[T] | None] = queue.SimpleQueue()
        self._pongs: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._ping_lock = threading.Lock()
        self._pings = 0
        self._lock = threading.Lock()
        self._last_send_s = clock()
        self._broken: str | None = None
        self._ending_here: str | None = None
        self._linger_s = 0.0
        self._reaper: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name=f"{name}-recv", daemon=True)

    def start(self) -> None:
        """Start the receive thread. The peer has one link deadline to say something."""
        self._thread.start()

    @property
    def broken(self) -> str | None:
        """Returns why the link has ended, or None."""
        return self._broken

    def post(self, payloads: Sequence[bytes], work_us: int = 0) -> None:
        """Send one DATA frame for each payload; never blocks.

        Raises LinkBroken when the link has ended or is closing, or ends now because the peer does not read.
        """
        last = len(payloads) - 1
        for index, payload in enumerate(payloads):
            self._send(FrameKind.DATA, payload, work_us if index == last else 0)

    def poll(self, timeout_s: float = 0.0) -> Received[T] | None:
        """Return the next frame, or None: nothing came within `timeout_s` (0 never blocks), or the link has ended."""
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
                self._send(FrameKind.PING, _PING.pack(self._pings))
                self._await_pong(self._pings, deadline, timeout_s)
                round_trips_us.append((time.perf_counter_ns() - start_ns) / 1000)
        return PingStats(min(round_trips_us), statistics.median(round_trips_us), max(round_trips_us))

    def close(self, reason: str, timeout_s: float = 1.0) -> None:
        """Tell the peer why, and end.

        Waits `timeout_s` at most for a peer that does not read, and then as join does.
        """
        text = f"closed on this side: {reason}"
        with self._lock:
            if self._broken is None and self._ending_here is None:
                self._ending_here, self._linger_s = text, timeout_s
                with contextlib.suppress(WireError):
                    self._put(FrameKind.CLOSE, reason.encode()[:MAX_CLOSE_REASON_BYTES])
        self._break(text)
        self.join()

    def retire(self, reason: str) -> None:
        """Close on a thread of its own; returns at once."""
        threading.Thread(target=self.close, args=(reason,), name=f"{self.name}-retire", daemon=True).start()

    def abort(self, reason: str) -> None:
        """End without telling the peer. Returns at once, whatever the wire does; see join."""
        with self._lock:
            if self._ending_here is None:
                self._ending_here = f"aborted on this side: {reason}"
        self._break(reason)

    def join(self, timeout_s: float = 2 * _JOIN_TIMEOUT_S) -> bool:
        """Wait until a link that has ended has freed its wire and its thread is gone. Returns whether that is so.
        Returns at once where it cannot be waited for: from the link's own callbacks, and before the end."""
        with self._lock:  # under which it is started
            reaper = self._reaper
        if reaper is None or threading.current_thread() is self._thread:
            return False
        reaper.join(timeout_s)
        return not (reaper.is_alive() or self._thread.is_alive())

    def _send(self, kind: FrameKind, payload: bytes = b"", work_us: int = 0) -> None:
        """Send a frame. Raises LinkBroken when the link has ended, or ends now because the wire has failed."""
        with self._lock:  # so that nothing is sent behind a CLOSE
            failure = self._broken or self._ending_here
            if failure is None:
                try:
                    self._put(kind, payload, work_us)
                    return
                except WireError as error:
                    failure = f"connection lost: {error}"
        self._break(failure)
        raise LinkBroken(f"link {self.name}: {self._broken}")

    def _put(self, kind: FrameKind, payload: bytes, work_us: int = 0) -> None:
        """Put a frame on the wire, under the lock."""
        data = encode(kind, self.epoch, payload, work_us)
        self._wire.send(data)
        self._last_send_s = self._clock()
        self.counters.frames_sent += 1
        self.counters.bytes_sent += len(data)

    def _run(self) -> None:
        """Receive until the link is broken. The thread's end is always a broken link, whatever ended it."""
        try:
            self._receive()
        except WireError as error:
            self._break(f"connection lost: {error}")
        except FrameError as error:
            self._break(f"bad frame: {error}")
        except LinkBroken:
            pass
        except Exception as error:
            logger.exception("link %s: %s", self.name, threading.current_thread().name)
            self._break(f"internal error: {error!r}")

    def _receive(self) -> None:
        beat_s = self._deadline_s / HEARTBEATS_PER_DEADLINE
        last_heard_s = self._clock()
        while self._broken is None:
            data = self._wire.recv(max(self._last_send_s + beat_s - self._clock(), 0.0))
            now = self._clock()
            if now - self._last_send_s >= beat_s:
                self._send(FrameKind.HEARTBEAT)
            if data is not None:
                last_heard_s = now
                self.counters.frames_received += 1
                self.counters.bytes_received += len(data)
                self.counters.last_receive_monotonic_s = now
                self._handle(decode(data, self.epoch), len(data))
            elif now - last_heard_s > self._deadline_s:
                self._break(f"link deadline of {self._deadline_s:g} s passed: the peer sent nothing, or did not read")

    def _handle(self, frame: Frame, nbytes: int) -> None:
        if frame.kind is FrameKind.DATA:
            self.counters.data_frames_received += 1
            try:
                messages = self._decode_payload(frame.payload)
            except ValueError as error:
                raise FrameError(f"payload: {error}") from error
            self._deliver(Received(messages, frame.work_us, nbytes))
        elif frame.kind is FrameKind.PING:
            # A link that has just ended owes no answer.
            with contextlib.suppress(LinkBroken):
                self._send(FrameKind.PONG, frame.payload)
        elif frame.kind is FrameKind.PONG:
            if len(frame.payload) != _PING.size:
                raise FrameError(f"length: a PONG carries {_PING.size} bytes, found {len(frame.payload)}")
            self._pongs.put(_PING.unpack(frame.payload)[0])
        elif frame.kind is FrameKind.CLOSE:
            reason = frame.payload[:MAX_CLOSE_REASON_BYTES].decode(errors="replace")
            self._break(f"closed by peer: {reason}")

    def _deliver(self, received: Received[T]) -> None:
        if self._on_receive is not None:
            self._on_receive(received)
        elif self._inbox.qsize() >= self._max_queued_frames:
            self._break(f"inbox overflow: {self._max_queued_frames} frames unread")
        else:
            self._inbox.put(received)

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

    def _break(self, reason: str) -> None:
        with self._lock:
            if self._broken is not None:
                return
            ended_here = self._ending_here is not None
            self._broken = self._ending_here or reason
            # To free a wire may take long, and whoever breaks the link may be the engine's step.
            self._reaper = threading.Thread(target=self._reap, name=f"{self.name}-reap", daemon=True)
            self._reaper.start()
        self._inbox.put(None)
        self._pongs.put(None)
        if ended_here:
            return
        logger.warning("link %s, epoch %d, broken: %s", self.name, self.epoch, self._broken)
        if self._on_broken is not None:
            self._on_broken(self._broken)

    def _reap(self) -> None:
        self._wire.end(self._linger_s)
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("link %s: thread %s did not end", self.name, self._thread.name)
