"""The wires of torch that a link can have: Gloo, and a backend for a device's memory (NCCL, HCCL, XCCL), each by
process groups of its own. The only module of links that loads torch, which takes seconds; what a link needs from a wire
is link.Transport, and within a machine local_transport.py has one.

Never torch.distributed's default group: in the target's workers that one belongs to vLLM. Gloo moves host memory over
TCP. `DeviceTransport` names no platform's package: torch loads what registers its device and its backend with it. It
was never run by the authors between two devices, and with CPU memory over Gloo in tests alone: treat it as unproven.
Four things are known of NCCL beforehand:

- It refuses, or hangs with, two ranks on one GPU: verifier and drafter need a GPU each.
- Send and receive of one group share a stream, so a posted receive would hold every send behind it. Hence a
  group a direction.
- A posted receive is a kernel that spins until the peer sends. It occupies part of the GPU between frames, hence
  one block (CTA) only, and whatever waits for the whole device (cudaDeviceSynchronize, some cudaFree) waits for the
  next frame, a heartbeat at the latest. Where that hurts, take gloo: frames are a few KB and come from host memory
  anyway.
- Within a machine it notices neither the peer's death nor its abort. Only our deadlines end what waits then.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store
from torch.distributed.distributed_c10d import _DistributedBackendOptions

from outrider.cluster.link.link import TransportClosed, TransportError, TransportTimeout

_ABORT_TAG = 2
"""Ranks 0 and 1 send with their rank as tag; nobody ever sends with this one."""

_NEVER = datetime.timedelta(days=365)

ABORT_S = 5.0
"""Longest wait for a backend to give a direction up; it goes on trying beside whatever follows."""

_FASTEST_POLL_S, _SLOWEST_POLL_S = 10e-6, 200e-6

_SILENCE = "the peer sent nothing, or did not read"

_WATCHDOG_OFF = {
    # The stock watchdog ends the process when an operation is late. Ours is late whenever the peer has nothing to say.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "HCCL_ASYNC_ERROR_HANDLING": "0",
}


class GlooTransport:
    """Both ends of a two-rank Gloo group.

    Gloo's own limits, found by trying (torch 2.13): a timed-out operation closes the pair, so a deadline here is
    final; a send completes only once the peer has posted its receive, which may be longer and does not say by how much;
    and neither `abort` nor `shutdown` of the group wakes a thread that waits on it. What does wake every waiter, and
    shows the peer a closed connection, is an operation that times out: `abort` makes one.
    """

    backend = "gloo"

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
            raise TransportError(f"gloo could not connect from {local_host}: {_gist(error)}") from error

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
            return TransportTimeout(_SILENCE)
        return TransportClosed(_gist(error))


def _gist(error: BaseException) -> str:
    """The gist of a C++ error: no source path, no stack, no advice."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return line.split("] ", 1)[-1].split(". This is typically", 1)[0]


class _OneWay:
    """One direction: a group, a stream, a host buffer and one on the device, int32 [capacity words] each. The backends
    want to know how long a receive is, so all of the buffer travels, be the frame as short as it may."""

    def __init__(
        self, store: Store, backend: str, sender: int, rank: int, device: torch.device, capacity_words: int
    ) -> None:
        with _environment(_WATCHDOG_OFF):
            self.group = _group_of_two(backend, PrefixStore(f"{backend}/from{sender}", store), rank)
        self.stream = torch.get_device_module(device).Stream(device)
        self.on_device = torch.zeros(capacity_words, dtype=torch.int32, device=device)
        self.on_host = torch.zeros(capacity_words, dtype=torch.int32, pin_memory=device.type != "cpu")


def _group_of_two(backend: str, store: Store, rank: int) -> Any:
    """torch's own, or one that a platform has registered with it."""
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


def _abort(way: _OneWay) -> None:
    """What ended by itself before raises. Its buffers live until then."""
    with suppress(RuntimeError):
        way.group.abort()


class DeviceTransport:
    """Over a backend of torch.distributed that moves a device's memory. Same contract as every Transport. Deadlines are
    ours: the work is polled, and a late one aborts the groups."""

    def __init__(
        self,
        store: Store,
        rank: int,
        *,
        backend: str,
        device: str,
        capacity_words: int,
        connect_timeout_s: float,
        send_timeout_s: float,
    ) -> None:
        """Blocks until both directions carried one buffer, `connect_timeout_s` at most; raises TransportError.

        backend: by torch.distributed's name. device: of its kind, as ``cuda:0``.
        """
        self.backend = backend
        self._device = torch.device(device)
        self._select = torch.get_device_module(self._device).stream
        self._rank, self._peer = rank, 1 - rank
        self._send_timeout_s = send_timeout_s
        self._lock = threading.Lock()
        self._ended: Callable[[], TransportError] | None = None
        """What the first failure raises, and every call after it."""

        self._ways = [_OneWay(store, backend, sender, rank, self._device, capacity_words) for sender in (0, 1)]
        """By the rank that sends; none once it has ended."""

        self._connect(rank, capacity_words, connect_timeout_s)

    @staticmethod
    def check(backend: str, device_type: str) -> None:
        """Raises TransportError where torch has no such backend or no such device. Asked before the peer is met, so
        that either end says this, and not that the other went away."""
        if not torch.distributed.is_backend_available(backend):
            lacks = f"this torch ({torch.__version__}) has no such backend"
        elif not _is_available(device_type):
            lacks = "there is none"
        else:
            return
        raise TransportError(
            f"{backend} needs a device of torch's kind {device_type} on both ends, and on this one {lacks}; use "
            "link.backend: auto"
        )

    def start_send(self, buffer: np.ndarray) -> Callable[[], None]:
        self._check_open()
        return functools.partial(self._send, buffer, self._send_timeout_s)

    def _send(self, buffer: np.ndarray, timeout_s: float) -> None:
        way = self._way(self._rank)
        way.on_host[: len(buffer)].copy_(torch.from_numpy(buffer))
        with self._select(way.stream):
            way.on_device.copy_(way.on_host, non_blocking=True)
            self._finish(lambda: way.group.send([way.on_device], self._peer, 0), timeout_s)

    def recv(self, buffer: np.ndarray, timeout_s: float) -> None:
        way = self._way(self._peer)
        with self._select(way.stream):
            self._finish(lambda: way.group.recv([way.on_device], self._peer, 0), timeout_s)
            way.on_host.copy_(way.on_device)
        torch.from_numpy(buffer).copy_(way.on_host)

    def abort(self) -> None:
        self._end_with(functools.partial(TransportClosed, "aborted on this side"))

    def _end_with(self, error: Callable[[], TransportError]) -> TransportError:
        """What to raise for it: the first failure counts, and ends both directions."""
        with self._lock:
            if self._ended is not None:
                return self._ended()
            self._ended = error
            ways, self._ways = self._ways, []
        # One may wait for the other, and torch for the backend without an end; each of its own, so that nobody does.
        aborts = [threading.Thread(target=_abort, args=(way,), daemon=True) for way in ways]
        for each in aborts:
            each.start()
        for each in aborts:
            each.join(ABORT_S)
        return error()

    def _finish(self, start: Callable[[], Any], timeout_s: float) -> None:
        """Start an operation and poll until it is done, its deadline passed, or the transport was aborted."""
        pause_s = _FASTEST_POLL_S
        try:
            work = start()
            deadline = time.monotonic() + timeout_s  # from now on: the first operation connects before it returns
            while not work.is_completed():
                self._check_open()
                if time.monotonic() > deadline:
                    raise self._end_with(functools.partial(TransportTimeout, _SILENCE))
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, _SLOWEST_POLL_S)
            # A plain wait orders later copies behind the work, and raises what went wrong in it.
            work.wait()
        except RuntimeError as error:
            if isinstance(error, TransportError):
                raise
            raise self._end_with(functools.partial(TransportClosed, _gist(error))) from error
        self._check_open()

    def _way(self, sender: int) -> _OneWay:
        with self._lock:
            self._check_open()
            return self._ways[sender]

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended()

    def _connect(self, rank: int, capacity_words: int, timeout_s: float) -> None:
        """NCCL connects at a group's first operation, and has no deadline there: do it beside, and watch the clock."""
        failure: list[str] = []

        def first_frames() -> None:
            scratch = np.zeros(capacity_words, dtype=np.int32)
            try:
                if rank == 0:
                    self._send(scratch, timeout_s)
                    self.recv(scratch, timeout_s)
                else:
                    self.recv(scratch, timeout_s)
                    self._send(scratch, timeout_s)
            except RuntimeError as error:
                failure.append(_gist(error))

        thread = threading.Thread(target=first_frames, name=f"link-{self.backend}-connect", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive() or failure:
            self.abort()
            reason = failure[0] if failure else f"no connection within {timeout_s:.1f} s"
            raise TransportError(f"{self.backend}: {reason}")


def _is_available(device_type: str) -> bool:
    try:
        return bool(torch.get_device_module(device_type).is_available())
    except RuntimeError:  # a kind that this torch does not know
        return False


@contextmanager
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
