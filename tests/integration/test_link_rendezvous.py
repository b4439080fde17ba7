"""Which wire a link gets, who may be its other end, and links that never come about."""

import os
import queue
import socket
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from outrider.cluster.backends import DEVICE_BACKENDS
from outrider.cluster.link import LinkError, WireError, host_link, join_link
from tests.integration.echo_peer import HANG_S, connected

pytestmark = pytest.mark.timeout(120)


def meet(address, complete, timeout_s=HANG_S):
    """Returns the wires, or errors, of verifier and drafter."""
    outcomes = {}

    def run(side, end):
        try:
            outcomes[side] = end()
        except LinkError as error:
            outcomes[side] = error

    drafter = threading.Thread(target=run, args=("drafter", lambda: join_link(address, timeout_s)))
    drafter.start()
    run("verifier", lambda: complete(timeout_s))
    drafter.join()
    for made in outcomes.values():
        if not isinstance(made, LinkError):
            made.end()
    return outcomes["verifier"], outcomes["drafter"]


def folder_of(address):
    return Path(address.endpoints[0].removeprefix("ipc://")).parent


def test_within_a_machine_it_is_ipc_in_a_folder_that_only_this_user_can_enter():
    address, complete = host_link(None, "auto")
    folder = folder_of(address)
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert [made.backend for made in meet(address, complete)] == ["ipc", "ipc"]
    assert not folder.exists()


def test_where_no_socket_can_be_made_it_is_tcp(monkeypatch, tmp_path):
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    assert [made.backend for made in meet(*host_link(None, "auto"))] == ["tcp", "tcp"]


def test_for_another_machine_it_is_tcp():
    assert [made.backend for made in meet(*host_link("127.0.0.1", "auto"))] == ["tcp", "tcp"]


def test_whoever_was_not_invited_is_ignored_and_the_drafter_gets_the_link():
    address, complete = host_link("127.0.0.1", "auto")
    with pytest.raises(LinkError, match="no connection"):
        join_link(replace(address, key=zmq.curve_keypair()[0]), 0.5)
    assert [each.backend for each in meet(address, complete)] == ["tcp", "tcp"]


def test_a_stranger_who_leaves_a_tcp_port_does_not_end_the_link():
    here, there = connected("tcp")
    for _ in range(3):
        for endpoint in here.addresses:
            socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2]))).close()
    assert here.recv(0.5) is None
    there.send(b"still here")
    assert here.recv(HANG_S) == b"still here"
    there.end()
    with pytest.raises(WireError, match="the peer is gone"):
        here.recv(HANG_S)
    here.end()


def test_a_frame_between_machines_is_not_to_be_read_on_its_way():
    """All that passes a proxy between the ends."""
    address, complete = host_link("127.0.0.1", "auto")
    passed, listeners, endpoints = bytearray(), [], []

    def carry(source, sink):
        while data := source.recv(65536):
            passed.extend(data)
            sink.sendall(data)

    def serve(listener, port):
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=carry, args=(near, far), daemon=True).start()
        threading.Thread(target=carry, args=(far, near), daemon=True).start()

    for endpoint in address.endpoints:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        endpoints.append(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        port = int(endpoint.rpartition(":")[2])
        threading.Thread(target=serve, args=(listener, port), daemon=True).start()
    joined = queue.SimpleQueue()
    seen = replace(address, endpoints=tuple(endpoints))
    threading.Thread(target=lambda: joined.put(join_link(seen, HANG_S))).start()
    here, there = complete(HANG_S), joined.get(timeout=HANG_S)
    here.send(b"a text that nobody else may read")
    assert there.recv(HANG_S) == b"a text that nobody else may read"
    assert len(passed) > 500
    for secret in (b"that nobody else", address.key):
        assert secret not in passed
    here.end()
    there.end()
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_a_link_whose_other_end_never_comes(host):
    address, complete = host_link(host, "auto")
    with pytest.raises(LinkError, match=r"^no drafter: no connection within 0\.3 s"):
        complete(0.3)
    with pytest.raises(LinkError, match="no drafter"):
        complete(0.3)
    assert host or not folder_of(address).exists()
    with pytest.raises(LinkError, match=rf"^no verifier at {address.endpoints[0]}:.*: no connection within 0\.3 s"):
        join_link(address, 0.3)


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_an_invitation_that_is_dropped_leaves_nothing(host):
    address, complete = host_link(host, "auto")
    del complete
    if host is None:
        assert not folder_of(address).exists()
    else:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(address.endpoints[0].rpartition(":")[2])))


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
@pytest.mark.parametrize("backend", ["auto", "nccl"])
def test_host_that_is_not_ours(host, backend):
    with pytest.raises(LinkError, match=rf"cannot listen at .*{host}"):
        host_link(host, backend)


def cuda_is_there():
    import torch

    return torch.cuda.is_available()


@pytest.mark.skipif(cuda_is_there(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("backend", ["nccl", "hccl", "xccl"])
def test_a_drafter_without_the_device_of_a_device_s_wire_says_so(backend):
    address, _ = host_link(None, backend)
    with pytest.raises(LinkError, match=f"{backend} needs a device of torch's kind {DEVICE_BACKENDS[backend]} on both"):
        join_link(address, HANG_S)
