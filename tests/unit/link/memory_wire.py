"""A wire made of two queues, and frames to put on it."""

import queue
import time

from outrider.cluster.link import WireError
from outrider.cluster.link.link import HEADER, FrameKind

SOON_S = 60.0
"""Upper bound for what takes microseconds: a guard against hanging, not a measurement."""


class MemoryWire:
    """One end of a pair of queues, with the contract of a Wire."""

    backend = "memory"

    def __init__(self, inbound, outbound):
        self.inbound, self.outbound = inbound, outbound
        self.is_ended = False
        self.is_full = False
        self.lingered_s = None

    @classmethod
    def pair(cls):
        a, b = queue.SimpleQueue(), queue.SimpleQueue()
        return cls(a, b), cls(b, a)

    def send(self, frame):
        if self.is_ended or self.is_full:
            raise WireError("the peer does not read")
        self.outbound.put(frame)

    def recv(self, timeout_s):
        if self.is_ended:
            raise WireError("ended on this side")
        try:
            frame = self.inbound.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if frame is None:
            raise WireError("the peer is gone")
        return frame

    def end(self, linger_s=0.0):
        self.is_ended, self.lingered_s = True, linger_s
        self.inbound.put(None)
        self.outbound.put(None)


def frame(kind=FrameKind.DATA, payload=b""):
    return HEADER.pack(kind, 0) + payload


def until(condition):
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def until_broken(link):
    until(lambda: link.broken is not None)
    return link.broken
