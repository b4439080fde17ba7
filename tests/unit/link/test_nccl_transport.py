"""What the NCCL wire calls without a GPU: the order of its ends."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from outrider.cluster.link.link import TransportClosed
from outrider.cluster.link.transport import NcclTransport


class Group:
    """One direction's, in place of torch's."""

    def __init__(self, name: str, calls: list[str], ended: bool) -> None:
        self.name, self.calls, self.ended = name, calls, ended

    def _group_start(self) -> None:
        self.calls.append("start")

    def _group_end(self) -> None:
        self.calls.append("end")

    def abort(self) -> None:
        self.calls.append(self.name)
        if self.ended:
            raise RuntimeError("NCCL error: remote process exited")


@pytest.mark.parametrize("ended", [False, True], ids=["", "ended before"])
def test_both_directions_are_aborted_in_one_group_call_and_once(ended):
    calls: list[str] = []
    transport = NcclTransport.__new__(NcclTransport)
    transport._lock, transport._closed_because = threading.Lock(), None
    transport._out, transport._in = (SimpleNamespace(group=Group(name, calls, ended)) for name in ("out", "in"))
    transport.abort()
    transport.abort()
    assert calls == ["start", "out", "in", "end"]
    with pytest.raises(TransportClosed):
        transport.start_send(None)()
