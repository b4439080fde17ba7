"""A second Serve application on the same cluster that calls Outrider through its handle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle

from outrider.deploy.client.async_client import AsyncMethods, AsyncOutriderClient
from outrider.deploy.client.handle import OutriderHandle
from outrider.deploy.client.sync_client import OutriderClient, OutriderError
from outrider.v1 import generation_pb2 as pb
from tests.support.cluster.serving import (
    HANG_GUARD_S,
    Deployment,
    drafted,
    num_accepted,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = list(b"Once upon a time there was an application that asked another one. " * 2)


def second_application(outrider: str) -> serve.Application:
    """Defined in here so that it travels by value: the replica cannot import this module."""

    @serve.deployment(name="Caller", ray_actor_options={"num_cpus": 0})
    class Caller:
        def __init__(self) -> None:
            self._outrider = OutriderHandle(serve.get_app_handle(outrider))

        async def generate(self, prompt: list[int], **options: Any) -> bytes:
            return (await self._outrider.generate(prompt, **options)).SerializeToString()

        async def stream(self, prompt: list[int], **options: Any) -> AsyncIterator[bytes]:
            async with self._outrider.stream(prompt, **options) as rounds:
                async for message in rounds:
                    yield message.SerializeToString()

    return Caller.bind()


@pytest.fixture
def caller(pair: Deployment) -> Iterator[DeploymentHandle]:
    name = pair.config.serving.app_name
    one_application = pair.client
    with OutriderClient(pair.address, application=name) as pair.client:  # two are served meanwhile
        yield serve.run(second_application(name), name="second", route_prefix="/second")
        serve.delete("second")
    pair.client = one_application


@pytest.fixture
def handle(pair: Deployment) -> OutriderHandle:
    return OutriderHandle(serve.get_app_handle(pair.config.serving.app_name))


@pytest.mark.exhaustive
async def test_a_second_application_gets_the_same_tokens_whole_and_round_by_round(
    pair: Deployment, caller: DeploymentHandle
) -> None:
    def ask_it() -> pb.GenerateResponse:
        called = caller.generate.remote(PROMPT, temperature=0.0, max_tokens=48)
        return pb.GenerateResponse.FromString(called.result(timeout_s=HANG_GUARD_S))

    answer = await asyncio.to_thread(drafted, ask_it, num_accepted)
    pair.reference.check(PROMPT, answer.token_ids, label="through the handle")
    stream = caller.stream.options(stream=True).remote(PROMPT, temperature=0.0, max_tokens=48, request_id="from-two")
    messages = [pb.GenerateStreamResponse.FromString(data) async for data in stream]
    assert [token for message in messages for token in message.token_ids] == list(answer.token_ids)
    assert "".join(message.text_delta for message in messages) == answer.text
    assert {message.request_id for message in messages} == {"from-two"}
    assert len(messages) > 1
    assert messages[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert not any(message.finish_reason for message in messages[:-1])


async def test_a_bad_request_is_refused_as_over_grpc(pair: Deployment, handle: OutriderHandle) -> None:
    async def refusal(client: AsyncMethods) -> OutriderError:
        with pytest.raises(OutriderError) as caught:
            await client.generate(PROMPT, temperature=-1.0, request_id="bad")
        return caught.value

    async with AsyncOutriderClient(pair.address) as client:
        over_grpc = await refusal(client)
    through_handle = await refusal(handle)
    assert through_handle.args == over_grpc.args
    assert through_handle.code is grpc.StatusCode.INVALID_ARGUMENT
    assert through_handle.field == "sampling.temperature"
    assert through_handle.request_id == "bad"
