"""``/v1/responses`` inside a target replica: vLLM's own class, and what its answers lack here."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from openai.types.responses import ResponseFunctionToolCall, ResponseReasoningItem
from pydantic import BaseModel
from vllm.entrypoints.generate.base.protocol import PerRequestMetrics
from vllm.entrypoints.generate.base.serving import build_spec_decoding_metrics
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GenerationError

from outrider.actors.serving.openai.checked_engine import TALLY

ID_PREFIX = "resp_"

_BEFORE_THE_ENGINE = ("response.created", "response.in_progress")
"""Events that say nothing of whether the request will be answered."""


_OBJECTS: dict[str, type[BaseModel]] = {"function_call": ResponseFunctionToolCall, "reasoning": ResponseReasoningItem}
"""Of items that vLLM reads as objects."""


def as_validated(items: list[dict[str, Any]]) -> list[Any]:
    """Items of a request, which the door has checked, as vLLM's validation leaves them. That tries each item as some
    thirty types: seconds of everybody's time in this process for some ten thousands."""
    return [
        kind(**{"id": f"item_{number}", **item}) if (kind := _OBJECTS.get(item["type"])) else item
        for number, item in enumerate(items)
    ]


class ResponsesServing(OpenAIServingResponses):
    """Answers say that they are not stored, and have the request's acceptance, as chats and completions do."""

    async def responses_full_generator(self, *args: Any, **kwargs: Any) -> ErrorResponse | ResponsesResponse:
        response = await super().responses_full_generator(*args, **kwargs)
        if isinstance(response, ErrorResponse):
            return response
        tally = TALLY.get()
        last = tally.last if tally is not None else None
        if (stats := build_spec_decoding_metrics(last)) is not None:
            response.metrics = response.metrics or PerRequestMetrics()
            response.metrics.speculative_decoding = stats
        if last is not None and any(completion.finish_reason == "abort" for completion in last.outputs):
            response.status = "cancelled"
        return not_stored(response)

    def _convert_generation_error_to_streaming_response(self, e: GenerationError) -> str:
        """vLLM's own makes an event that its types do not know, and fails of it."""
        raise e


def not_stored(response: ResponsesResponse) -> ResponsesResponse:
    """OpenAI's field, which vLLM's class has not."""
    response.store = False
    return response


async def texts_of(events: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
    """Server-sent events. None before the engine has answered: what it refuses is no stream. Raises what vLLM's class
    does, which leaves errors to its caller."""
    held: list[str] = []
    async for event in events:
        held.append(_text_of(event))
        if event.type not in _BEFORE_THE_ENGINE:
            for text in held:
                yield text
            held.clear()


def _text_of(event: Any) -> str:
    if hasattr(event, "response"):
        not_stored(event.response)
    kind = event.type
    if kind == "response.completed" and event.response.status in ("incomplete", "cancelled"):
        # OpenAI's event for an answer that was cut; it has none for one that was cancelled.
        kind = "response.incomplete"
        event = event.model_copy(update={"type": kind})
    return f"event: {kind}\ndata: {event.model_dump_json(by_alias=True)}\n\n"
