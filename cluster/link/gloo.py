"""A link's wire over Gloo: host memory, TCP, a process group of its own.

Never torch.distributed's default group: in the target's workers that one belongs to vLLM.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable

import numpy as np
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from cluster.link.transport import TransportClosed, TransportError, TransportTimeout

_ABORT_TAG = 2
"""Ranks 0 and 1 send with their rank as tag; nobody ever sends with this one."""


class GlooTransport:
    """Both ends of a two-rank Gloo group.

    Gloo's own limits, found by trying (torch 2.13): a timed-out operation closes the pair, so a deadline here is
    final; a send completes only once the peer has posted its receive; and neither `abort` nor `shutdown` of the
    group wakes a thread that waits on it. What does wake every waiter, and shows the peer a closed connection, is
    an operation that times out: `abort` makes one.
    """

    def __init__(self, store: Store, rank: int, *, local_host: str, connect_timeout_s: float, send_timeout_s: float):
        """Blocks until the peer has connected too, `connect_timeout_s` at most; raises TransportError.

        local_host: this machine's address on the interface that reaches the peer.
        send_timeout_s: how long one send may wait for a peer that does not receive.
        """
        self._rank, self._peer = rank, 1 - rank
        self._send_timeout = datetime.timedelta(seconds=send_timeout_s)
        self._lock = threading.Lock()
        try:
            options = ProcessGroupGloo._Options()
            options._timeout = datetime.timedelta(seconds=connect_timeout_s)
            options._devices = [ProcessGroupGloo.create_device(hostname=local_host)]
            options._threads = 1
            self._group: ProcessGroupGloo | None = ProcessGroupGloo(PrefixStore("gloo", store), rank, 2, options)
        except RuntimeError as error:
            raise TransportError(f"gloo could not connect from {local_host}: {_first_line(error)}") from error

    def start_send(self, buffer: np.ndarray) -> Callable[[], None]:
        """What a peer waits for is on the wire when this returns: Gloo writes it in the caller's thread."""
        group = self._open_group()
        try:
            work = group.send([torch.from_numpy(buffer)], self._peer, self._rank)
        except RuntimeError as error:
            raise self._failure(error) from error

        def finish() -> None:
            try:
                work.wait(self._send_timeout)
            except RuntimeError as error:
                raise self._failure(error) from error

        return finish

    def recv(self, buffer: np.ndarray, timeout_s: float) -> None:
        group = self._open_group()
        try:
            group.recv([torch.from_numpy(buffer)], self._peer, self._peer).wait(datetime.timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise self._failure(error) from error

    def abort(self) -> None:
        with self._lock:
            group, self._group = self._group, None
        if group is None:
            return
        # Raises by design: the timeout that closes the pair, or word that the pair was closed already.
        with contextlib.suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.int32)
            group.recv([nothing], self._peer, _ABORT_TAG).wait(datetime.timedelta(milliseconds=1))

    def _open_group(self) -> ProcessGroupGloo:
        group = self._group
        if group is None:
            raise TransportClosed("aborted on this side")
        return group

    def _failure(self, error: RuntimeError) -> TransportError:
        """Which of our errors this is. The pair is closed in every case."""
        if self._group is None:
            return TransportClosed("aborted on this side")
        text = str(error)
        # The second is what the other thread gets to see when its neighbour's deadline closed the pair.
        if "Timed out waiting" in text or "Application timeout" in text:
            return TransportTimeout("the peer sent nothing, or did not read")
        return TransportClosed(_first_line(error))


def _first_line(error: BaseException) -> str:
    """The gist of a C++ error: no source path, no stack, no advice."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return line.split("] ", 1)[-1].split(". This is typically", 1)[0]
