"""What a key is charged for an answer of OpenAI's API, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from outrider.actors.openai_calls import OpenAIHead, OpenAIRequest, TokensUsed
from outrider.actors.request_costs import USUAL_ANSWER_TOKENS
from outrider.actors.serving.http.routes import _counted


class Charged:
    def __init__(self) -> None:
        self.prompt = self.completion = 0

    def used(self, prompt: int, completion: int) -> None:
        self.prompt += prompt
        self.completion += completion


async def parts_of(*parts: Any) -> AsyncGenerator[Any, None]:
    """None: what comes then takes for ever."""
    for part in parts:
        if part is None:
            await asyncio.Event().wait()
        yield part


def asked(**body: Any) -> OpenAIRequest:
    return OpenAIRequest("completions", "r", {"prompt": [1, 2, 3], **body})


async def test_a_whole_answer_is_charged_as_it_came() -> None:
    charged: Any = Charged()
    parts = parts_of(OpenAIHead(200), TokensUsed(3, 5), "{}")
    assert [part async for part in _counted(parts, charged, asked(max_tokens=99))] == [OpenAIHead(200), "{}"]
    assert (charged.prompt, charged.completion) == (3, 5)


@pytest.mark.parametrize(("body", "tokens"), [({"max_tokens": 50, "n": 4}, 200), ({}, USUAL_ANSWER_TOKENS)])
async def test_one_in_one_piece_that_is_left_is_charged_as_what_it_asked_for(body: dict[str, Any], tokens: int) -> None:
    charged: Any = Charged()
    left = asyncio.ensure_future(anext(_counted(parts_of(None), charged, asked(**body))))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert (charged.prompt, charged.completion) == (3, tokens)


async def test_so_is_one_whose_deadline_passes() -> None:
    charged: Any = Charged()
    parts = _counted(parts_of(OpenAIHead(408), "{}"), charged, asked(max_tokens=50))
    assert [part async for part in parts] == [OpenAIHead(408), "{}"]
    assert (charged.prompt, charged.completion) == (3, 50)


async def test_a_stream_that_is_left_is_charged_as_far_as_it_came_and_a_refusal_not_at_all() -> None:
    charged: Any = Charged()
    async with aclosing(
        _counted(parts_of(OpenAIHead(200), TokensUsed(3, 1), "a", "b"), charged, asked(stream=True))
    ) as parts:
        async for part in parts:
            if part == "a":
                break
    assert (charged.prompt, charged.completion) == (3, 1)
    refused = _counted(parts_of(OpenAIHead(400), "{}"), charged, asked(max_tokens=50))
    assert [part async for part in refused] == [OpenAIHead(400), "{}"]
    assert (charged.prompt, charged.completion) == (3, 1)
