"""Reflection in a proxy: Serve answers it itself, as a stream of questions that its client may hold for ever.

Here a stream has a place, of a few (Doors.reflection), receive_timeout_s for its first question and as long again for
all of it, and each question has a turn as calls for status have. Clients that want to ask on open another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc

from outrider.actors.serving.connections import peer_of_call
from outrider.actors.serving.failures import CallFailure
from outrider.actors.serving.gate import Doors, doors
from outrider.actors.serving.grpc.door import ProxiedCall, fail, received, too_many_calls
from outrider.actors.serving.lanes import LaneFull

Answers = Callable[[AsyncIterator[Any], Any], AsyncIterator[Any]]
"""The service's own: takes questions and the context."""


class _Ended(Exception):
    def __init__(self, failure: CallFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def bounded_stream(answers: Answers) -> ProxiedCall:
    async def call(requests: AsyncIterator[Any], context: Any) -> None:
        here, peer = doors(), peer_of_call(context.peer())
        try:
            await here.reflection.take(peer)
        except LaneFull as full:
            fail(context, too_many_calls(full))
            return
        try:
            first = await received(requests, context, here)
            async with asyncio.timeout(here.limits.receive_timeout_s):
                async for answer in answers(_questions(first, requests, here, peer), context):
                    await context.write(answer)
        except _Ended as ended:
            fail(context, ended.failure)
        except TimeoutError:
            sentence = f"a stream of questions lasts {here.limits.receive_timeout_s:g} s at most; open another one"
            fail(context, CallFailure(grpc.StatusCode.DEADLINE_EXCEEDED, sentence, "REQUEST_TIMEOUT"))
        finally:
            here.reflection.leave(peer)

    return call


async def _questions(first: Any, others: AsyncIterator[Any], here: Doors, peer: str) -> AsyncGenerator[Any, None]:
    """One after the other, each when it is its turn. Raises _Ended for one that cannot be used, or has none."""
    question = first
    while question is not None:
        if isinstance(question, CallFailure):
            raise _Ended(question)
        try:
            await here.status.take(peer)
        except LaneFull as full:
            raise _Ended(too_many_calls(full)) from None
        here.status.leave(peer)  # to answer takes no time, to have it read may
        yield question
        question = await anext(aiter(others), None)
