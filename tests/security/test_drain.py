"""`outrider serve` on SIGTERM: what runs is finished, or cut when it takes too long, and nothing new is taken. Before
that, what a running server listens on."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.deploy.client.sync_client import OutriderClient, OutriderError
from outrider.deploy.ports import pick_free_port
from outrider.deploy.ray_cluster import WORKER_NICENESS
from outrider.v1 import generation_pb2 as pb
from tests.support.cluster.outrider_serve import ENDS_WITHIN_S, Served, outrider_serve
from tests.support.cluster.serving import HANG_GUARD_S, Models, wait_until
from tests.support.load.streams import Stream, join, under_way

pytestmark = [pytest.mark.exhaustive, pytest.mark.engine, pytest.mark.timeout(1200)]

PROMPT = list(b"round and round and round it goes")
MAX_TOKENS = 900
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@contextmanager
def running(server: Served, count: int) -> Iterator[list[Stream]]:
    """Streams of long answers that are under way."""
    with OutriderClient(server.grpc) as client:
        yield under_way(client, count, MAX_TOKENS, temperature=1.0, seed=3, speculation=False)


@pytest.fixture(scope="module")
def admin_port() -> int:
    return pick_free_port()


@pytest.fixture(scope="module")
def server(models: Models, tmp_path_factory: pytest.TempPathFactory, admin_port: int) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("drain")
    serving = {"drain_s": HANG_GUARD_S, "gateway": {"admin_port": admin_port}}
    # How its processes give way, which it sets by itself, is under test.
    environment = {WORKER_NICENESS[0]: None}
    with outrider_serve(models, directory, environment, serving=serving) as served:
        yield served


KINDS = {
    "RankProc": "Verifier",
    "Verifier": "Verifier",
    "Drafter": "Drafter",
    "gcs_server": "gcs_server",
    "ServeReplica": "ServeReplica",
    "ProxyActor": "ProxyActor",
    "dashboard/dashboard.py": "dashboard",
}
"""Kinds of processes by a part of their command lines. A busy actor is called by what it does."""


def kind_of(process: psutil.Process) -> str:
    line = " ".join(process.cmdline()) or process.name()
    return next((kind for part, kind in KINDS.items() if part in line), process.name())


def listening(server: Served) -> dict[str, set[tuple[str, int]]]:
    """Return every address that processes listen on, by their kind."""
    found: dict[str, set[tuple[str, int]]] = {}
    for process in server.tree():
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    host = each.laddr.ip.removeprefix("::ffff:")
                    found.setdefault(kind_of(process), set()).add((host, each.laddr.port))
    return found


def test_what_listens_beyond_this_machine_is_what_the_page_says(server: Served, admin_port: int) -> None:
    found = listening(server)
    print(found)
    beyond = {kind: {each for each in where if each[0] != "127.0.0.1"} for kind, where in found.items()}
    for rank in ("Verifier", "Drafter"):
        # Ray's own port of a worker. Stores, vLLM's groups and links are on loopback, where there is one machine.
        assert len(beyond[rank]) == 1, found[rank]
    assert found["dashboard"] - beyond["dashboard"], "its page is for this machine; what else it has is Ray's own"
    # Serve's proxies, behind the gateway, likewise: one port of HTTP's, one of gRPC's.
    assert len(beyond["ProxyActor"]) == 1, found["ProxyActor"]
    assert len(found["ProxyActor"]) >= 3, found["ProxyActor"]
    ports = {int(address.rpartition(":")[2]) for address in (server.grpc, server.http)}
    assert found["haproxy"] == {("127.0.0.1", port) for port in (*ports, admin_port)}


def test_no_process_gives_way_to_other_programs(server: Served) -> None:
    """Ray's workers would, to whatever runs on their machine: a busy neighbour took five sixths of a server's speed."""
    own, given_way = psutil.Process().nice(), {}
    for process in server.tree():
        with suppress(psutil.NoSuchProcess):
            if process.nice() > own:
                given_way[kind_of(process)] = process.nice()
    assert not given_way


def test_ray_s_ports_and_the_replicas_refuse_who_has_no_token(server: Served, admin_port: int) -> None:
    for kind in ("gcs_server", "ServeReplica"):
        answers = answers_to_strangers(server, kind)
        print(kind, answers)
        assert "UNAUTHENTICATED" in answers
        assert answers <= {"UNAUTHENTICATED", "UNAVAILABLE", "UNIMPLEMENTED"}, "a method that is not there runs nothing"


def test_metrics_and_status_are_on_the_admin_port_alone(server: Served, admin_port: int) -> None:
    with httpx.Client(trust_env=False, timeout=HANG_GUARD_S) as client:
        for path, there, here in (
            ("/metrics", 404, 200),
            ("/outrider/v1/status", 404, 200),
            ("/livez", 200, 200),
            ("/readyz", 200, 200),
            ("/v1/models", 200, 404),
            ("/stats", 404, 200),
        ):
            assert client.get(f"http://{server.http}{path}").status_code == there, path
            assert client.get(f"http://127.0.0.1:{admin_port}{path}").status_code == here, path


def test_running_answers_are_finished_and_new_ones_refused(server: Served, admin_port: int) -> None:
    with ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(server.grpc))
        http = stack.enter_context(httpx.Client(trust_env=False, timeout=HANG_GUARD_S))
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "readiness", "liveness"):
            asked = health_pb2.HealthCheckRequest(service=service)
            assert health.Check(asked, timeout=HANG_GUARD_S).status == SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=HANG_GUARD_S)
        assert next(watch).status == SERVING
        streams = stack.enter_context(running(server, 4))
        server.process.send_signal(signal.SIGTERM)

        def refuses() -> bool:
            try:
                http.get(f"http://{server.http}/livez")
            except httpx.TransportError:
                return True
            return False

        wait_until(refuses, HANG_GUARD_S, "no new connection")
        with OutriderClient(server.grpc) as late, pytest.raises(OutriderError) as refused:
            late.generate(PROMPT, max_tokens=4, timeout_s=HANG_GUARD_S)
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE
        assert not all(stream.finish_reason for stream in streams), "they were still running"
        assert join(streams) == []
        assert {stream.finish_reason for stream in streams} == {pb.FINISH_REASON_LENGTH}
        with suppress(grpc.RpcError):
            assert all(each.status == NOT_SERVING for each in watch), "who watches health does not hold it up"
    assert server.process.wait(ENDS_WITHIN_S) == 0
    assert any("requests running: 4" in line for line in server.said()), server.said()


def test_what_takes_longer_is_cut_and_told_so(models: Models, tmp_path: Path) -> None:
    """On a Ray whose processes speak TLS with each other: see also what its ports say to one that does not."""
    with outrider_serve(models, tmp_path, tls_environment(tmp_path), serving={"drain_s": 0.5}) as server:
        for kind in ("gcs_server", "ServeReplica"):
            assert answers_to_strangers(server, kind) == {"UNAVAILABLE"}, "plain text gets as far as to be answered"
        with running(server, 4) as streams:
            server.process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            cut = join(streams)
        assert server.process.wait(ENDS_WITHIN_S) == 0
        print(f"ended {time.monotonic() - began:.1f} s after the signal")
        assert {error.code for error in cut} == {grpc.StatusCode.UNAVAILABLE}, "none was cut, or told otherwise"
        assert {each.finish_reason for each in streams if not each.error} <= {pb.FINISH_REASON_LENGTH}
        assert any("ended unfinished" in line for line in server.said())


def tls_environment(directory: Path) -> dict[str, str]:
    """Return the environment of a Ray that uses TLS, with certificates of a CA of its own."""
    from ray._common.tls_utils import generate_self_signed_tls_certs

    certificate, key = generate_self_signed_tls_certs()
    files = {"RAY_TLS_SERVER_CERT": certificate, "RAY_TLS_SERVER_KEY": key, "RAY_TLS_CA_CERT": certificate}
    paths = {}
    for name, text in files.items():
        path = directory / f"{name.lower()}.pem"
        path.touch(mode=0o600)
        path.write_text(text)
        paths[name] = str(path)
    return {"RAY_USE_TLS": "1", **paths}


STRANGERS_CALLS = ("/ray.rpc.NodeInfoGcsService/CheckAlive", "/ray.serve.ASGIService/HandleRequest")
"""One that GCS answers, one that has a Serve replica unpickle what it is sent."""


def answers_to_strangers(server: Served, kind: str) -> set[str]:
    """Return the gRPC status codes with which the ports of such processes answer a stranger."""
    answers = set()
    for _, port in listening(server)[kind]:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            for method in STRANGERS_CALLS:
                try:
                    channel.unary_unary(method)(b"", timeout=30)
                    answers.add("OK")
                except grpc.RpcError as error:
                    answers.add(error.code().name)
    return answers
