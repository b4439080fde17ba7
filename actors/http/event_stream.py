"""Server-sent events, as OpenAI's streams have them: ``data: <json>`` each, ``data: [DONE]`` after the last."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = "data: [DONE]\n\n"


def event(json_text: str) -> str:
    """json_text: without line breaks, which would end the event."""
    return f"data: {json_text}\n\n"


class EventStream(StreamingResponse):
    """Closes its generator however the response ends. Serve cancels the task of a client that has left, often while
    the generator waits for nothing; unclosed it would hold its request in the engine until it is collected."""

    def __init__(self, events: AsyncGenerator[str, None], headers: dict[str, str] | None = None) -> None:
        # No transformation, no buffering: proxies on the way would hold back rounds.
        kept = {"cache-control": "no-store, no-transform", "x-accel-buffering": "no", **(headers or {})}
        super().__init__(events, headers=kept, media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)
