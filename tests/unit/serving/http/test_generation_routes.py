"""The streaming and status calls over HTTP, before a scripted servicer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from outrider.actors.replica_calls import RequestError
from outrider.actors.serving.failures import CallFailure
from outrider.actors.serving.http.app import add_error_handlers
from outrider.actors.serving.http.routes import MAX_TOKEN_TEXTS, EventStream, add_generation_routes, event
from outrider.cluster.limits import LimitsConfig
from outrider.v1 import generation_pb2 as pb

STREAM = "/outrider/v1/stream"
MAX_BYTES = 4096


def fail(call: Any, code: grpc.StatusCode, message: str, **fields: str) -> RuntimeError:
    """As the ingress ends a call."""
    failure = CallFailure(code, message, "REASON", fields)
    call.set_code(code)
    call.set_details(message)
    call.set_trailing_metadata(failure.trailing_metadata())
    return RuntimeError(message)


class Servicer:
    def __init__(self) -> None:
        self.asked: list[pb.GenerateStreamRequest] = []
        self.closed = 0

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, call: Any
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        self.asked.append(request)
        try:
            if request.text.isupper():
                raise fail(call, grpc.StatusCode[request.text], "no", **{"sampling.seed": "is wrong"})
            yield pb.GenerateStreamResponse(
                request_id="r", text_delta="é\n\n<b>", token_ids=[1, 2], origins=[1, 3], num_rounds=1
            )
            if request.text == "fail later":
                raise fail(call, grpc.StatusCode.UNAVAILABLE, "the replica is gone")
            if request.text == "break":
                raise ValueError("a secret of the inside")
            yield pb.GenerateStreamResponse(request_id="r", finish_reason=pb.FINISH_REASON_STOP)
        finally:
            self.closed += 1

    async def GetServerStatus(self, request: pb.GetServerStatusRequest, call: Any) -> pb.GetServerStatusResponse:
        return pb.GetServerStatusResponse(model="m", rounds=pb.RoundStatistics(accepted=2**53 + 1))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, call: Any) -> pb.GetModelInfoResponse:
        raise fail(call, grpc.StatusCode.UNAVAILABLE, "no replica")


async def token_texts(ids: list[int]) -> list[str]:
    if max(ids, default=0) > 9:
        raise RequestError("token_ids", "id 10 is not in the vocabulary", "send ids below 10")
    return [str(token_id) for token_id in ids]


@pytest.fixture
def servicer() -> Servicer:
    return Servicer()


@pytest.fixture
def client(servicer: Servicer) -> TestClient:
    app = FastAPI(openapi_url=None)
    add_error_handlers(app)
    add_generation_routes(app, servicer, token_texts, LimitsConfig(max_request_bytes=MAX_BYTES))
    return TestClient(app, raise_server_exceptions=False)


def events(text: str) -> list[Any]:
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(block.removeprefix("data: ")) for block in text.split("\n\n")[:-2]]


def test_a_stream(client: TestClient, servicer: Servicer) -> None:
    body = {"text": "hello", "sampling": {"seed": "9007199254740993", "maxTokens": 5}, "speculation": {"enabled": True}}
    response = client.post(STREAM, json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-store, no-transform"
    assert events(response.text) == [
        {
            "request_id": "r",
            "text_delta": "é\n\n<b>",
            "token_ids": [1, 2],
            "origins": ["TOKEN_ORIGIN_ACCEPTED", "TOKEN_ORIGIN_BONUS"],
            "num_rounds": 1,
        },
        {"request_id": "r", "finish_reason": "FINISH_REASON_STOP"},
    ]
    (asked,) = servicer.asked
    assert (asked.text, asked.sampling.seed, asked.sampling.max_tokens) == ("hello", 2**53 + 1, 5)
    assert asked.speculation.enabled
    assert servicer.closed == 1


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("INVALID_ARGUMENT", 400),
        ("NOT_FOUND", 404),
        ("ALREADY_EXISTS", 409),
        ("RESOURCE_EXHAUSTED", 429),
        ("UNAVAILABLE", 503),
        ("DEADLINE_EXCEEDED", 408),
        ("INTERNAL", 500),
    ],
)
def test_a_refusal_has_a_status_of_its_own(client: TestClient, code: str, status: int) -> None:
    response = client.post(STREAM, json={"text": code})
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["message"], error["param"], error["code"]) == ("no", "sampling.seed", status)
    assert ("retry-after" in response.headers) == (status in (429, 503))


def test_an_error_later_is_the_last_event(client: TestClient) -> None:
    response = client.post(STREAM, json={"text": "fail later"})
    assert response.status_code == 200
    first, last = events(response.text)
    assert first["token_ids"] == [1, 2]
    assert (last["error"]["message"], last["error"]["code"]) == ("the replica is gone", 503)


def test_what_the_servicer_did_not_foresee_leaks_nothing(client: TestClient, servicer: Servicer) -> None:
    response = client.post(STREAM, json={"text": "break"})
    assert "secret" not in response.text
    assert servicer.closed == 1


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"txt": "x"}, "txt"),
        ({"text": "x", "sampling": {"temprature": 1}}, "temprature"),
        ({"text": "x", "sampling": {"temperature": "warm"}}, "temperature"),
        ({"text": "x", "sampling": {"max_tokens": -1}}, "maxTokens|max_tokens"),
        ({"text": "x", "sampling": 7}, "sampling"),
        ({"text": "x", "token_ids": {"ids": [1]}}, "prompt"),
        ({"text": None, "sampling": {"stop": [None]}}, "stop"),
        ({"text": "x", "chat": {"messages": [{"role": 3}]}}, "role|chat|prompt"),
    ],
)
def test_what_does_not_fit_the_message_is_named(client: TestClient, body: dict[str, Any], named: str) -> None:
    response = client.post(STREAM, json=body)
    assert response.status_code == 400
    assert any(name in response.json()["error"]["message"] for name in named.split("|")), response.text


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"text": "\xff"}', 400),
        (b'{"text": "\\ud800"}', 400),
        (b'{"chat": {"chat_template_kwargs": ' + b'{"a": ' * 120 + b"1" + b"}" * 122, 400),
        (b'{"text": "' + b"x" * MAX_BYTES + b'"}', 413),
    ],
)
def test_bodies_that_no_request_can_be(client: TestClient, servicer: Servicer, raw: bytes, status: int) -> None:
    response = client.post(STREAM, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]
    assert not servicer.asked


def test_the_status_has_its_zeros(client: TestClient) -> None:
    response = client.get("/outrider/v1/status")
    assert response.headers["cache-control"] == "no-store"
    status = response.json()
    assert (status["model"], status["methods"], status["rounds"]["accepted"]) == ("m", [], str(2**53 + 1))
    assert "link" not in status


def test_a_call_that_fails(client: TestClient) -> None:
    response = client.get("/outrider/v1/model")
    assert (response.status_code, response.json()["error"]["message"]) == (503, "no replica")


def test_token_texts(client: TestClient) -> None:
    assert client.post("/outrider/v1/token_texts", json={"token_ids": [3, 1, 3]}).json() == {"texts": ["3", "1", "3"]}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"token_ids": 3},
        {"token_ids": [True]},
        {"token_ids": [-1]},
        {"token_ids": [1.5]},
        {"token_ids": [10]},
        {"token_ids": [1] * (MAX_TOKEN_TEXTS + 1)},
        {"token_ids": [1], "model": "m"},
    ],
)
def test_token_texts_refused(client: TestClient, body: dict[str, Any]) -> None:
    response = client.post("/outrider/v1/token_texts", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("token_ids", "model")


async def test_a_client_that_leaves_while_a_message_is_sent_closes_the_stream() -> None:
    """The generator waits at its yield then, where cancelling the task does not reach it."""
    closed = asyncio.Event()
    sending = asyncio.Event()

    async def answers() -> AsyncGenerator[str, None]:
        try:
            yield event("{}")
        finally:
            closed.set()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sending.set()
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    kept = answers()  # not collected: it is the response that closes it
    task = asyncio.create_task(EventStream(kept)({"type": "http"}, receive, send))
    await sending.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed.is_set()
