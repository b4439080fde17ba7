"""API keys through Serve's proxies: no key, a wrong one, an expired one, one over its limit, another's request."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from openai import AuthenticationError, InternalServerError, OpenAI, RateLimitError
from ray.serve.generated import serve_pb2

from outrider.actors.serving.access.budget import BASE_S
from outrider.actors.serving.access.keys import Key, as_entry, hash_of, new_secret
from outrider.cluster.limits import LimitsConfig
from outrider.deploy.client.sync_client import OutriderClient, OutriderError
from tests.security.served import MODEL, Server, served
from tests.serving import wait_until

pytestmark = pytest.mark.timeout(300)

CODE = grpc.StatusCode
PAST = datetime.now(UTC) - timedelta(hours=1)
KEYS = {
    "alice": {"scopes": ("generate",)},
    "bob": {"scopes": ("generate",)},
    "ops": {"scopes": ("status",)},
    "root": {"scopes": ("admin",)},
    "old": {"scopes": ("generate",), "expires": PAST},
    "slow": {"scopes": ("generate",), "requests_per_minute": 2},
    "slow_http": {"scopes": ("generate",), "requests_per_minute": 2},
    "narrow": {"scopes": ("generate",), "concurrent_requests": 1},
    "frugal": {"scopes": ("generate",), "tokens_per_minute": 5},
    "clumsy": {"scopes": ("generate",)},
}
REFUSED_SECONDS = 1.0


@dataclass(frozen=True)
class Keyed:
    server: Server
    path: Path
    secrets: dict[str, str]

    def client(self, name: str | None) -> OutriderClient:
        return OutriderClient(self.server.grpc_address, api_key="" if name is None else self.secrets.get(name, name))

    def get(self, path: str, name: str | None = None, **more: object) -> httpx.Response:
        headers = {} if name is None else {"authorization": f"Bearer {self.secrets.get(name, name)}"}
        return httpx.get(self.server.url + path, headers=headers, timeout=30, **more)

    def post(self, path: str, body: object, name: str | None = None) -> httpx.Response:
        headers = {} if name is None else {"authorization": f"Bearer {self.secrets.get(name, name)}"}
        return httpx.post(self.server.url + path, json=body, headers=headers, timeout=30)

    def write(self, **changes: dict[str, object] | None) -> None:
        entries = {**KEYS, **changes}
        text = "".join(
            as_entry(Key(name=name, hash=hash_of(self.secrets[name].encode()), **more))
            for name, more in entries.items()
            if more is not None
        )
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text)
        fresh.chmod(0o600)
        fresh.replace(self.path)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    directory = tmp_path_factory.mktemp("keys")
    path, secrets = directory / "keys.yaml", {name: new_secret() for name in KEYS}
    Keyed(None, path, secrets).write()  # type: ignore[arg-type]
    limits = LimitsConfig(refused_seconds_per_minute=REFUSED_SECONDS)
    with served(directory, limits, keys_file=str(path), tenant_isolation=True, docs=False) as server:
        yield Keyed(server, path, secrets)


def refusal(call) -> OutriderError:
    with pytest.raises(OutriderError) as caught:
        call()
    return caught.value


def test_grpc_takes_the_right_key_and_no_other(keyed):
    with keyed.client("alice") as alice:
        assert alice.generate("hello").text == "one three"
        assert alice.model_info().model
    for name, reason in ((None, "NO_KEY"), ("outrider_wrong", "WRONG_KEY"), ("old", "KEY_EXPIRED")):
        with keyed.client(name) as client:
            for call in (lambda c=client: c.generate("hello"), client.status, client.model_info):
                error = refusal(call)
                assert (error.code, error.reason) == (CODE.UNAUTHENTICATED, reason)
            assert client.healthy()


def test_http_takes_the_right_key_and_no_other(keyed):
    body = {"text": "hello"}
    assert keyed.post("/outrider/v1/stream", body, "alice").status_code == 200
    for name in (None, "outrider_wrong", "old"):
        refused = keyed.post("/outrider/v1/stream", body, name)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["type"] == "AuthenticationError"
        for path in ("/v1/models", "/metrics", "/outrider/v1/status", "/version", "/-/routes", "/nothing"):
            assert keyed.get(path, name).status_code == 401, path
        for path in ("/", "/health", "/outrider/page/page.js"):
            assert keyed.get(path, name).status_code == 200, path


def test_openais_client_sends_it_as_it_always_does(keyed):
    with pytest.raises(AuthenticationError, match="no key that is known"):
        OpenAI(base_url=keyed.server.url + "/v1", api_key="none", max_retries=0).models.list()
    client = OpenAI(base_url=keyed.server.url + "/v1", api_key=keyed.secrets["slow_http"], max_retries=0)
    for _ in range(2):
        with pytest.raises(InternalServerError):  # the scripted target has no OpenAI endpoints
            client.responses.create(model=MODEL, input="x")
    with pytest.raises(RateLimitError):
        client.responses.create(model=MODEL, input="x")
    with pytest.raises(RateLimitError) as reached:
        client.completions.create(model=MODEL, prompt="x")
    assert int(reached.value.response.headers["retry-after"]) >= 1
    assert "requests_per_minute (2)" in str(reached.value)


def test_a_scope_is_for_its_calls_alone(keyed):
    with keyed.client("ops") as ops, keyed.client("alice") as alice, keyed.client("root") as root:
        assert refusal(lambda: ops.generate("hello")).code is CODE.PERMISSION_DENIED
        assert refusal(alice.status).code is CODE.PERMISSION_DENIED
        assert root.generate("hello").text
    assert keyed.get("/metrics", "alice").status_code == 403
    assert keyed.get("/metrics", "ops").status_code == 200
    for path, body in (("/outrider/v1/stream", {"text": "x"}), ("/v1/responses", {"input": "x"})):
        assert keyed.post(path, body, "ops").status_code == 403


def test_what_serve_adds_itself_takes_a_key_for_status(keyed):
    request = serve_pb2.ListApplicationsRequest().SerializeToString()

    def listed(name: str | None) -> list[str]:
        metadata = () if name is None else (("authorization", f"Bearer {keyed.secrets[name]}"),)
        with grpc.insecure_channel(keyed.server.grpc_address) as channel:
            call = channel.unary_unary("/ray.serve.RayServeAPIService/ListApplications")
            answer = call(request, metadata=metadata, timeout=30)
        return list(serve_pb2.ListApplicationsResponse.FromString(answer).application_names)

    for name, code in ((None, CODE.UNAUTHENTICATED), ("alice", CODE.PERMISSION_DENIED)):
        with pytest.raises(grpc.RpcError) as refused:
            listed(name)
        assert refused.value.code() is code
    assert listed("ops") == listed("root") == ["outrider"]


def test_a_key_over_its_limits_is_refused_and_others_are_not(keyed):
    with keyed.client("slow") as slow, keyed.client("alice") as alice:
        for _ in range(2):
            slow.generate("hello")
        error = refusal(lambda: slow.generate("hello"))
        assert (error.code, error.reason) == (CODE.RESOURCE_EXHAUSTED, "REQUESTS_PER_MINUTE")
        assert alice.generate("hello").text
    with keyed.client("narrow") as narrow, narrow.stream("hang", request_id="narrow-1") as stream:
        next(stream)
        assert refusal(lambda: narrow.generate("hello")).reason == "CONCURRENT_REQUESTS"
        assert narrow.abort("narrow-1") in (True, False)
    with keyed.client("frugal") as frugal:
        frugal.generate("hello")  # 5 tokens of prompt and 4 of answer
        assert refusal(lambda: frugal.generate("hello")).reason == "TOKENS_PER_MINUTE"


def test_a_key_that_goes_on_sending_what_is_refused_is_refused_early_and_comes_back(keyed):
    """A call costs 2 ms at least, so that a second is spent after 500 of them at most."""
    with keyed.client("clumsy") as clumsy, keyed.client("alice") as alice, keyed.client(None) as probe:
        reasons = []
        while "REFUSED_TOO_OFTEN" not in reasons:
            reasons.append(refusal(lambda: clumsy.generate("refuse")).reason)
            assert len(reasons) <= 2 * REFUSED_SECONDS / BASE_S, "it never is"
        assert set(reasons[:-1]) == {"INVALID_REQUEST"}
        print(f"refused for it after {len(reasons) - 1} calls that were refused themselves")
        assert alice.generate("hello").text == "one three"
        assert probe.healthy()
        assert keyed.get("/health").status_code == 200
        assert refusal(lambda: probe.generate("hello")).reason == "NO_KEY"

        def is_back() -> bool:
            try:
                return clumsy.generate("hello").text == "one three"
            except OutriderError as error:
                if error.reason != "REFUSED_TOO_OFTEN":
                    raise
                return False

        wait_until(is_back, 90, "it is back")


def answer_to_abort(client, request_id):
    """None while a replica that is asked for it does not answer."""
    try:
        return "ended" if client.abort(request_id) else "not there"
    except OutriderError as error:
        if error.code is not CODE.UNAVAILABLE:
            raise
        return None


def test_a_request_is_ended_by_the_key_that_asked_and_by_an_admin(keyed):
    for number, ends in enumerate(("alice", "root")):
        request_id = f"r-{number}"
        with (
            keyed.client("alice") as alice,
            keyed.client("bob") as bob,
            keyed.client(ends) as ender,
            alice.stream("hang", request_id=request_id) as stream,
        ):
            next(stream)
            assert not bob.abort(request_id)
            assert wait_until(lambda c=bob: answer_to_abort(c, "of-nobody"), 30, "word of every replica") == "not there"
            assert not (keyed.server.meeting_point / f"{request_id}.cancelled").exists()
            over = threading.Thread(target=lambda s=stream: list(s))
            over.start()
            assert ender.abort(request_id)
            over.join(30)
            assert not over.is_alive()


def test_nothing_is_read_of_a_body_that_no_key_came_with(keyed):
    """The answer is there while the client has sent none of the megabytes that it announced."""
    with socket.create_connection(("127.0.0.1", keyed.server.serving.http_port), timeout=30) as connection:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 1000000\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 401")


def test_no_message_is_read_of_a_call_that_no_key_came_with(keyed):
    with grpc.insecure_channel(keyed.server.grpc_address) as channel:
        silent = threading.Event()

        def messages():
            silent.wait(60)
            yield b""

        call = channel.stream_stream("/outrider.v1.GenerationService/GenerateStream")(messages(), timeout=30)
        try:
            with pytest.raises(grpc.RpcError) as refused:
                next(call)
            assert refused.value.code() is CODE.UNAUTHENTICATED
        finally:
            silent.set()


def test_the_file_is_read_again_and_a_wrong_one_leaves_the_keys_as_they_are(keyed):
    with keyed.client("bob") as bob:
        assert bob.generate("hello").text
        keyed.write(bob=None)

        def is_out() -> bool:
            try:
                bob.generate("hello")
            except OutriderError as error:
                return error.reason == "WRONG_KEY"
            return False

        wait_until(is_out, 30, "bob is out")
        keyed.path.write_text("- name: [")
        wait_until(
            lambda: "outrider:keys_stale 1" in keyed.get("/metrics", "ops").text, 30, "the metric tells of a wrong file"
        )
        with keyed.client("alice") as alice:
            assert alice.generate("hello").text
        assert is_out()
        keyed.write()
        wait_until(lambda: not is_out(), 30, "bob is back")
        # Each process reads the file by itself.
        wait_until(
            lambda: "outrider:keys_stale 0" in keyed.get("/metrics", "ops").text, 30, "nothing is wrong any more"
        )


def test_metrics_count_by_key_and_logs_have_no_secret(keyed):
    text = keyed.get("/metrics", "ops").text
    assert 'outrider:key_requests_total{key="alice"}' in text
    assert 'outrider:key_tokens_total{key="frugal",kind="prompt"} 5' in text
    assert 'outrider:key_tokens_total{key="frugal",kind="completion"} 4' in text
    assert 'outrider:key_refusals_total{key="frugal",reason="TOKENS_PER_MINUTE"} 1' in text
    import ray

    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    told = "".join(path.read_text(errors="replace") for path in logs.rglob("*.log"))
    assert "refused: reason=KEY_EXPIRED key=old api=grpc call=/outrider.v1.GenerationService/Generate" in told
    assert "refused: reason=WRONG_KEY key=- api=http" in told
    assert not [name for name, secret in keyed.secrets.items() if secret in told]
    assert "outrider_wrong" not in told


def test_docs_can_be_switched_off(keyed):
    assert keyed.get("/openapi.json", "alice").status_code == 404


def test_both_ports_listen_where_host_says_and_nowhere_else(keyed):
    ports = {keyed.server.serving.grpc_port, keyed.server.serving.http_port}
    listening = {
        (each.laddr.ip.removeprefix("::ffff:"), each.laddr.port)  # gRPC binds IPv4 by its IPv6 name
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port in ports
    }
    assert listening == {("127.0.0.1", port) for port in ports}
