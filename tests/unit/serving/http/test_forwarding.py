"""What the ingress makes of an HTTP request that it forwards, and of an error after its answer began."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from ray.exceptions import ActorDiedError

from outrider.actors.replica_calls import HttpCall, HttpHead
from outrider.actors.serving.authentication import Authenticator
from outrider.actors.serving.http.app import build_http_app
from outrider.actors.serving.openai.forward import OpenAIForwarder
from outrider.actors.serving.running import RunningRequests
from outrider.cluster.config import parse_config

CONFIG = parse_config({"target": {"model": "model"}}, "test")


class LostReplica:
    """Begins an answer and is lost. Stands for the handle of the Target deployment."""

    def __init__(self) -> None:
        self.calls: list[HttpCall] = []

    http = property(lambda self: self)

    def options(self, stream: bool) -> LostReplica:
        return self

    def remote(self, call: HttpCall) -> LostReplica:
        self.calls.append(call)
        return self

    def cancel(self) -> None:
        """Nothing runs."""

    async def __aiter__(self) -> AsyncIterator[HttpHead | bytes]:
        yield HttpHead(200, ((b"content-type", b"text/event-stream"),))
        yield b"data: {}\n\n"
        raise ActorDiedError


async def post(path: str, body: dict[str, Any], **headers: str) -> tuple[LostReplica, httpx.Response]:
    replica: Any = LostReplica()
    forwarder = OpenAIForwarder(replica, RunningRequests(), CONFIG)
    nothing: Any = None
    app = build_http_app(nothing, Authenticator(), forwarder, replica, None, nothing)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return replica, await client.post(path, json=body, headers=headers)


@pytest.mark.parametrize(
    ("path", "first_line"),
    [("/v1/chat/completions", "data"), ("/v1/responses", "data"), ("/v1/messages", "event: error")],
)
async def test_an_error_within_a_stream_is_an_event_that_the_apis_clients_raise(path: str, first_line: str) -> None:
    _, answer = await post(path, {"messages": [], "stream": True})
    late = answer.text.split("\n\n")[1].splitlines()
    assert late[0].startswith(first_line)
    assert json.loads(late[-1].removeprefix("data: "))["error"]["code"] == 503


@pytest.mark.parametrize("timeout_ms", ["0", "-1", "1.5", "000000000001999999999", "9" * 5000])
async def test_a_timeout_that_is_none_is_refused(timeout_ms: str) -> None:
    replica, answer = await post("/v1/completions", {"prompt": "a"}, **{"x-request-timeout-ms": timeout_ms})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-request-timeout-ms"
    assert not replica.calls


@pytest.mark.parametrize("body", [{"prompt": "a"}, {"token_ids": [1], "sampling_params": {}}])
async def test_the_router_sees_speculation_as_the_replica_does(body: dict[str, Any]) -> None:
    for enabled in (True, False):
        replica, _ = await post("/inference/v1/generate", {**body, "speculation": {"enabled": enabled}})
        (call,) = replica.calls
        assert call.routed is not None
        assert call.routed.wants_drafts == enabled
