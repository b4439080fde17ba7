"""Which wire a link gets, and links that never come about: a side that stays away, a host that is not ours, a device's
wire without a device, a local socket that is elsewhere."""

import logging
import queue
import socket
import threading
import time

import pytest

from outrider.cluster.link import LinkError, join_link, local_transport
from tests.integration.echo_peer import CAPACITY, HANG_S, SECRET, invite

pytestmark = pytest.mark.timeout(120)


def meet(invitation, complete, timeout_s=HANG_S):
    """The wires, or errors, of verifier and drafter."""
    outcomes = {}

    def run(side, end):
        try:
            transport = end()
            outcomes[side] = transport.backend
            transport.abort()
        except LinkError as error:
            outcomes[side] = error

    drafter = threading.Thread(target=run, args=("drafter", lambda: join_link(invitation, SECRET, timeout_s)))
    drafter.start()
    run("verifier", lambda: complete(timeout_s))
    drafter.join()
    return outcomes["verifier"], outcomes["drafter"]


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize(("asked", "wire"), [("auto", "local"), ("local", "local"), ("gloo", "gloo")])
def test_the_wire_within_a_machine(asked, wire, sealed):
    assert meet(*invite(1, "near", backend=asked, sealed=sealed)) == (wire, wire)


@pytest.fixture
def apart(monkeypatch, tmp_path):
    """What the drafter finds: another machine, or this one from where the verifier's socket is not to be seen."""

    def set_apart(how):
        if how == "machine":
            boot_id = tmp_path / "boot_id"
            boot_id.write_text("another\n")
            monkeypatch.setattr(local_transport, "_BOOT_ID", boot_id)
        else:
            listen = local_transport.listen
            monkeypatch.setattr(local_transport, "listen", lambda name: listen(f"{name}-in-another-container"))

    return set_apart


@pytest.mark.parametrize(("how", "said"), [("machine", 0), ("container", 1)])
def test_where_the_socket_does_not_reach_it_is_gloo_and_that_is_said_once(apart, how, said, caplog):
    caplog.set_level(logging.INFO)
    invitations = [invite(epoch, f"far-{how}", backend="auto") for epoch in (1, 2)]
    apart(how)
    for invitation, complete in invitations:
        assert meet(invitation, complete) == ("gloo", "gloo")
    lines = [record.getMessage() for record in caplog.records if f"far-{how}" in record.getMessage()]
    assert (
        lines
        == [
            f"far-{how} is on this machine, but its local socket cannot be reached from here, as from another "
            "container: Connection refused: Gloo carries its links"
        ]
        * said
    )


@pytest.mark.parametrize(
    ("how", "reason"),
    [("machine", "the verifier is on another machine"), ("container", "its local socket cannot be reached from here")],
)
def test_a_local_link_that_cannot_be_is_refused_by_name(apart, how, reason):
    invitation, complete = invite(1, "apart", backend="local")
    apart(how)
    verifier, drafter = meet(invitation, complete)
    advice = "link.backend: local is for two processes of one machine; set auto"
    assert str(verifier) == f"link of apart, epoch 1: the drafter is not where it could reach a local socket; {advice}"
    assert str(drafter).startswith(f"link of apart, epoch 1: {reason}")
    assert str(drafter).endswith(advice)


def test_no_local_link_where_there_are_no_such_sockets(monkeypatch, tmp_path):
    monkeypatch.setattr(local_transport, "_BOOT_ID", tmp_path / "none")
    with pytest.raises(LinkError, match=r"link\.backend: local needs Linux"):
        invite(1, "v", backend="local")
    assert meet(*invite(1, "v", backend="auto")) == ("gloo", "gloo")


@pytest.mark.parametrize("what", ["socket", "listen"])
def test_where_a_process_may_have_no_such_socket_it_is_gloo(monkeypatch, what):
    """As where a sandbox forbids them."""

    class Forbidden(socket.socket):
        def __init__(self, family=-1, *arguments, **named):
            if what == "socket" and family == socket.AF_UNIX:
                raise PermissionError("no such sockets here")
            super().__init__(family, *arguments, **named)

        def listen(self, *arguments):
            if self.family == socket.AF_UNIX:
                raise PermissionError("no such sockets here")
            super().listen(*arguments)

    monkeypatch.setattr(socket, "socket", Forbidden)
    assert meet(*invite(1, "v", backend="auto")) == ("gloo", "gloo")
    verifier, drafter = meet(*invite(2, "v", backend="local"), timeout_s=2.0)
    assert "no such sockets here; set link.backend: auto" in str(verifier)
    assert isinstance(drafter, LinkError)


def test_a_stranger_at_the_store_cannot_choose_the_wire(monkeypatch):
    """Only have the two disagree, and then there is no link."""
    from torch.distributed import PrefixStore, TCPStore

    dial = local_transport.dial

    def slow_dial(*arguments):
        time.sleep(1.0)  # the verifier believes the stranger meanwhile
        return dial(*arguments)

    monkeypatch.setattr(local_transport, "dial", slow_dial)
    invitation, complete = invite(1, "v", backend="auto")
    client = TCPStore(invitation.store_host, invitation.store_port, None, False, wait_for_workers=False)
    PrefixStore("link/1", client).set("drafter/wire", "gloo")
    outcomes = meet(invitation, complete, timeout_s=5.0)
    assert [isinstance(outcome, LinkError) for outcome in outcomes] == [True, True]


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
        join_link(invitation, SECRET, 5.0)  # long enough to reach the store of a busy machine
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
@pytest.mark.parametrize(("backend", "device"), [("nccl", "cuda"), ("hccl", "npu"), ("xccl", "xpu")])
def test_a_device_s_wire_without_a_device_says_so(backend, device):
    invitation, complete = invite(1, "cpu", backend=backend)
    outcome = queue.SimpleQueue()

    def joins():
        try:
            join_link(invitation, SECRET, HANG_S)
        except LinkError as error:
            outcome.put(str(error))

    drafter = threading.Thread(target=joins)
    drafter.start()
    needs = f"{backend} needs a device of torch's kind {device} on both ends"
    with pytest.raises(LinkError, match=needs):
        complete(HANG_S)
    drafter.join(HANG_S)
    assert outcome.get_nowait().startswith(needs)


@pytest.mark.gpu
@pytest.mark.skipif(not cuda_is_there(), reason="needs a CUDA device")
def test_nccl_peer_never_comes():
    """All that one GPU can show: the groups are made, the deadline is ours, abort works, the process lives."""
    from torch.distributed import TCPStore

    from outrider.cluster.link.transport import DeviceTransport

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    start = time.monotonic()
    with pytest.raises(LinkError, match="nccl"):
        DeviceTransport(
            store,
            0,
            backend="nccl",
            device="cuda:0",
            capacity_words=CAPACITY,
            connect_timeout_s=5,
            send_timeout_s=1,
        )
    assert time.monotonic() - start < HANG_S
