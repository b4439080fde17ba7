"""The wire of host memory: two ZeroMQ sockets at each end, one for each direction.

Within a machine they connect over ``ipc://``, by files in a directory that only this user can enter. Between machines
they connect over ``tcp://`` with CURVE, which encrypts and authenticates every frame; the keys are made for one link
and travel in its invitation (rendezvous.py).

ZeroMQ's sockets are not thread-safe. Each is used and closed under a lock of its own, which is a full memory barrier:
libzmq requires no more. A wire has a context of its own, which its end terminates.
"""

from __future__ import annotations

import math
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

MAX_FRAME_BYTES = 64 << 20
"""A peer that sends a longer frame is disconnected."""

MAX_UNSENT_FRAMES = 4096

_LAST_FRAMES_MS = 50
"""How long to wait for frames after a disconnect: ZeroMQ reports it before it hands out what came last."""

_NOTICE_S = 0.02
_LOST = "the peer is gone"
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


@dataclass(frozen=True)
class Curve:
    """Keys of one socket. ``server`` is the verifier's public key at the drafter, None at the verifier."""

    public: bytes
    secret: bytes
    server: bytes | None = None

    @classmethod
    def new(cls, server: bytes | None = None) -> Curve:
        return cls(*zmq.curve_keypair(), server)


class HostWire:
    """A wire over ZeroMQ. See Wire."""

    def __init__(self, backend: str, curve: Curve | None = None, *, listens: bool, ipv6: bool = False) -> None:
        """Make both sockets, not connected yet.

        Args:
            backend: ipc, or tcp, which needs `curve`.
            listens: this end will `bind`; the other one connects.
        """
        self.backend = backend
        self._context = zmq.Context(io_threads=1)
        self._receiver = self._socket(zmq.PULL, curve, ipv6)
        self._sender = self._socket(zmq.PUSH, curve, ipv6)
        # A listener's end is an EVENT_CLOSED too, so the end that listens asks for disconnects alone.
        events = zmq.EVENT_DISCONNECTED | (0 if listens else zmq.EVENT_CLOSED)
        self._monitor = self._receiver.get_monitor_socket(events)
        self._wake_read, self._wake_write = os.pipe()
        self._poller = zmq.Poller()
        for each in (self._receiver, self._monitor, self._wake_read):
            self._poller.register(each, zmq.POLLIN)
        self._receiving, self._sending = threading.Lock(), threading.Lock()
        self._end_lock = threading.Lock()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._listens = listens
        self._somebody_left = 0.0
        """When a connection was last seen to end; 0: none was."""

        self._is_ended = False
        self._is_closed = False

    def _socket(self, kind: int, curve: Curve | None, ipv6: bool) -> zmq.Socket:
        made = self._context.socket(kind)
        made.linger = 0
        made.sndhwm = made.rcvhwm = MAX_UNSENT_FRAMES
        made.maxmsgsize = MAX_FRAME_BYTES
        made.reconnect_ivl = -1  # a link that breaks is replaced by a new one, of a new epoch
        made.ipv6 = ipv6
        if curve is not None:
            made.curve_publickey, made.curve_secretkey = curve.public, curve.secret
            if curve.server is None:
                made.curve_server = True
            else:
                made.curve_serverkey = curve.server
        return made

    def bind(self, host: str = "") -> tuple[str, str]:
        """Listen at ``host``, or within the machine in a new directory that only this user can enter.

        Returns the addresses for the peer's `connect`: the one that it sends to first. Raises WireError.
        """
        if self.backend == "ipc":
            try:
                self._folder = tempfile.TemporaryDirectory(prefix="outrider-link-", ignore_cleanup_errors=True)
            except OSError as error:
                self.end()
                raise WireError(str(error)) from error
            addresses = f"ipc://{self._folder.name}/in", f"ipc://{self._folder.name}/out"
        else:
            addresses = (f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*",) * 2
        try:
            self._receiver.bind(addresses[0])
            self._sender.bind(addresses[1])
        except zmq.ZMQError as error:
            self.end()
            raise WireError(str(error)) from error
        receiver, sender = (each.get_string(zmq.LAST_ENDPOINT) for each in (self._receiver, self._sender))
        return receiver, sender

    def hide(self) -> None:
        """Remove the files that nobody needs once the peer has connected. A TCP port stays open for as long as the
        wire, since ZeroMQ ends a listener's connections with it; CURVE refuses whoever has not this link's key."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()

    def connect(self, addresses: tuple[str, str]) -> None:
        """Connect to what the peer's `bind` has returned. Raises WireError for addresses that are none."""
        try:
            self._sender.connect(addresses[0])
            self._receiver.connect(addresses[1])
        except zmq.ZMQError as error:
            self.end()
            raise WireError(str(error)) from error

    def wait_for_reader(self, timeout_s: float) -> bool:
        """Returns whether the peer's receiving end has connected in this time."""
        with self._sending:
            return bool(self._sender.poll(math.ceil(max(timeout_s, 0.0) * 1e3), zmq.POLLOUT))

    def send(self, frame: bytes) -> None:
        with self._sending:
            if self._is_ended:
                raise WireError(_ENDED)
            try:
                self._sender.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                raise WireError("the peer is gone, or does not read what is sent") from None
            except zmq.ZMQError as error:
                raise WireError(str(error)) from error

    def recv(self, timeout_s: float) -> bytes | None:
        with self._receiving:
            if self._is_ended:
                raise WireError(_ENDED)
            try:
                return self._next(timeout_s)
            except zmq.ZMQError as error:
                raise WireError(str(error)) from error

    def _next(self, timeout_s: float) -> bytes | None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._receiver.recv(zmq.NOBLOCK)
            except zmq.Again:
                pass
            if self._is_lost():
                if self._receiver.poll(_LAST_FRAMES_MS):
                    continue
                raise WireError(_LOST)
            left_s = deadline - time.monotonic()
            if self._somebody_left:
                left_s = min(left_s, _NOTICE_S)
            ready = dict(self._poller.poll(math.ceil(max(left_s, 0.0) * 1e3)))
            if self._is_ended:
                raise WireError(_ENDED)
            if self._monitor in ready:
                recv_monitor_message(self._monitor)
                self._somebody_left = time.monotonic()
            elif not ready and time.monotonic() >= deadline:
                return None

    def _is_lost(self) -> bool:
        """Returns whether the connection is lost. Where this end listens, whoever has left may have been a stranger:
        the peer has left when there is nobody to send to any more, which is noticed a moment later."""
        if not self._somebody_left:
            return False
        if not self._listens:
            return True
        with self._sending:
            if not self._sender.poll(0, zmq.POLLOUT):
                return True
        if time.monotonic() - self._somebody_left > 1.0:
            self._somebody_left = 0.0
        return False

    def end(self, linger_s: float = 0.0) -> None:
        self._is_ended = True
        with self._end_lock:
            if self._is_closed:
                return
            self._is_closed = True
            os.write(self._wake_write, b"\0")
            with self._sending:  # first, so that the peer has the last frame before it notices the end
                self._sender.close(linger=int(linger_s * 1e3))
            with self._receiving:
                self._receiver.disable_monitor()
                self._monitor.close(linger=0)
                self._receiver.close(linger=0)
            self._context.term()
            os.close(self._wake_read)
            os.close(self._wake_write)
            self.hide()

    def __del__(self) -> None:
        if hasattr(self, "_is_closed"):  # else it was never made
            self.end()

    @staticmethod
    def first_ready(wires: list[HostWire], timeout_s: float) -> HostWire | None:
        """Returns a wire on which a frame has come, or None when none has come on any of them in this time."""
        poller = zmq.Poller()
        for wire in wires:
            poller.register(wire._receiver, zmq.POLLIN)
        ready = dict(poller.poll(math.ceil(max(timeout_s, 0.0) * 1e3)))
        return next((wire for wire in wires if wire._receiver in ready), None)
