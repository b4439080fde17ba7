"""A link's thread receives from a wire, sends heartbeats and detects timeouts; `post` sends on the caller's thread.

A link breaks once, for one reason, for good. From then on `broken` is that reason, `post` and `ping` raise LinkBroken,
and `poll` hands out what had arrived whole before the break and then None, at once. `poll` never raises: whoever gets
None from it looks at `broken`.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import queue
import statistics
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider.cluster.link.wire import LinkError, Wire, WireError

logger = logging.getLogger(__name__)

MAX_CLOSE_REASON_BYTES = 512
MAX_UNREAD_FRAMES = 4096

HEARTBEATS_PER_DEADLINE = 4

_JOIN_TIMEOUT_S = 5.0
_LINGER_S = 1.0
"""How long a link that is closed waits for a peer that does not read."""

HEADER = struct.Struct("<BQ")
"""Begins every frame: its kind, and the sender's compute time for it, microseconds. Wires keep frames whole and in
order, each wire is made for one link, and the registry grants links between equal protocols alone."""


class FrameKind(enum.IntEnum):
    DATA = 1
    HEARTBEAT = 2
    PING = 3
    PONG = 4
    CLOSE = 5


class LinkBroken(LinkError):
    """The link has ended; only a new one, with a new epoch, can replace it."""


@dataclass(frozen=True, slots=True)
class Received:
    """One DATA frame, decoded."""

    messages: Any
    work_us: int = 0
    """The sender's compute time."""

    nbytes: int = 0
    """Bytes of the frame, header and payload."""


@dataclass(slots=True)
class LinkCounters:
    """Counts the bytes of all frames."""

    bytes_sent: int = 0
    bytes_received: int = 0


class Link:
    """One end of a link. Every method may be called from any thread; `poll` from one consumer at a time."""

    def __init__(
        self,
        wire: Wire,
        *,
        epoch: int,
        link_deadline_s: float,
        decode: Callable[[bytes], Any],
        name: str,
        on_broken: Callable[[str], None] | None = None,
        on_receive: Callable[[Received], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a link that does nothing before `start`.

        Args:
            epoch: its number among all links of the verifier.
            link_deadline_s: silence after which the link is broken. Heartbeats go out every quarter of it.
            decode: turns a payload into what `poll` hands out. A ValueError from it breaks the link.
            on_broken: called once with the reason, from the thread that noticed or ended it.
            on_receive: takes every received frame instead of the inbox, on the receive thread: return quickly. It is
                not called after a join that returns True.
        """
        self.name = name
        self.epoch = epoch
        self.counters = LinkCounters()
        self._wire = wire
        self._deadline_s = link_deadline_s
        self._decode_payload = decode
        self._on_broken = on_broken
        self._on_receive = on_receive
        self._clock = clock
        # None in the inbox wakes whoever waits there: the link is broken.
        self._inbox: queue.SimpleQueue[Received | None] = queue.SimpleQueue()
        self._ponged = threading.Event()
        self._lock = threading.Lock()
        self._last_send_s = clock()
        self._broken: str | None = None
        self._reaper: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name=f"{name}-recv", daemon=True)

    def start(self) -> None:
        """Start the receive thread. The peer has one link deadline to say something."""
        self._thread.start()

    @property
    def broken(self) -> str | None:
        """Returns why the link has ended, or None."""
        return self._broken

    def post(self, payload: bytes, work_us: int = 0) -> None:
        """Send a DATA frame; never blocks.

        Raises LinkBroken when the link has ended, or ends now because the peer does not read.
        """
        self._send(FrameKind.DATA, payload, work_us)

    def poll(self, timeout_s: float = 0.0) -> Received | None:
        """Return the next frame, or None: nothing came within `timeout_s` (0 never blocks), or the link has ended."""
        try:
            received = self._inbox.get(timeout_s > 0, timeout_s)
        except queue.Empty:
            return None
        if received is None:
            self._inbox.put(None)
        return received

    def ping(self, count: int = 16, timeout_s: float = 5.0) -> float:
        """Return the median of `count` round trips through both links' threads, in microseconds. For one thread.

        Raises LinkError when the link ends, or when a round trip takes longer than `timeout_s`.
        """
        round_trips_us = []
        for _ in range(count):
            self._ponged.clear()
            start_ns = time.perf_counter_ns()
            self._send(FrameKind.PING)
            if not self._ponged.wait(timeout_s) or self._broken is not None:
                raise LinkError(f"link {self.name}: {self._broken or f'no answer to a ping within {timeout_s:.1f} s'}")
            round_trips_us.append((time.perf_counter_ns() - start_ns) / 1000)
        return statistics.median(round_trips_us)

    def close(self, reason: str) -> None:
        """Tell the peer why, and end. Returns at once; see join."""
        self._break(f"closed on this side: {reason}", last_words=reason)

    def abort(self, reason: str) -> None:
        """End without telling the peer. Returns at once; see join."""
        self._break(f"aborted on this side: {reason}")

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
        failure = None
        with self._lock:  # so that nothing is sent behind a CLOSE
            if self._broken is None:
                try:
                    self._put(kind, payload, work_us)
                    return
                except WireError as error:
                    failure = f"connection lost: {error}"
        if failure is not None:
            self._break(failure)
        raise LinkBroken(f"link {self.name}: {self._broken}")

    def _put(self, kind: FrameKind, payload: bytes = b"", work_us: int = 0) -> None:
        """Put a frame on the wire, under the lock."""
        data = HEADER.pack(kind, work_us) + payload
        self._wire.send(data)
        self._last_send_s = self._clock()
        self.counters.bytes_sent += len(data)

    def _run(self) -> None:
        """Receive until the link is broken. The thread's end is always a broken link, whatever ended it."""
        try:
            self._receive()
        except WireError as error:
            self._break(f"connection lost: {error}")
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
                self.counters.bytes_received += len(data)
                self._handle(data)
            elif now - last_heard_s > self._deadline_s:
                self._break(f"link deadline of {self._deadline_s:g} s passed: the peer sent nothing, or did not read")

    def _handle(self, data: bytes) -> None:
        payload = data[HEADER.size :]
        try:
            number, work_us = HEADER.unpack_from(data)
            kind = FrameKind(number)
            messages = self._decode_payload(payload) if kind is FrameKind.DATA else None
        except (ValueError, struct.error) as error:
            self._break(f"bad frame: {error}")
            return
        if kind is FrameKind.DATA:
            self._deliver(Received(messages, work_us, len(data)))
        elif kind is FrameKind.PING:
            self._send(FrameKind.PONG)
        elif kind is FrameKind.PONG:
            self._ponged.set()
        elif kind is FrameKind.CLOSE:
            self._break(f"closed by peer: {payload[:MAX_CLOSE_REASON_BYTES].decode(errors='replace')}")

    def _deliver(self, received: Received) -> None:
        if self._on_receive is not None:
            self._on_receive(received)
        elif self._inbox.qsize() >= MAX_UNREAD_FRAMES:
            self._break(f"inbox overflow: {MAX_UNREAD_FRAMES} frames unread")
        else:
            self._inbox.put(received)

    def _break(self, reason: str, last_words: str | None = None) -> None:
        """End the link, once. last_words: what to tell the peer."""
        linger_s = 0.0
        with self._lock:
            if self._broken is not None:
                return
            if last_words is not None:
                linger_s = _LINGER_S
                with contextlib.suppress(WireError):
                    self._put(FrameKind.CLOSE, last_words.encode()[:MAX_CLOSE_REASON_BYTES])
            self._broken = reason
            # To free a wire may take long, and whoever breaks the link may be the engine's step.
            self._reaper = threading.Thread(target=self._reap, args=(linger_s,), name=f"{self.name}-reap", daemon=True)
            self._reaper.start()
        self._inbox.put(None)
        self._ponged.set()
        if self._on_broken is not None:
            self._on_broken(reason)

    def _reap(self, linger_s: float) -> None:
        self._wire.end(linger_s)
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("link %s: thread %s did not end", self.name, self._thread.name)
