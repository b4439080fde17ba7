"""The wire of a device's memory, run with the CPU's: what ends it, and where it is refused. Links over it are in
tests/integration/test_link_processes.py."""

from __future__ import annotations

import queue
import threading
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore

from outrider.cluster.backends import DEVICE_BACKENDS
from outrider.cluster.link import WireError
from outrider.cluster.link.device_wire import DeviceWire
from outrider.cluster.link.rendezvous import check_device
from tests.support.devices import cpu_device
from tests.support.threads import threads_end

pytestmark = pytest.mark.timeout(300)

HANG_GUARD_S = 60.0
AGES_S = 1000.0


def wire(store, rank, backend=cpu_device.BACKEND, connect_timeout_s=HANG_GUARD_S):
    return DeviceWire(store, rank, backend=backend, device="cpu", connect_timeout_s=connect_timeout_s)


def connected(**options):
    store, peer = HashStore(), queue.SimpleQueue()
    threading.Thread(target=lambda: peer.put(wire(store, 1, **options))).start()
    return wire(store, 0, **options), peer.get(timeout=HANG_GUARD_S)


@pytest.fixture
def ends(request):
    here, there = connected(**getattr(request, "param", {}))
    yield here, there
    here.end()
    there.end()


class Extended(cpu_device.Group):
    """Made as platforms with options of their own make theirs."""

    def __init__(self, options, of_the_backend):
        assert of_the_backend is None
        assert options.timeout > timedelta(days=1), "it would end a receive whose peer has nothing to say"
        assert options.global_ranks_in_group == [0, 1]
        assert options.group_id
        super().__init__(options.store, options.group_rank, options.group_size, options.timeout)


EXTENDED = cpu_device.register("polled_gloo_extended", Extended, extended_api=True)


@pytest.mark.parametrize("ends", [{"backend": cpu_device.BACKEND}, {"backend": EXTENDED}], indirect=True, ids=["", "x"])
@pytest.mark.parametrize("size", [0, 7, 16376, 16377, 100_000], ids=lambda size: f"{size} bytes")
def test_frames_pass_both_ways_in_as_many_tensors_as_they_need(ends, size):
    frames = [bytes([index]) * size for index in range(3)]
    for sender, receiver in (ends, ends[::-1]):
        for frame in frames:
            sender.send(frame)
        assert [receiver.recv(HANG_GUARD_S) for _ in frames] == frames


def test_a_receive_that_nothing_answers_stays_for_the_next_call(ends):
    here, there = ends
    assert here.recv(0.0) is None
    assert here.recv(0.01) is None
    there.send(b"late")
    assert here.recv(HANG_GUARD_S) == b"late"


@pytest.mark.parametrize(("size", "goes_on"), [(-1, 0), (1 << 20, 0)])
def test_a_tensor_that_holds_no_frame_ends_the_wire(ends, size, goes_on):
    here, there = ends
    way = there._way(there._rank)
    way.on_device[0], way.on_device[1] = size, goes_on
    way.group.send([way.on_device], there._peer, 0)
    with pytest.raises(WireError, match=r"^length: "):
        here.recv(HANG_GUARD_S)
    with pytest.raises(WireError, match=r"^length: "):
        here.send(b"x")


def test_a_peer_that_leaves_ends_it_at_once_and_for_good(ends):
    here, there = ends
    there.end()
    with pytest.raises(WireError) as first:
        here.recv(AGES_S)
    with pytest.raises(WireError) as second:
        here.send(b"x")
    assert str(first.value) == str(second.value) != "ended on this side"


def test_a_peer_that_never_comes(monkeypatch):
    monkeypatch.setattr(cpu_device, "CONNECT_S", 1.0)
    # A thread that torch gives back while the interpreter ends would abort the process.
    with (
        threads_end(HANG_GUARD_S),
        pytest.raises(WireError, match=f"^{cpu_device.BACKEND}: no connection within 0.3 s$"),
    ):
        wire(HashStore(), 0, connect_timeout_s=0.3)


MEETING: list[threading.Barrier] = []
"""Where the directions' aborts meet."""


class WaitingGroup(cpu_device.Group):
    """One direction's, whose abort waits for the other's and finds that it had ended before."""

    aborts = 0

    def abort(self):
        WaitingGroup.aborts += 1
        MEETING[0].wait(HANG_GUARD_S)
        super().abort()
        raise RuntimeError("NCCL error: remote process exited")


WAITING = cpu_device.register("polled_gloo_waiting", WaitingGroup)


def test_directions_that_wait_for_each_other_are_aborted_once():
    here, there = connected(backend=WAITING)
    WaitingGroup.aborts = 0
    for end, aborts in ((here, 2), (there, 4)):
        MEETING[:] = [threading.Barrier(2)]
        end.end()
        end.end()
        assert WaitingGroup.aborts == aborts
        assert not MEETING[0].broken
        with pytest.raises(WireError, match="ended on this side"):
            end.send(b"x")


class FailingGroup(cpu_device.Group):
    """Its first send connects. Any other is done because it has failed, as NCCL has it."""

    sends = 0

    def send(self, tensors, peer, tag):
        work = super().send(tensors, peer, tag)
        work._error = RuntimeError("NCCL error: unhandled system error") if self.sends else None
        self.sends += 1
        return work


FAILING = cpu_device.register("polled_gloo_failing", FailingGroup)


def test_a_send_that_has_failed_ends_the_wire():
    here, there = connected(backend=FAILING)
    here.send(b"x")
    assert there.recv(HANG_GUARD_S) == b"x"
    with pytest.raises(WireError, match=r"^NCCL error: unhandled system error$"):
        here.recv(HANG_GUARD_S)
    there.end()


@pytest.mark.parametrize(("backend", "device_type"), [("nccl", "cuda"), ("hccl", "npu"), ("xccl", "xpu")])
def test_a_backend_that_torch_has_not_is_refused_by_its_name(backend, device_type):
    if torch.distributed.is_backend_available(backend):
        pytest.skip("this torch has it")
    assert DEVICE_BACKENDS[backend] == device_type
    reason = rf"^{backend} needs a device of torch's kind {device_type} on both ends, .* no such backend; use link"
    with pytest.raises(WireError, match=reason):
        check_device(backend)
