"""A device's link without a device: a backend of torch.distributed, registered as platforms register theirs, that moves
CPU memory over Gloo and says without being waited for whether a work is done, as a device's backends do. `DEAF` is the
same, but notices neither the peer's death nor its abort, as NCCL within a machine."""

import datetime
import threading
from contextlib import suppress

import torch
from torch.distributed import Backend, ProcessGroupGloo

from outrider.cluster.backends import DEVICE_BACKENDS

BACKEND = "polled_gloo"
DEAF = "deaf_gloo"
CONNECT_S = 30.0

_NOBODY_SENDS = 7


class Work:
    """Waits for a Gloo operation, whose own work is done only once somebody has waited for it.

    Its thread ends with the operation, which the peer's death and either side's abort end too.
    """

    def __init__(self, start):
        self._error = None
        self._thread = threading.Thread(target=self._run, args=(start,), daemon=True)
        self._thread.start()

    def _run(self, start):
        try:
            start().wait()
        except RuntimeError as error:
            self._error = error.with_traceback(None)  # which would keep this one alive

    def is_completed(self):
        return not self._thread.is_alive()

    def wait(self):
        self._thread.join()
        if self._error is not None:
            raise self._error


class DeafWork(Work):
    """Is never done once it has failed: a device's kernel goes on waiting for a peer that is gone."""

    def is_completed(self):
        return super().is_completed() and self._error is None


class Group:
    """Connects at its first operation, as NCCL does."""

    work = Work

    def __init__(self, store, rank, size, timeout):
        self._arguments = store, rank, size
        self._group, self._lock = None, threading.Lock()

    def _connected(self):
        with self._lock:
            if self._group is None:
                options = ProcessGroupGloo._Options()
                options._timeout = datetime.timedelta(seconds=CONNECT_S)
                options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
                options._threads = 1
                self._group = ProcessGroupGloo(*self._arguments, options)
            return self._group

    def send(self, tensors, peer, tag):
        group = self._connected()
        return self.work(lambda: group.send(tensors, peer, tag))

    def recv(self, tensors, peer, tag):
        group = self._connected()
        return self.work(lambda: group.recv(tensors, peer, tag))

    def abort(self):
        """A receive that times out closes the pair, which wakes whoever waits on it."""
        if self._group is not None:
            with suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.int32)
                peer = 1 - self._arguments[1]
                self._group.recv([nothing], peer, _NOBODY_SENDS).wait(datetime.timedelta(milliseconds=1))


class DeafGroup(Group):
    """Leaves an operation pending when the peer dies or aborts."""

    work = DeafWork


def register(name=BACKEND, make=Group, **options):
    """Register a backend, once a name. options: of Backend.register_backend."""
    if name not in Backend.backend_list:
        Backend.register_backend(name, make, devices=["cpu"], **options)
    DEVICE_BACKENDS[name] = "cpu"
    return name


register()
register(DEAF, DeafGroup)
