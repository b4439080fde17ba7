"""OpenAI's endpoints over the real app, before a scripted target."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack

import pytest
from fastapi import FastAPI
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError
from starlette.testclient import TestClient

from outrider.actors.openai_calls import OpenAIHead, OpenAIRequest
from outrider.actors.replica_calls import ReplicaLost
from outrider.actors.serving.access.guard import CALLER, Caller
from outrider.actors.serving.access.keys import Key, hash_of
from outrider.actors.serving.admission import Admission
from outrider.actors.serving.http.app import add_error_handlers
from outrider.actors.serving.http.routes import HttpContext, add_openai_routes, ask
from outrider.actors.serving.openai.errors import HttpError
from outrider.cluster.limits import LimitsConfig

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
EVENTS = OpenAIHead(200, "text/event-stream")


class Call:
    def __init__(self, parts):
        self._parts, self.cancelled = parts, False

    async def __aiter__(self):
        for part in self._parts:
            await asyncio.sleep(0)
            if isinstance(part, Exception):
                raise part
            if part is None:
                await asyncio.sleep(60)
            yield part

    def cancel(self):
        self.cancelled = True


class Target:
    """A handle. answers: the parts of each call in turn; exceptions are raised, None never comes."""

    def __init__(self, *answers):
        self._answers = list(answers)
        self.requests, self.calls = [], []

    @property
    def openai(self):
        return self

    def options(self, stream):
        assert stream
        return self

    def remote(self, request):
        self.requests.append(request)
        self.calls.append(Call(self._answers.pop(0)))
        return self.calls[-1]


def client(target):
    app = FastAPI()
    add_error_handlers(app)
    add_openai_routes(app, HttpContext(target, "tiny", 4, 1, None, None, limits=LimitsConfig(max_request_bytes=1024)))
    return TestClient(app, raise_server_exceptions=False)


def error(response):
    assert set(response.json()) == {"error"}
    return response.json()["error"]


def test_an_answer_passes_through():
    target = Target([OpenAIHead(200), '{"a": ', "1}"])
    response = client(target).post("/v1/chat/completions", json={**CHAT, "user": "me"}, headers={"x-request-id": "r1"})
    assert (response.status_code, response.json()) == (200, {"a": 1})
    assert response.headers["content-type"] == "application/json"
    [request] = target.requests
    assert (request.endpoint, request.body, request.request_id) == ("chat", CHAT, "r1")


def test_the_targets_refusal_passes_through():
    response = client(Target([OpenAIHead(404), '{"error": {}}'])).post("/v1/completions", json={"prompt": "a"})
    assert (response.status_code, response.json()) == (404, {"error": {}})


def test_a_stream_passes_through():
    target = Target([EVENTS, "data: 1\n\n", "data: [DONE]\n\n"])
    response = client(target).post("/v1/completions", json={"prompt": "a", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    assert response.text == "data: 1\n\ndata: [DONE]\n\n"


def test_a_stream_that_breaks_says_so():
    target = Target([EVENTS, "data: 1\n\n", ActorDiedError()])
    response = client(target).post("/v1/completions", json={"prompt": "a", "stream": True})
    first, broken, done, rest = response.text.split("\n\n")
    assert (response.status_code, first, done, rest) == (200, "data: 1", "data: [DONE]", "")
    assert json.loads(broken.removeprefix("data: "))["error"]["code"] == 503
    assert target.calls[0].cancelled


def test_a_responses_stream_that_breaks_says_so_as_such_streams_do():
    target = Target([EVENTS, "event: a\ndata: 1\n\n", ActorDiedError()])
    response = client(target).post("/v1/responses", json={"input": "a", "stream": True})
    _, broken, rest = response.text.split("\n\n")
    assert rest == ""
    name, data = broken.split("\n")
    body = json.loads(data.removeprefix("data: "))
    assert (name, body["type"], body["sequence_number"], body["error"]["code"]) == ("event: error", "error", 1, 503)
    assert target.requests[0].endpoint == "responses"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "resp_1"), ("DELETE", "resp_1"), ("POST", "resp_1/cancel"), ("GET", "resp_1/input_items")],
)
def test_no_response_is_stored(method, path):
    answer = client(Target()).request(method, f"/v1/responses/{path}")
    assert (answer.status_code, error(answer)["param"]) == (404, "response_id")
    assert "not stored here" in error(answer)["message"]


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), 429),
        (ActorDiedError(), 503),
        (ReplicaLost("a", "dead"), 503),
        (TimeoutError(), 408),
        (RuntimeError("a secret of the inside"), 500),
    ],
)
def test_failures_before_the_answer(raised, status):
    response = client(Target([raised], [raised])).post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == error(response)["code"] == status
    assert "secret" not in response.text
    assert ("retry-after" in response.headers) == (status in (429, 503))


def test_what_the_target_says_beside_its_status_reaches_the_client():
    target = Target([OpenAIHead(429, headers={"Retry-After": "7"}), "{}"])
    response = client(target).post("/v1/chat/completions", json=CHAT)
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")


def test_a_request_whose_replica_is_lost_goes_to_another():
    target = Target([ReplicaLost("a", "dead")], [OpenAIHead(200), "{}"])
    assert client(target).post("/v1/completions", json={"prompt": "a"}).status_code == 200
    assert [request.avoid_replicas for request in target.requests] == [(), ("a",)]


def test_a_request_that_has_begun_does_not():
    target = Target([EVENTS, ReplicaLost("a", "dead")])
    response = client(target).post("/v1/completions", json={"prompt": "a", "stream": True})
    assert response.status_code == 200
    assert len(target.requests) == 1


def test_the_deadline_is_watched_here_too():
    target = Target([None])
    response = client(target).post("/v1/completions", json={"prompt": "a"}, headers={"x-request-timeout-ms": "20"})
    assert response.status_code == error(response)["code"] == 408
    assert target.calls[0].cancelled


def test_the_deadline_ends_a_stream():
    target = Target([EVENTS, "data: 1\n\n", None])
    headers = {"x-request-timeout-ms": "200"}
    response = client(target).post("/v1/completions", json={"prompt": "a", "stream": True}, headers=headers)
    assert '"code": 408' in response.text
    assert response.text.endswith("data: [DONE]\n\n")
    assert target.calls[0].cancelled


async def test_a_client_that_leaves_cancels_the_call():
    target = Target([EVENTS, "data: 1\n\n", None])
    response = await ask(target, OpenAIRequest("chat", "r"), 1)
    sent = asyncio.Event()

    async def send(message):
        if message.get("body"):
            sent.set()

    sending = asyncio.create_task(response({"type": "http"}, asyncio.Event().wait, send))
    await sent.wait()
    sending.cancel()
    await asyncio.wait([sending])
    assert target.calls[0].cancelled


async def test_a_client_that_leaves_before_the_head_cancels_the_call():
    target = Target([None])
    asking = asyncio.create_task(ask(target, OpenAIRequest("chat", "r"), 1))
    await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.wait([asking])
    assert target.calls[0].cancelled


@pytest.mark.parametrize(
    ("body", "headers", "status", "param"),
    [
        (b"{", {}, 400, "body"),
        (b'{"prompt": "\xff"}', {}, 400, "body"),
        (b'{"promt": "a"}', {}, 400, "promt"),
        (b'{"prompt": "' + b"a" * 1024 + b'"}', {}, 413, None),
        (b"{}", {"content-type": "text/plain"}, 415, None),
        (b"{}", {"content-type": ""}, 415, None),
        (b'{"prompt": "a"}', {"x-request-timeout-ms": "0"}, 400, "x-request-timeout-ms"),
    ],
)
def test_what_never_reaches_the_target(body, headers, status, param):
    target = Target()
    response = client(target).post(
        "/v1/completions", content=body, headers={"content-type": "application/json", **headers}
    )
    assert (response.status_code, error(response)["code"], error(response)["param"]) == (status, status, param)
    assert target.requests == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405)],
)
def test_paths_and_methods_that_do_not_exist(method, path, status):
    response = client(Target()).request(method, path)
    assert response.status_code == error(response)["code"] == status
    assert path in error(response)["message"]


def test_models():
    target = Target([OpenAIHead(200), "{}"], [OpenAIHead(200), "{}"])
    http = client(target)
    assert http.get("/v1/models").status_code == http.get("/v1/models/tiny").status_code == 200
    assert [request.body for request in target.requests] == [{}, {"id": "tiny"}]
    response = http.get("/v1/models/other/one")
    assert (response.status_code, error(response)["param"]) == (404, "model")


def test_version():
    assert set(client(Target()).get("/version").json()) == {"version", "outrider"}


async def test_one_keys_answers_leave_room_for_anothers():
    """Of nine, eight: see test_shares."""
    admission = Admission(LimitsConfig(max_sequences=9))
    request = OpenAIRequest("completions", "r", {"prompt": "a"})
    with ExitStack() as held:
        for _ in range(8):
            held.enter_context(admission.hold(request, "alice"))
        for name, status in (("alice", 429), ("bob", 200)):
            token = CALLER.set(Caller(Key(name=name, hash=hash_of(b"x"), scopes=("generate",)), None))
            try:
                found = (await ask(Target([OpenAIHead(200), "{}"]), request, 0, admission)).status_code
            except HttpError as refused:
                found = refused.failure.status
            finally:
                CALLER.reset(token)
            assert found == status
