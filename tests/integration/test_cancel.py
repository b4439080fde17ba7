"""A client that goes away, in every way it can, frees what its request held in engine and drafter, long before the
request would have come to its end."""

import socket
import struct
import threading

import grpc
import pytest

from outrider.deploy.client.sync_client import OutriderClient, OutriderError
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc
from tests.serving import HANG_GUARD_S, MAX_MODEL_LEN, drafted, ended_early, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = list(b"Once upon a time there was a request that nobody waited for. " * 4)
TO_GO = MAX_MODEL_LEN - len(PROMPT)


@pytest.fixture
def freed(pair):
    """Use around what ends a stream. Afterwards everything is free, and the next request is served and drafted for."""
    with ended_early(pair, TO_GO):
        yield
    assert pair.drafter_status()["num_sequences"] == 0
    answer = drafted(lambda: pair.client.generate(PROMPT, temperature=0.0, max_tokens=24))
    pair.reference.check(PROMPT, answer.token_ids, label="the next request")


def is_running(pair):
    """Both sides hold the request."""
    status = pair.status()
    return (
        status.target.running == status.drafter.running == 1
        and status.target.kv_cache_usage > 0
        and status.drafter.kv_cache_usage > 0
    )


def started(pair, client):
    """A stream that is under way, in engine and drafter, with hundreds of tokens to go."""
    stream = client.stream(PROMPT, temperature=0.0)
    for _ in range(3):
        next(stream)
    wait_until(lambda: is_running(pair), HANG_GUARD_S, "both sides hold it", every_s=0.01)
    return stream


@pytest.mark.usefixtures("freed")
def test_the_client_cancels(pair):
    started(pair, pair.client).close()


@pytest.mark.usefixtures("freed")
def test_the_client_closes_its_channel(pair):
    client = OutriderClient(pair.address)
    stream = started(pair, client)
    client.close()
    with pytest.raises(OutriderError) as caught:
        list(stream)
    assert caught.value.code is grpc.StatusCode.CANCELLED


@pytest.mark.usefixtures("freed")
def test_a_unary_call_is_cancelled(pair):
    with grpc.insecure_channel(pair.address) as channel:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
        request.sampling.temperature = 0.0
        call = rpc.GenerationServiceStub(channel).Generate.future(request)
        wait_until(lambda: is_running(pair), HANG_GUARD_S, "the request runs", every_s=0.01)
        call.cancel()


@pytest.mark.usefixtures("freed")
def test_the_deadline_in_the_request_passes(pair):
    """No gRPC deadline: it is the server that ends the stream."""
    with grpc.insecure_channel(pair.address) as channel:
        request = pb.GenerateStreamRequest(token_ids=pb.TokenIds(ids=PROMPT), timeout_ms=250)
        request.sampling.temperature = 0.0
        received = []
        with pytest.raises(grpc.RpcError) as caught:
            received.extend(rpc.GenerationServiceStub(channel).GenerateStream(request))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.usefixtures("freed")
def test_the_client_s_own_deadline_passes(pair):
    stream = pair.client.stream(PROMPT, temperature=0.0, timeout_s=0.25)
    with pytest.raises(OutriderError) as caught:
        list(stream)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


class Cable:
    """A TCP connection to a server that can be cut: no goodbye, the server sees a reset."""

    def __init__(self, address):
        host, port = address.split(":")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._upstream = (host, int(port))
        self._ends = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        near, _ = self._listener.accept()
        far = socket.create_connection(self._upstream)
        self._ends = [near, far]
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pump(source, sink):
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            return

    def cut(self):
        self._listener.close()
        for end in self._ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.shutdown(socket.SHUT_RD)  # wakes the thread that reads here
            end.close()


@pytest.mark.usefixtures("freed")
def test_the_connection_drops(pair):
    cable = Cable(pair.address)
    with OutriderClient(cable.address) as client:
        stream = started(pair, client)
        cable.cut()
        with pytest.raises(OutriderError) as caught:
            list(stream)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
