"""The Python clients against a real server: what only it can show."""

from __future__ import annotations

import asyncio

import pytest

from outrider.deploy.client.async_client import AsyncOutriderClient
from outrider.deploy.client.sync_client import OutriderError
from tests.support.cluster.serving import Deployment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = list(b"Once upon a time there was a task that was cancelled. " * 4)


async def test_many_tasks_share_one_asynchronous_client(pair: Deployment) -> None:
    async with AsyncOutriderClient(pair.address) as client:
        answers = await asyncio.gather(
            *(client.generate(PROMPT[:length], temperature=0.0, max_tokens=24) for length in range(20, 28))
        )
        assert await client.healthy() is True
        assert list((await client.tokenize("hi")).token_ids) == list(b"hi")
    for length, answer in zip(range(20, 28), answers, strict=True):
        pair.reference.check(PROMPT[:length], answer.token_ids, label=f"prompt of {length}")


def test_a_real_refusal_names_field_and_request(pair: Deployment) -> None:
    with pytest.raises(OutriderError) as caught:
        pair.client.generate(PROMPT, top_p=2.0, request_id="too-much")
    error = caught.value
    assert (error.field, error.request_id) == ("sampling.top_p", "too-much")
