"""The wire of host memory: two ZeroMQ sockets at each end, one for each direction.

Within a machine they connect over ``ipc://``, by files in a directory that only this user can enter. Between machines
they connect over ``tcp://`` with CURVE, which encrypts and authenticates every frame. The listener's public key is made
for one link and travels in its invitation alone (rendezvous.py), so nobody else can connect.

ZeroMQ's sockets are not thread-safe. Each is used and closed under a lock of its own, which is a full memory barrier:
libzmq requires no more. A wire has a context of its own, which its end terminates.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import threading
import time
from typing import Protocol

import zmq

MAX_FRAME_BYTES = 256 << 20
"""A peer that sends a longer frame is disconnected. The longest opens all running requests on a new link: 5 bytes a
token, of which a target's KV cache holds a few millions."""

MAX_UNSENT_FRAMES = 4096

_LOOK_MS = 50
"""How often a receiver looks whether the peer is still there, and this end not ended."""

_LAST_FRAMES_MS = 50
"""How long to wait for frames after a disconnect: ZeroMQ notices it before it hands out what came last."""

_LOST = "the peer is gone, or does not read what is sent"
_ENDED = "ended on this side"


class LinkError(RuntimeError):
    """A link could not be made or used. Costs speculation, never a request."""


class WireError(LinkError):
    """The wire failed. It is of no further use."""


class Wire(Protocol):
    """Moves whole frames to and from one peer, in order.

    `send` and `end` may be called from any thread, `recv` from one thread at a time. After a WireError and after `end`,
    every call of `send` and `recv` raises a WireError.
    """

    @property
    def backend(self) -> str:
        """Returns which wire this is: ipc, tcp, or one of backends.DEVICE_BACKENDS."""

    def send(self, frame: bytes) -> None:
        """Queue a frame, without ever waiting for the peer. Raises WireError when the peer is gone or does not read."""

    def recv(self, timeout_s: float) -> bytes | None:
        """Wait for the next frame. Returns None when none has come in this time. Raises WireError."""

    def end(self, linger_s: float = 0.0) -> None:
        """Wake whoever waits in `recv` and free the wire. Never raises, and may be called any number of times.

        Args:
            linger_s: how long frames that were sent may take to reach the peer.
        """


class HostWire:
    """A wire over ZeroMQ. See Wire."""

    def __init__(self, backend: str, server_key: bytes | None = None, *, ipv6: bool = False) -> None:
        """Make both sockets. Call `listen` or `connect`, which do.

        Args:
            backend: ipc, or tcp with CURVE.
            server_key: the listener's public key, over tcp; None: this end listens.
        """
        self.backend = backend
        self.addresses = ("", "")
        """ZeroMQ's endpoints at which this end listens; the peer sends to the first and receives from the second."""

        self.key, self._secret = zmq.curve_keypair() if backend == "tcp" else (b"", b"")
        self._context = zmq.Context(io_threads=1)
        self._receiver, self._sender = (self._socket(kind, server_key, ipv6) for kind in (zmq.PULL, zmq.PUSH))
        self._receiving, self._sending = threading.Lock(), threading.Lock()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._ending = threading.Lock()
        self._is_ended = False

    def _socket(self, kind: int, server_key: bytes | None, ipv6: bool) -> zmq.Socket:
        made = self._context.socket(kind)
        made.linger = 0
        made.sndhwm = made.rcvhwm = MAX_UNSENT_FRAMES
        made.maxmsgsize = MAX_FRAME_BYTES
        made.reconnect_ivl = -1  # a link that breaks is replaced by a new one, of a new epoch
        made.immediate = True  # so that a sender is ready exactly while the peer is connected
        made.ipv6 = ipv6
        if self.backend == "tcp":
            made.curve_publickey, made.curve_secretkey = self.key, self._secret
            if server_key is None:
                made.curve_server = True
            else:
                made.curve_serverkey = server_key
        return made

    @classmethod
    def listen(cls, host: str | None) -> HostWire:
        """Listen at `host`, an address of this machine, or for a peer on this machine, in a new directory. Raises
        WireError."""
        if host is None:
            wire = cls("ipc")
            wire._folder = tempfile.TemporaryDirectory(prefix="outrider-link-", ignore_cleanup_errors=True)
            ends = f"ipc://{wire._folder.name}/in", f"ipc://{wire._folder.name}/out"
        else:
            wire = cls("tcp", ipv6=":" in host)
            ends = (f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*",) * 2
        try:
            wire._receiver.bind(ends[0])
            wire._sender.bind(ends[1])
        except zmq.ZMQError as error:
            wire.end()
            raise WireError(f"cannot listen at {ends[0]}: {error}") from error
        wire.addresses = wire._receiver.get_string(zmq.LAST_ENDPOINT), wire._sender.get_string(zmq.LAST_ENDPOINT)
        return wire

    @classmethod
    def connect(cls, addresses: tuple[str, str], key: bytes, timeout_s: float) -> HostWire:
        """Connect to a wire that listens, by its addresses and key. Raises WireError."""
        wire = cls("tcp" if key else "ipc", key or None, ipv6="[" in addresses[0])
        try:
            wire._sender.connect(addresses[0])
            wire._receiver.connect(addresses[1])
        except zmq.ZMQError as error:
            wire.end()
            raise WireError(f"{addresses[0]}: {error}") from error
        return wire.connected(timeout_s)

    def connected(self, timeout_s: float) -> HostWire:
        """Return this wire once the peer has connected. Ends it and raises WireError if that takes too long."""
        with self._sending:
            is_there = not self._is_ended and self._sender.poll(math.ceil(timeout_s * 1e3), zmq.POLLOUT)
        if not is_there:
            self.end()
            raise WireError(f"no connection within {timeout_s:.1f} s")
        return self

    def hide(self) -> None:
        """Remove the files that nobody needs once the peer has connected. A TCP port stays open for as long as the
        wire, since ZeroMQ ends a listener's connections with it; CURVE refuses whoever has not this link's key."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()

    def send(self, frame: bytes) -> None:
        with self._sending:
            if self._is_ended:
                raise WireError(_ENDED)
            try:
                self._sender.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                raise WireError(_LOST) from None
            except zmq.ZMQError as error:
                raise WireError(str(error)) from error

    def recv(self, timeout_s: float) -> bytes | None:
        deadline = time.monotonic() + timeout_s
        with self._receiving:
            while not self._is_ended:
                with contextlib.suppress(zmq.Again):
                    return self._receiver.recv(zmq.NOBLOCK)
                left_ms = math.ceil((deadline - time.monotonic()) * 1e3)
                if self._receiver.poll(min(max(left_ms, 0), _LOOK_MS)):
                    continue
                if not (self._has_peer() or self._receiver.poll(_LAST_FRAMES_MS)):
                    break
                if left_ms <= _LOOK_MS:
                    return None
        raise WireError(_ENDED if self._is_ended else _LOST)

    def _has_peer(self) -> bool:
        with self._sending:
            return self._is_ended or bool(self._sender.poll(0, zmq.POLLOUT))

    def end(self, linger_s: float = 0.0) -> None:
        self._is_ended = True
        with self._ending:
            if self._context.closed:
                return
            with self._sending:  # first, so that the peer has the last frame before it notices the end
                self._sender.close(linger=int(linger_s * 1e3))
            with self._receiving:
                self._receiver.close(linger=0)
            self._context.term()
            self.hide()

    def __del__(self) -> None:
        if hasattr(self, "_is_ended"):  # else it was never made
            self.end()
