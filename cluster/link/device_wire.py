"""The wire of a device's memory, over a backend of torch.distributed: NCCL, HCCL or XCCL.

It never uses torch.distributed's default group: in the target's workers that one belongs to vLLM. It names no
platform's package: torch loads what registers its device and its backend with it. It was never run by the authors
between two devices, and with CPU memory over Gloo in tests alone: treat it as unproven. Four things are known of NCCL
beforehand:

- It refuses, or hangs with, two ranks on one GPU: verifier and drafter need a GPU each.
- Send and receive of one group share a stream, so a posted receive would hold every send behind it. Hence a group for
  each direction.
- A posted receive is a kernel that spins until the peer sends. It occupies part of the GPU between frames, hence one
  block (CTA) only, and whatever waits for the whole device (cudaDeviceSynchronize, some cudaFree) waits for the next
  frame, a heartbeat at the latest. Where that hurts, take link.backend: auto.
- Within a machine it notices neither the peer's death nor its abort. Only the link's deadlines end what waits then.

These backends want to know how long a receive is, so tensors of one fixed length travel: the number of bytes in use,
whether the frame goes on in the next tensor, and the bytes.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore, Store
from torch.distributed.distributed_c10d import _DistributedBackendOptions

from outrider.cluster.link.wire import MAX_FRAME_BYTES, MAX_UNSENT_FRAMES, WireError

TENSOR_WORDS = 4096
"""Length of a tensor, int32. Every frame moves at least one, so a heartbeat moves 16 KiB."""

_HEAD_WORDS = 2
_ROOM_BYTES = 4 * (TENSOR_WORDS - _HEAD_WORDS)

ABORT_S = 5.0
"""Longest wait for a backend to abort a group; it goes on trying in a thread of its own."""

_NEVER = datetime.timedelta(days=365)
_FASTEST_POLL_S, _SLOWEST_POLL_S = 10e-6, 200e-6
_ENDED = "ended on this side"

_WATCHDOG_OFF = {
    # The stock watchdog ends the process when an operation is late. Ours is late whenever the peer has nothing to say.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "HCCL_ASYNC_ERROR_HANDLING": "0",
}


class _OneWay:
    """One direction: a group, a stream, and a tensor of int32 [TENSOR_WORDS] on the host and one on the device."""

    def __init__(self, store: Store, backend: str, sender: int, rank: int, device: torch.device) -> None:
        with _environment(_WATCHDOG_OFF):
            self.group = _group_of_two(backend, PrefixStore(f"{backend}/from{sender}", store), rank)
        self.stream = torch.get_device_module(device).Stream(device)
        self.on_device = torch.zeros(TENSOR_WORDS, dtype=torch.int32, device=device)
        self.on_host = torch.zeros(TENSOR_WORDS, dtype=torch.int32, pin_memory=device.type != "cpu")

    def abort(self) -> None:
        """Abort the group. One that has ended by itself raises, which says nothing new."""
        with contextlib.suppress(RuntimeError):
            self.group.abort()


class DeviceWire:
    """A wire over a device's memory. See wire.Wire."""

    def __init__(
        self,
        store: Store,
        rank: int,
        *,
        backend: str,
        device: str,
        connect_timeout_s: float,
    ) -> None:
        """Block until both directions have carried one tensor. Raises WireError.

        Args:
            store: one that both ends reach, until both have connected.
            rank: 0 for the verifier, 1 for the drafter.
            backend: a name of torch.distributed's.
            device: the device whose memory is moved, such as ``cuda:0``.
        """
        self.backend = backend
        self._device = torch.device(device)
        self._select = torch.get_device_module(self._device).stream
        self._rank, self._peer = rank, 1 - rank
        self._lock = threading.Lock()
        self._ended: str | None = None
        self._receiving: Any = None
        self._received = bytearray()
        """What has come of a frame that goes on in the next tensor."""

        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._ways = [_OneWay(store, backend, sender, rank, self._device) for sender in (0, 1)]
        """By the rank that sends; none once the wire has ended."""

        self._connect(connect_timeout_s)
        self._sender = threading.Thread(target=self._send_loop, name=f"link-{backend}-send", daemon=True)
        self._sender.start()

    @staticmethod
    def check(backend: str, device_type: str) -> None:
        """Raise WireError where torch has no such backend or device. Either end asks before it meets the peer, so that
        it reports this and not that the other end is gone."""
        if not torch.distributed.is_backend_available(backend):
            lacks = f"this torch ({torch.__version__}) has no such backend"
        elif not _is_available(device_type):
            lacks = "there is none"
        else:
            return
        raise WireError(
            f"{backend} needs a device of torch's kind {device_type} on both ends, and on this one {lacks}; use "
            "link.backend: auto"
        )

    def send(self, frame: bytes) -> None:
        self._check_open()
        if self._unsent.qsize() >= MAX_UNSENT_FRAMES:
            raise WireError(f"the peer does not read what is sent: {MAX_UNSENT_FRAMES} frames unsent")
        self._unsent.put(frame)

    def recv(self, timeout_s: float) -> bytes | None:
        """A receive that nothing has answered stays posted for the next call."""
        deadline = time.monotonic() + timeout_s
        way = self._way(self._peer)
        while True:
            with self._failing(), self._select(way.stream):
                if self._receiving is None:
                    self._receiving = way.group.recv([way.on_device], self._peer, 0)
                if not self._is_completed(self._receiving, deadline):
                    return None
                self._receiving.wait()  # orders the copy behind the work, and raises what went wrong in it
                self._receiving = None
                way.on_host.copy_(way.on_device)
            size, goes_on = way.on_host[:_HEAD_WORDS].tolist()
            if not 0 <= size <= _ROOM_BYTES or len(self._received) + size > MAX_FRAME_BYTES:
                raise self._fail(f"length: {size} bytes after {len(self._received)} are no frame")
            self._received += way.on_host[_HEAD_WORDS:].numpy().view("uint8")[:size].tobytes()
            if not goes_on:
                frame = bytes(self._received)
                self._received.clear()
                return frame

    def end(self, linger_s: float = 0.0) -> None:
        if linger_s and self._sender.is_alive():
            self._unsent.put(None)
            self._sender.join(linger_s)
        self._fail(_ENDED)

    def _send_loop(self) -> None:
        # Failures are kept in _ended, where every call of this wire finds them.
        with contextlib.suppress(WireError):
            while (frame := self._unsent.get()) is not None:
                self._send(frame)

    def _send(self, frame: bytes, timeout_s: float = math.inf) -> None:
        """Move a frame. Nothing but the link's end ends the wait for a peer that does not read."""
        way = self._way(self._rank)
        for start in range(0, max(len(frame), 1), _ROOM_BYTES):
            part = frame[start : start + _ROOM_BYTES]
            way.on_host[0], way.on_host[1] = len(part), start + _ROOM_BYTES < len(frame)
            way.on_host[_HEAD_WORDS:].numpy().view("uint8")[: len(part)] = np.frombuffer(part, "uint8")
            with self._failing(), self._select(way.stream):
                way.on_device.copy_(way.on_host, non_blocking=True)
                work = way.group.send([way.on_device], self._peer, 0)
                # The deadline counts from here: the first operation connects before it returns.
                if not self._is_completed(work, time.monotonic() + timeout_s):
                    raise self._fail("the peer did not read in time")
                work.wait()

    def _is_completed(self, work: Any, deadline: float) -> bool:
        """Poll until the work is done or its deadline has passed. Raises WireError once the wire has ended."""
        pause_s = _FASTEST_POLL_S
        while not work.is_completed():
            self._check_open()
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _SLOWEST_POLL_S)
        return True

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn what a backend raises into a WireError that ends the wire."""
        try:
            yield
        except WireError:
            raise
        except RuntimeError as error:
            raise self._fail(_gist(error)) from error
        self._check_open()

    def _fail(self, reason: str) -> WireError:
        """Abort both directions, once. Returns what to raise: the first reason counts."""
        with self._lock:
            if self._ended is not None:
                return WireError(self._ended)
            self._ended = reason
            ways, self._ways = self._ways, []
        self._unsent.put(None)
        # One direction's abort may wait for the other's, and torch may wait for the backend without end.
        aborts = [threading.Thread(target=way.abort, daemon=True) for way in ways]
        for each in aborts:
            each.start()
        for each in aborts:
            each.join(ABORT_S)
        return WireError(reason)

    def _way(self, sender: int) -> _OneWay:
        with self._lock:
            self._check_open()
            return self._ways[sender]

    def _check_open(self) -> None:
        if self._ended is not None:
            raise WireError(self._ended)

    def _connect(self, timeout_s: float) -> None:
        """Move a first frame each way in another thread: NCCL connects there, and has no deadline of its own."""
        failure: list[str] = []

        def first_frames() -> None:
            try:
                if self._rank == 0:
                    self._send(b"", timeout_s)
                if self.recv(timeout_s) is None:
                    failure.append(f"no connection within {timeout_s:.1f} s")
                elif self._rank == 1:
                    self._send(b"", timeout_s)
            except RuntimeError as error:
                failure.append(_gist(error))

        thread = threading.Thread(target=first_frames, name=f"link-{self.backend}-connect", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive() or failure:
            reason = failure[0] if failure else f"no connection within {timeout_s:.1f} s"
            self._fail(reason)
            raise WireError(f"{self.backend}: {reason}")


def _group_of_two(backend: str, store: Store, rank: int) -> Any:
    """Return a group of torch's own kinds, or of one that a platform has registered with torch."""
    if (plugin := torch.distributed.Backend._plugins.get(backend.upper())) is None:
        kind = getattr(torch.distributed, f"ProcessGroup{backend.upper()}")
        options = kind.Options()
        options._timeout = _NEVER
        if backend == "nccl":
            # A pending receive occupies as many multiprocessors as it has blocks (CTAs).
            options.config.min_ctas = options.config.max_ctas = 1
        return kind(store, rank, 2, options)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, 2, _NEVER)
    extended = _DistributedBackendOptions()
    extended.store, extended.group_rank, extended.group_size = store, rank, 2
    extended.timeout, extended.group_id, extended.global_ranks_in_group = _NEVER, f"outrider-{backend}", [0, 1]
    return plugin.creator_fn(extended, None)


def _gist(error: BaseException) -> str:
    """Return the gist of a C++ error: no source path, no stack, no advice."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return line.split("] ", 1)[-1].split(". This is typically", 1)[0]


def _is_available(device_type: str) -> bool:
    try:
        return bool(torch.get_device_module(device_type).is_available())
    except RuntimeError:  # a kind that this torch does not know
        return False


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for as long as a constructor reads them, so that no other group in this process sees them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
