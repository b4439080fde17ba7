"""What a link needs from the wire, and the ways a link can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np


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
    """A wire to one peer that moves whole buffers of one agreed capacity, in order.

    One thread may send while another receives. Buffers are C-contiguous int32 and as long as the peer's.
    After any TransportError, and after abort, every call raises a TransportError.
    """

    def start_send(self, buffer: np.ndarray) -> Callable[[], None]:
        """Begin to send, or leave all of it to the function returned; never blocks. That function, which another thread
        may call, blocks until `buffer` may be reused. Both raise TransportClosed, the function TransportTimeout too.
        """

    def recv(self, buffer: np.ndarray, timeout_s: float) -> None:
        """Block until `buffer` is full. Raises TransportClosed or TransportTimeout."""

    def abort(self) -> None:
        """Unblock both directions and free the wire. From any thread, any number of times; never raises."""
