"""The wire of a device's memory, run with the CPU's: what ends it, and where it is refused. Links over it are in
tests/integration/test_link_processes.py."""

from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from outrider.cluster.backends import DEVICE_BACKENDS
from outrider.cluster.link import TransportClosed, TransportError, TransportTimeout
from outrider.cluster.link.rendezvous import check_device
from outrider.cluster.link.transport import DeviceTransport, _group_of_two
from tests.support.devices import cpu_device
from tests.unit.link.memory_transport import CAPACITY, frame

pytestmark = pytest.mark.timeout(300)

HANG_GUARD_S = 60.0
AGES_S = 1000.0


def wire(store, rank, backend=cpu_device.BACKEND, connect_timeout_s=HANG_GUARD_S, send_timeout_s=AGES_S):
    return DeviceTransport(
        store,
        rank,
        backend=backend,
        device="cpu",
        capacity_words=CAPACITY,
        connect_timeout_s=connect_timeout_s,
        send_timeout_s=send_timeout_s,
    )


def connected(**options):
    store, peer = HashStore(), queue.SimpleQueue()
    threading.Thread(target=lambda: peer.put(wire(store, 1, **options))).start()
    return wire(store, 0, **options), peer.get(timeout=HANG_GUARD_S)


@pytest.fixture
def ends(request):
    here, there = connected(**getattr(request, "param", {}))
    yield here, there
    here.abort()
    there.abort()


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
def test_frames_pass_both_ways_at_once(ends):
    received = np.zeros(CAPACITY, np.int32)
    assert {end.backend for end in ends} <= set(DEVICE_BACKENDS)
    for sequence in range(20):
        for sender, receiver in (ends, ends[::-1]):
            sent = frame(sequence)
            sending = threading.Thread(target=sender.start_send(sent[:40]))
            sending.start()
            receiver.recv(received, HANG_GUARD_S)
            sending.join(HANG_GUARD_S)
            assert np.array_equal(received[:40], sent[:40])


SILENT = {"send_timeout_s": 0.05}


@pytest.mark.parametrize(
    ("ends", "aborted"),
    [(SILENT, False), (SILENT | {"backend": cpu_device.DEAF}, True)],
    indirect=["ends"],
    ids=["silent", "aborted-unnoticed"],
)
def test_the_first_failure_is_what_both_directions_tell(ends, aborted):
    """Whichever thread speaks first, the link's reason is the deadline, and not that this side gave up. An abort of the
    peer that the wire does not notice is silence."""
    here, there = ends
    outcome = queue.SimpleQueue()

    def receive():
        try:
            here.recv(np.zeros(CAPACITY, np.int32), AGES_S)
        except TransportError as error:
            outcome.put(error)

    thread = threading.Thread(target=receive)
    thread.start()
    if aborted:
        there.abort()
    with pytest.raises(TransportTimeout, match="the peer sent nothing, or did not read"):
        here.start_send(np.zeros(CAPACITY, np.int32))()
    received = outcome.get(timeout=HANG_GUARD_S)
    thread.join()
    assert (type(received), str(received)) == (TransportTimeout, "the peer sent nothing, or did not read")
    here.abort()
    for call in (here.start_send, lambda buffer: here.recv(buffer, AGES_S)):
        with pytest.raises(TransportTimeout):
            call(np.zeros(CAPACITY, np.int32))


def test_a_peer_that_leaves_ends_it_at_once_and_for_good(ends):
    here, there = ends
    there.abort()
    with pytest.raises(TransportClosed) as first:
        here.recv(np.zeros(CAPACITY, np.int32), AGES_S)
    with pytest.raises(TransportClosed) as second:
        here.start_send(np.zeros(CAPACITY, np.int32))
    assert str(first.value) == str(second.value) != "aborted on this side"


class SlowToConnect(cpu_device.Group):
    """As NCCL, which takes seconds for it, where a send may take one."""

    def _connected(self):
        if self._group is None:
            time.sleep(0.5)
        return super()._connected()


SLOW = cpu_device.register("polled_gloo_slow", SlowToConnect)


@pytest.mark.parametrize("ends", [{"backend": SLOW, "send_timeout_s": 0.2}], indirect=True, ids=[""])
def test_to_connect_may_take_longer_than_a_send(ends):
    here, there = ends
    here._send_timeout_s = HANG_GUARD_S  # they have connected, and this one may wait for its reader
    thread = threading.Thread(target=here.start_send(frame(3)))
    thread.start()
    there.recv(received := np.zeros(CAPACITY, np.int32), HANG_GUARD_S)
    thread.join()
    assert np.array_equal(received, frame(3))


def test_a_peer_that_never_comes():
    with pytest.raises(TransportError, match=f"^{cpu_device.BACKEND}: no connection within 0.3 s$"):
        wire(HashStore(), 0, connect_timeout_s=0.3)


MEETING: list[threading.Barrier] = []
"""Of the directions' aborts."""


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
        end.abort()
        end.abort()
        assert WaitingGroup.aborts == aborts
        assert not MEETING[0].broken
        with pytest.raises(TransportClosed, match="aborted on this side"):
            end.start_send(frame(0))


@pytest.mark.parametrize(("backend", "device_type"), [("nccl", "cuda"), ("hccl", "npu"), ("xccl", "xpu")])
def test_a_backend_that_torch_has_not_is_refused_by_its_name(backend, device_type):
    if torch.distributed.is_backend_available(backend):
        pytest.skip("this torch has it")
    assert DEVICE_BACKENDS[backend] == device_type
    reason = rf"^{backend} needs a device of torch's kind {device_type} on both ends, .* no such backend; use link"
    with pytest.raises(TransportError, match=reason):
        check_device(backend)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one here")
@pytest.mark.parametrize("device_type", ["npu", "cuda", "xpu"])
def test_a_device_that_is_not_there_is_refused_by_its_name(device_type):
    """One that torch does not know, and ones that it knows."""
    with pytest.raises(TransportError, match=f"gloo needs a device of torch's kind {device_type} .* there is none"):
        DeviceTransport.check("gloo", device_type)


def test_what_is_no_device_s_needs_none():
    for backend in ("auto", "local", "gloo", cpu_device.BACKEND):
        check_device(backend)


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this torch has no NCCL")
def test_nccl_may_take_one_block_of_the_gpu(monkeypatch):
    """The options are NCCL's own. Its groups cannot be made without a GPU."""

    class Group:
        Options = torch.distributed.ProcessGroupNCCL.Options

        def __init__(self, store, rank, size, options):
            self.config = options.config

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group)
    config = _group_of_two("nccl", HashStore(), 0).config
    assert (config.min_ctas, config.max_ctas) == (1, 1)
