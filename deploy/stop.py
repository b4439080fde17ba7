"""SIGINT and SIGTERM as a request to stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Stopped(BaseException):
    """Raised in the main thread by the first signal while ``StopSignal`` interrupts. Not an Exception: nothing on the
    way up may take it for a failure."""


class StopSignal:
    """Turns SIGINT and SIGTERM into ``Stopped``, at once, until ``hold`` is called; later ones are only remembered."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._interrupts = True

    def install(self) -> None:
        """From the main thread. Again after anything that sets handlers of its own, as ray.init does."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def hold(self) -> None:
        """From now on signals interrupt nothing: cleaning up must run to its end."""
        self._interrupts = False

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float) -> None:
        """Sleep, or raise Stopped."""
        if self._event.wait(timeout_s):
            raise Stopped

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first = not self._event.is_set()
        self._event.set()
        if first and self._interrupts:
            raise Stopped
