"""A wire made of two queues, and frames to put on it."""

import queue
import threading
import time

import numpy as np

from outrider.cluster.link import TransportClosed, TransportTimeout
from outrider.cluster.link.frame import FrameKind, encode

CAPACITY = 64
SOON_S = 60.0
"""Upper bound for what takes microseconds: a guard against hanging, not a measurement."""


class MemoryTransport:
    """One end of a pair of queues, with a Transport's contract."""

    backend = "memory"

    def __init__(self, inbound, outbound):
        self.inbound, self.outbound = inbound, outbound
        self.closed = False
        self.peer_reads = threading.Event()
        self.peer_reads.set()

    @classmethod
    def pair(cls):
        a, b = queue.SimpleQueue(), queue.SimpleQueue()
        return cls(a, b), cls(b, a)

    def start_send(self, buffer):
        return lambda: self.send(buffer)

    def send(self, buffer):
        self.peer_reads.wait()
        if self.closed:
            raise TransportClosed("aborted on this side")
        self.outbound.put(buffer.copy())

    def recv(self, buffer, timeout_s):
        if self.closed:
            raise TransportClosed("aborted on this side")
        try:
            frame = self.inbound.get(timeout=timeout_s)
        except queue.Empty:
            raise TransportTimeout("recv timed out") from None
        if frame is None:
            raise TransportClosed("peer is gone")
        buffer[: len(frame)] = frame

    def abort(self):
        self.closed = True
        self.peer_reads.set()
        self.inbound.put(None)
        self.outbound.put(None)


def words(*values):
    return np.array(values, dtype=np.int32)


def frame(sequence, kind=FrameKind.DATA, payload=(), epoch=1):
    buffer = np.zeros(CAPACITY, dtype=np.int32)
    encode(buffer, epoch=epoch, sequence=sequence, kind=kind, payload=words(*payload))
    return buffer


def until_broken(link):
    deadline = time.monotonic() + SOON_S
    while link.broken is None:
        assert time.monotonic() < deadline, "the link never broke"
        time.sleep(0.001)
    return link.broken
