"""A wire between two processes of one machine: a Unix stream socket, each frame behind its length in bytes.

The verifier listens under a name in Linux's abstract namespace, which is in no file system and leaves nothing behind;
the drafter dials it. Any user of the machine may see such a name and dial it, so both ends ask the kernel whose process
the other is, and then for a word that only the other end of this handshake can know. Two containers of one machine
share these names if they share a network namespace.
"""

from __future__ import annotations

import functools
import hmac
import math
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from outrider.cluster.link.frame import FrameError
from outrider.cluster.link.link import TransportClosed, TransportError, TransportTimeout

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAME_BYTES = 16
_BACKLOG = 16
_LENGTH = struct.Struct("<I")
_PEER_CREDENTIALS = struct.Struct("3i")
"""Process, user, group, as SO_PEERCRED has them."""

_WORD_S = 1.0
"""Longest wait for the word of whoever has dialled: another may be next."""


def machine() -> str:
    """The same text in all processes of a machine until it is booted again, in containers too; "" where there are no
    such wires."""
    if not sys.platform.startswith("linux"):
        return ""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def new_name() -> str:
    return f"outrider-link-{secrets.token_hex(_NAME_BYTES)}"


def listen(name: str) -> socket.socket:
    """Close it when the peer is there. Raises TransportError."""
    listener = _unix_socket()
    try:
        listener.bind(f"\0{name}")
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise TransportError(f"cannot listen on a local socket: {error}") from error
    return listener


def accept(listener: socket.socket, own_word: bytes, peer_word: bytes, deadline: float) -> socket.socket:
    """The verifier's end, once whoever has dialled has said `peer_word`; anybody else is hung up on. Raises
    TransportError when nobody has by `deadline` (of time.monotonic)."""
    while (left_s := deadline - time.monotonic()) > 0:
        listener.settimeout(left_s)
        try:
            dialled, _ = listener.accept()
        except OSError:
            break
        try:
            dialled.settimeout(min(left_s, _WORD_S))
            if _is_ours(dialled) and hmac.compare_digest(_exactly(dialled, len(peer_word)), peer_word):
                dialled.sendall(own_word)
                return dialled
        except OSError:
            pass  # it went away, or said nothing
        dialled.close()
    raise TransportError("the peer has not come to the local socket in time")


def dial(name: str, own_word: bytes, peer_word: bytes, deadline: float) -> Callable[[], socket.socket]:
    """The drafter's end: reaches the listener at once, or raises TransportError. Call what is returned when the
    verifier has been told to accept: it waits for its word until `deadline` (of time.monotonic), and raises likewise.
    """
    connected = _unix_socket()
    connected.setblocking(False)
    try:
        connected.connect(f"\0{name}")
        if not _is_ours(connected):
            raise TransportError("its local socket is another user's")
        connected.sendall(own_word)
    except OSError as error:
        connected.close()
        raise TransportError(
            f"its local socket cannot be reached from here, as from another container: {error.strerror}"
        ) from error
    except TransportError:
        connected.close()
        raise

    def finish() -> socket.socket:
        try:
            connected.settimeout(max(deadline - time.monotonic(), 0.001))
            said = _exactly(connected, len(peer_word))
        except OSError as error:
            connected.close()
            raise TransportError(f"the peer does not answer on its local socket: {error}") from error
        if not hmac.compare_digest(said, peer_word):
            connected.close()
            raise TransportError("somebody else is at the peer's local socket; nothing was sent")
        return connected

    return finish


def _unix_socket() -> socket.socket:
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise TransportError(f"cannot make a local socket: {error}") from error


def _is_ours(connected: socket.socket) -> bool:
    """Whether the process at the other end is this user's."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return bool(_PEER_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def _exactly(connected: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer where the peer hung up; what follows them is left."""
    found = b""
    while len(found) < size and (more := connected.recv(size - len(found))):
        found += more
    return found


class LocalTransport:
    """One end of a connected socket, which is its own from here on. See link.Transport."""

    backend = "local"

    def __init__(self, connected: socket.socket, capacity_words: int, send_timeout_s: float) -> None:
        """capacity_words: the longest frame. send_timeout_s: how long a send may wait for a peer that does not read."""
        connected.setblocking(False)
        self._socket = connected
        self._send_timeout_s = send_timeout_s
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connected, select.POLLIN)
        self._writable.register(connected, select.POLLOUT)
        # What has come and was not asked for yet: one call of the kernel's brings a length and its frame.
        self._held = memoryview(bytearray(_LENGTH.size + 4 * capacity_words))
        self._start = self._end = 0
        self._lock = threading.Lock()
        self._inside = 0
        """Calls that are at the socket; the last one out closes it."""

        self._ended: Callable[[], TransportError] | None = None
        """What the first failure raises, and every call after it."""

    def start_send(self, buffer: np.ndarray) -> Callable[[], None] | None:
        """As much as the socket takes is on the wire when this returns; None when that was all."""
        parts = [memoryview(_LENGTH.pack(buffer.nbytes)), memoryview(buffer).cast("B")]
        self._enter()
        try:
            rest = self._write(parts)
        finally:
            self._leave()
        return functools.partial(self._finish, rest) if rest else None

    def recv(self, buffer: np.ndarray, timeout_s: float) -> None:
        """Raises FrameError for a frame longer than `buffer`."""
        into = memoryview(buffer).cast("B")
        deadline = time.monotonic() + timeout_s
        self._enter()
        try:
            self._hold(_LENGTH.size, deadline)
            (size,) = _LENGTH.unpack_from(self._held, self._start)
            if size > len(into):
                raise FrameError(f"length: a frame of {size} bytes, where {len(into)} are the most")
            self._hold(_LENGTH.size + size, deadline)
        finally:
            self._leave()
        begin = self._start + _LENGTH.size
        into[:size] = self._held[begin : begin + size]
        self._start = begin + size
        if self._start == self._end:
            self._start = self._end = 0

    def abort(self) -> None:
        self._end_with(functools.partial(TransportClosed, "aborted on this side"))

    def _hold(self, size: int, deadline: float) -> None:
        """Read until so many bytes are held."""
        while self._end - self._start < size:
            if self._end == len(self._held):
                left = self._end - self._start
                self._held[:left] = self._held[self._start : self._end]
                self._start, self._end = 0, left
            self._await(self._readable, deadline)
            try:
                count = self._socket.recv_into(self._held[self._end :])
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._failure(functools.partial(TransportClosed, str(error))) from error
            if not count:
                raise self._failure(functools.partial(TransportClosed, "the peer is gone"))
            self._end += count

    def _write(self, parts: list[memoryview]) -> list[memoryview]:
        """Without waiting; what is left."""
        try:
            count = self._socket.sendmsg(parts)
        except BlockingIOError:
            return parts
        except OSError as error:
            raise self._failure(functools.partial(TransportClosed, str(error))) from error
        while parts and count >= len(parts[0]):
            count -= len(parts[0])
            parts = parts[1:]
        return [parts[0][count:], *parts[1:]] if parts else []

    def _finish(self, rest: list[memoryview]) -> None:
        deadline = time.monotonic() + self._send_timeout_s
        self._enter()
        try:
            while rest:
                self._await(self._writable, deadline)
                rest = self._write(rest)
        finally:
            self._leave()

    def _await(self, ready: select.poll, deadline: float) -> None:
        left_ms = max(math.ceil((deadline - time.monotonic()) * 1e3), 0)
        if not ready.poll(left_ms):
            raise self._failure(functools.partial(TransportTimeout, "the peer sent nothing, or did not read"))

    def _failure(self, error: Callable[[], TransportError]) -> TransportError:
        """What to raise for it: the first failure counts, and ends both directions."""
        return self._end_with(error)()

    def _end_with(self, error: Callable[[], TransportError]) -> Callable[[], TransportError]:
        with self._lock:
            if self._ended is None:
                self._ended = error
                # Wakes whoever waits here, and shows the peer an end.
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                if not self._inside:
                    self._socket.close()
            return self._ended

    def _enter(self) -> None:
        with self._lock:
            if self._ended is not None:
                raise self._ended()
            self._inside += 1

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._ended is not None and not self._inside:
                self._socket.close()
