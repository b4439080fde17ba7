"""What the NCCL wire calls without a GPU: its end."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from outrider.cluster.link.link import TransportClosed
from outrider.cluster.link.transport import NcclTransport

HANG_GUARD_S = 60.0


class Group:
    """One direction's, in place of torch's: its abort waits for the other's."""

    def __init__(self, meeting: threading.Barrier, ended: bool) -> None:
        self.meeting, self.ended = meeting, ended
        self.aborts = 0

    def abort(self) -> None:
        self.aborts += 1
        self.meeting.wait(HANG_GUARD_S)
        if self.ended:
            raise RuntimeError("NCCL error: remote process exited")


@pytest.mark.parametrize("ended", [False, True], ids=["", "ended before"])
def test_directions_that_wait_for_each_other_are_aborted_once(ended):
    meeting = threading.Barrier(2)
    groups = [Group(meeting, ended) for _ in range(2)]
    transport = NcclTransport.__new__(NcclTransport)
    transport._lock, transport._closed_because = threading.Lock(), None
    transport._out, transport._in = (SimpleNamespace(group=group) for group in groups)
    transport.abort()
    transport.abort()
    assert [group.aborts for group in groups] == [1, 1]
    assert not meeting.broken
    with pytest.raises(TransportClosed):
        transport.start_send(None)()
