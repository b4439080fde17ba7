"""Which wire a link gets, who may be its other end, and links that never come about."""

import os
import queue
import socket
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.cluster.backends import DEVICE_BACKENDS
from outrider.cluster.link import LinkError, WireError, join_link
from outrider.cluster.link.frame import FrameKind, encode
from outrider.cluster.link.wire import Curve, HostWire
from tests.integration.echo_peer import HANG_S, connected, invite

pytestmark = pytest.mark.timeout(120)

TIMEOUT_S = 2.0


def meet(invitation, complete, seen=None, timeout_s=HANG_S):
    """Returns the wires, or errors, of verifier and drafter. seen: the invitation as the drafter has it."""
    outcomes = {}

    def run(side, end):
        try:
            outcomes[side] = end()
        except LinkError as error:
            outcomes[side] = error

    drafter = threading.Thread(target=run, args=("drafter", lambda: join_link(seen or invitation, timeout_s)))
    drafter.start()
    run("verifier", lambda: complete(timeout_s))
    drafter.join()
    for made in outcomes.values():
        if not isinstance(made, LinkError):
            made.end()
    return outcomes["verifier"], outcomes["drafter"]


def folder_of(invitation):
    return Path(invitation.local_addresses[0].removeprefix("ipc://")).parent


def test_within_a_machine_it_is_ipc_in_a_folder_that_only_this_user_can_enter():
    invitation, complete = invite(1, "near")
    folder = folder_of(invitation)
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert [made.backend for made in meet(invitation, complete)] == ["ipc", "ipc"]
    assert not folder.exists()


@pytest.mark.parametrize("how", ["elsewhere", "another user's", "no socket"])
def test_where_the_socket_is_not_to_be_reached_it_is_tcp(how, monkeypatch, tmp_path):
    """As from another container of the machine."""
    invitation, complete = invite(1, "near")
    seen = invitation
    if how == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: -1)
    else:
        path = tmp_path / "socket"
        if how == "no socket":
            path.touch()
        seen = replace(invitation, local_addresses=(f"ipc://{path}",) * 2)
    assert [made.backend for made in meet(invitation, complete, seen)] == ["tcp", "tcp"]


def test_where_no_socket_can_be_made_it_is_tcp(monkeypatch):
    bind = HostWire.bind

    def forbidden(wire, host=""):
        if wire.backend == "ipc":
            wire.end()
            raise WireError("no such sockets here")
        return bind(wire, host)

    monkeypatch.setattr(HostWire, "bind", forbidden)
    invitation, complete = invite(1, "v")
    assert invitation.local_addresses is None
    assert [made.backend for made in meet(invitation, complete)] == ["tcp", "tcp"]


def test_an_address_of_another_machine_is_offered_tcp_alone():
    own = socket.gethostbyname(socket.gethostname())
    if own.startswith("127."):
        pytest.skip("this machine has no other address")
    invitation, complete = invite(1, "v", host=own)
    assert invitation.local_addresses is None
    assert [made.backend for made in meet(invitation, complete)] == ["tcp", "tcp"]


@pytest.mark.parametrize(
    ("backend", "knows_key", "knows_token"), [("ipc", True, False), ("tcp", True, False), ("tcp", False, True)]
)
def test_whoever_was_not_invited_is_ignored_and_the_drafter_gets_the_link(backend, knows_key, knows_token):
    invitation, complete = invite(1, "v")
    near = invitation.local_addresses if backend == "ipc" else None
    key = invitation.key if knows_key else Curve.new().public
    stranger = HostWire(backend, None if near else Curve.new(server=key), listens=False)
    stranger.connect(near or invitation.addresses)
    stranger.send(encode(FrameKind.HELLO, 1, invitation.token if knows_token else bytes(32)))
    stranger.end(linger_s=0.5)
    made = meet(invitation, complete, replace(invitation, local_addresses=near))
    assert [each.backend for each in made] == [backend] * 2


def test_a_stranger_who_leaves_a_tcp_port_does_not_end_the_link():
    here, there = connected("tcp")
    port = here._receiver.last_endpoint.decode().rpartition(":")[2]
    for _ in range(3):
        socket.create_connection(("127.0.0.1", int(port))).close()
    assert here.recv(0.5) is None
    there.send(b"still here")
    assert here.recv(HANG_S) == b"still here"
    there.end()
    with pytest.raises(WireError, match="the peer is gone"):
        here.recv(HANG_S)
    here.end()


def test_a_frame_between_machines_is_not_to_be_read_on_its_way():
    """All that passes a proxy between the ends."""
    invitation, complete = invite(1, "v")
    passed, listeners, addresses = bytearray(), [], []

    def carry(source, sink):
        while data := source.recv(65536):
            passed.extend(data)
            sink.sendall(data)

    def serve(listener, port):
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=carry, args=(near, far), daemon=True).start()
        threading.Thread(target=carry, args=(far, near), daemon=True).start()

    for address in invitation.addresses:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        addresses.append(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        port = int(address.rpartition(":")[2])
        threading.Thread(target=serve, args=(listener, port), daemon=True).start()
    joined = queue.SimpleQueue()
    seen = replace(invitation, addresses=tuple(addresses), local_addresses=None)
    threading.Thread(target=lambda: joined.put(join_link(seen, HANG_S))).start()
    here, there = complete(HANG_S), joined.get(timeout=HANG_S)
    here.send(b"a text that nobody else may read")
    assert there.recv(HANG_S) == b"a text that nobody else may read"
    assert len(passed) > 500
    for secret in (b"that nobody else", invitation.token, invitation.key):
        assert secret not in passed
    here.end()
    there.end()
    for listener in listeners:
        listener.close()


def test_verifier_whose_drafter_never_comes():
    invitation, complete = invite(1, "lonely")
    with pytest.raises(LinkError, match=r"link of lonely, epoch 1: no drafter within 0\.3 s"):
        complete(0.3)
    with pytest.raises(LinkError, match="used up"):
        complete(0.3)
    assert not folder_of(invitation).exists()
    with pytest.raises(
        LinkError, match=r"link of lonely, epoch 1: no answer at tcp://127\.0\.0\.1:\d+: the peer is gone"
    ):
        join_link(invitation, HANG_S)


@pytest.mark.parametrize("changes", [{}, {"token": bytes(32)}, {"epoch": 2}], ids=["silent", "token", "epoch"])
def test_drafter_whose_verifier_does_not_answer(changes):
    invitation, complete = invite(1, "absent")
    hosted = []

    def host(complete=complete):
        try:
            hosted.append(complete(TIMEOUT_S))
        except LinkError as error:
            hosted.append(error)

    hosting = threading.Thread(target=host)
    if changes:
        hosting.start()
    with pytest.raises(LinkError, match=r"link of absent, epoch \d: no answer at ipc://"):
        join_link(replace(invitation, **changes), TIMEOUT_S / 2)
    if changes:
        hosting.join()
        assert isinstance(hosted[0], LinkError)


def test_an_invitation_that_is_dropped_leaves_nothing():
    invitation, complete = invite(1, "v")
    folder = folder_of(invitation)
    assert folder.exists()
    del complete
    assert not folder.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(invitation.addresses[0].rpartition(":")[2])))


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_host_that_is_not_ours(host):
    with pytest.raises(LinkError, match=rf"'{host}': cannot listen there"):
        invite(1, "v", host=host)


def cuda_is_there():
    import torch

    return torch.cuda.is_available()


@pytest.mark.skipif(cuda_is_there(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("backend", ["nccl", "hccl", "xccl"])
def test_a_device_s_wire_without_a_device_says_so_at_both_ends(backend):
    needs = f"{backend} needs a device of torch's kind {DEVICE_BACKENDS[backend]} on both ends"
    assert [str(error).startswith(needs) for error in meet(*invite(1, "cpu", backend=backend))] == [True, True]
