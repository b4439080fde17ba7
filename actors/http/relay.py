"""A target replica's answer as an HTTP response: head first, then the body's parts as they come.

However it ends early, client gone, deadline or error, the call to the target is cancelled: that is what makes its
engine abort the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.responses import Response

from actors.http.errors import HttpError, failure_of
from actors.http.event_stream import EventStream
from actors.ingress.retry import retried
from actors.observability.logs import note_request
from actors.openai.messages import OpenAIHead, OpenAIRequest

Parts = AsyncGenerator[OpenAIHead | str, None]


async def ask(target: DeploymentHandle, request: OpenAIRequest, max_retries: int) -> Response:
    """The whole answer, or a response that goes on as it is sent.

    target: the Target deployment. max_retries: how often a request is sent again whose replica is lost before it has
    begun to answer. Raises HttpError.
    """
    note_request(request.request_id)
    parts = _parts(target, request, max_retries)
    try:
        head = await anext(parts)
        assert isinstance(head, OpenAIHead)
        if head.is_stream:
            return EventStream(_events(parts, request.request_id))
        body = [part async for part in parts if isinstance(part, str)]
        return Response("".join(body), head.status, media_type=head.media_type)
    except Exception as error:  # noqa: BLE001 - whatever it is, the client gets a status and a sentence
        raise HttpError(failure_of(error, request.request_id)) from None


async def _parts(target: DeploymentHandle, request: OpenAIRequest, max_retries: int) -> Parts:
    """The deadline is watched here too, since a request may spend it waiting for a replica."""
    call = target.openai.options(stream=True)

    def send(avoid: tuple[str, ...]) -> Any:
        return call.remote(replace(request, avoid_replicas=avoid))

    async with aclosing(retried(send, max_retries=max_retries, request_id=request.request_id)) as stream:
        while True:
            async with asyncio.timeout(request.seconds_left()):
                part = await anext(stream, None)
            if part is None:
                return
            yield part


async def _events(parts: Parts, request_id: str) -> AsyncGenerator[str, None]:
    """The status is out: what goes wrong now is an event."""
    async with aclosing(parts):
        try:
            async for part in parts:
                assert isinstance(part, str)
                yield part
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets a sentence
            yield failure_of(error, request_id).event()
