"""Links that never come about: a side that stays away, a host that is not ours, NCCL without a device."""

import queue
import threading
import time

import pytest

from outrider.cluster.link import LinkError, join_link
from tests.integration.echo_peer import CAPACITY, HANG_S, SECRET, invite

pytestmark = pytest.mark.timeout(120)


def test_verifier_whose_drafter_never_comes():
    invitation, complete = invite(1, "lonely")
    with pytest.raises(LinkError, match=r"link of lonely, epoch 1: no drafter within 0\.3 s"):
        complete(0.3)
    with pytest.raises(LinkError, match="used up"):
        complete(0.3)
    with pytest.raises(LinkError, match=r"link of lonely, epoch 1: no answer at 127\.0\.0\.1"):
        join_link(invitation, SECRET, 5)


def test_drafter_whose_verifier_never_completes():
    invitation, complete = invite(1, "absent")
    with pytest.raises(LinkError, match=r"link of absent, epoch 1: no verifier within \d\.\d s"):
        join_link(invitation, SECRET, 2.0)  # long enough to reach the store of a busy machine
    del complete


def test_drafter_that_is_slow_to_look(monkeypatch):
    """The verifier leaves with its store as soon as it may; the drafter must have read what it needs by then."""
    import torch.distributed

    class SlowToLook(torch.distributed.PrefixStore):
        def wait(self, keys, *timeout):
            if keys == ["verifier/connected"]:
                time.sleep(0.5)
            super().wait(keys, *timeout)

    monkeypatch.setattr(torch.distributed, "PrefixStore", SlowToLook)
    invitation, complete = invite(1, "hasty")
    outcome = queue.SimpleQueue()

    def joins():
        try:
            outcome.put(join_link(invitation, SECRET, HANG_S))
        except LinkError as error:
            outcome.put(error)

    drafter = threading.Thread(target=joins)
    drafter.start()
    transport = complete(HANG_S)
    drafter.join(HANG_S)
    joined = outcome.get_nowait()
    assert not isinstance(joined, LinkError), joined
    joined.abort()
    transport.abort()


def test_host_that_is_not_ours():
    with pytest.raises(LinkError, match=r"'192\.0\.2\.1': cannot listen there"):
        invite(1, "v", host="192.0.2.1")


def cuda_is_there():
    import torch

    return torch.cuda.is_available()


@pytest.mark.skipif(cuda_is_there(), reason="needs a machine without CUDA")
def test_nccl_without_cuda_says_so():
    invitation, complete = invite(1, "cpu", backend="nccl")
    outcome = queue.SimpleQueue()

    def joins():
        try:
            join_link(invitation, SECRET, HANG_S)
        except LinkError as error:
            outcome.put(str(error))

    drafter = threading.Thread(target=joins)
    drafter.start()
    with pytest.raises(LinkError, match="nccl needs a CUDA device"):
        complete(HANG_S)
    drafter.join(HANG_S)
    assert outcome.get_nowait() == "nccl needs a CUDA device on both ends; use link.backend: gloo"


@pytest.mark.gpu
@pytest.mark.skipif(not cuda_is_there(), reason="needs a CUDA device")
def test_nccl_peer_never_comes():
    """All that one GPU can show: the groups are made, the deadline is ours, abort works, the process lives."""
    from torch.distributed import TCPStore

    from outrider.cluster.link.transport import NcclTransport

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    start = time.monotonic()
    with pytest.raises(LinkError, match="nccl"):
        NcclTransport(store, 0, device="cuda:0", capacity_words=CAPACITY, connect_timeout_s=5, send_timeout_s=1)
    assert time.monotonic() - start < HANG_S
