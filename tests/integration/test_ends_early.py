"""A request whose client goes away, whose deadline passes or that is aborted frees what it held in engine and drafter,
long before it would have come to its end: over gRPC, OpenAI's API, the page's API and Serve's handle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import openai
import pytest
from ray import serve

from outrider.deploy.client.handle import OutriderHandle
from outrider.deploy.client.sync_client import OutriderClient, OutriderError
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc
from tests.integration.openai_calls import chat, complete
from tests.support.cluster.serving import HANG_GUARD_S, Deployment, drafted, ended_early, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = list(b"Once upon a time there was a request that nobody waited for. ")
TO_GO = 900
"""Tokens that every request here asks for."""

SOON_S = 0.25
"""A deadline that passes in the middle of an answer."""

LONG = {"temperature": 0.0, "max_tokens": TO_GO, "ignore_eos": True}
WAYS = pytest.mark.parametrize("streaming", [False, True], ids=["unary", "stream"])


@pytest.fixture(autouse=True)
def freed(pair: Deployment) -> Iterator[None]:
    """Checks after each test that everything is free, and that the next request is served and drafted for."""
    with ended_early(pair, TO_GO):
        yield
    assert pair.drafter_status()["num_sequences"] == 0
    answer = drafted(lambda: pair.client.generate(PROMPT, temperature=0.0, max_tokens=24))
    pair.reference.check(PROMPT, answer.token_ids, label="the next request")


def wait_until_running(pair: Deployment) -> None:
    """Wait until both sides hold the request."""

    def runs() -> bool:
        status = pair.status()
        return (
            status.target.running == status.drafter.running == 1
            and min(status.target.kv_cache_usage, status.drafter.kv_cache_usage) > 0
        )

    wait_until(runs, HANG_GUARD_S, "both sides hold it", every_s=0.01)


def started(pair: Deployment, client: OutriderClient) -> Any:
    """Return a stream that is under way in engine and drafter."""
    stream = client.stream(PROMPT, **LONG)
    for _ in range(3):
        next(stream)
    wait_until_running(pair)
    return stream


def code_of(stream: Any) -> grpc.StatusCode:
    with pytest.raises(OutriderError) as caught:
        list(stream)
    return caught.value.code


def test_a_grpc_stream_is_cancelled(pair: Deployment) -> None:
    started(pair, pair.client).close()


def test_a_unary_grpc_call_is_cancelled(pair: Deployment) -> None:
    with grpc.insecure_channel(pair.address) as channel:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.SamplingParameters(**LONG))
        call = rpc.GenerationServiceStub(channel).Generate.future(request)
        wait_until_running(pair)
        call.cancel()


def test_the_deadline_in_a_grpc_request_passes(pair: Deployment) -> None:
    """No gRPC deadline is set: the server ends the stream."""
    request = pb.GenerateStreamRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.SamplingParameters(**LONG))
    request.timeout_ms = int(SOON_S * 1000)
    with grpc.insecure_channel(pair.address) as channel, pytest.raises(grpc.RpcError) as caught:
        list(rpc.GenerationServiceStub(channel).GenerateStream(request))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.fixture
def handle(pair: Deployment) -> OutriderHandle:
    """Return the handle that another Serve application has."""
    return OutriderHandle(serve.get_app_handle(pair.config.serving.app_name))


async def ask(client: OutriderHandle, streaming: bool, **options: Any) -> None:
    """Ask, and read the answer until it is whole."""
    if streaming:
        async for _ in client.stream(PROMPT, **LONG, **options):
            pass
    else:
        await client.generate(PROMPT, **LONG, **options)


@WAYS
async def test_the_task_that_waits_is_cancelled(pair: Deployment, handle: OutriderHandle, streaming: bool) -> None:
    asking = asyncio.create_task(ask(handle, streaming))
    await asyncio.to_thread(wait_until_running, pair)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_the_deadline_of_a_task_passes(handle: OutriderHandle) -> None:
    with pytest.raises(OutriderError) as caught:
        await ask(handle, streaming=True, timeout_s=SOON_S)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_request_of_a_task_is_aborted_by_its_id(handle: OutriderHandle) -> None:
    async with handle.stream(PROMPT, request_id="to-be-ended", **LONG) as stream:
        await anext(stream)
        assert await handle.abort("to-be-ended") is True
        rest = [message async for message in stream]
    assert rest[-1].finish_reason == pb.FINISH_REASON_ABORT


def test_the_page_s_client_leaves(pair: Deployment) -> None:
    body = {"token_ids": {"ids": PROMPT}, "sampling": LONG}
    with httpx.stream("POST", f"{pair.http_url}/outrider/v1/stream", json=body, timeout=HANG_GUARD_S) as response:
        lines = response.iter_lines()
        for _ in range(3):
            next(lines)
        wait_until_running(pair)


@pytest.fixture
def client(pair: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pair.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


OPENAI = {"temperature": 0, "max_tokens": TO_GO, "extra": {"ignore_eos": True}}


def test_an_openai_stream_is_closed(pair: Deployment, client: openai.OpenAI) -> None:
    stream = chat(client, stream=True, **OPENAI)
    for _ in range(3):
        next(stream)
    assert pair.status().target.running == 1
    stream.close()


def test_an_openai_client_gives_up_waiting(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        chat(client, timeout=SOON_S, **OPENAI)


@WAYS
def test_the_deadline_of_an_openai_request_passes(client: openai.OpenAI, streaming: bool) -> None:
    asked = {**OPENAI, "extra_headers": {"x-request-timeout-ms": str(int(SOON_S * 1000))}}
    if streaming:
        with pytest.raises(openai.APIError, match="deadline"):
            list(complete(client, stream=True, **asked))
    else:
        with pytest.raises(openai.APIStatusError, match="deadline") as caught:
            complete(client, **asked)
        assert caught.value.status_code == 408


def test_an_openai_request_is_aborted_over_grpc(pair: Deployment, client: openai.OpenAI) -> None:
    events = iter(chat(client, stream=True, extra_headers={"x-request-id": "r-abort-chat"}, **OPENAI))
    assert "r-abort-chat" in next(events).id
    assert pair.client.abort("r-abort-chat")
    *_, last = events
    assert last.choices[0].finish_reason == "abort"
