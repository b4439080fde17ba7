"""Which field of a request an error of vLLM's is about, by the name that the client sent it under.

vLLM names few of them: some errors have a parameter, of its own request or of its sampling parameters, others name it
in their text alone, and what is wrong with a prompt it says of a decoder's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outrider.actors.openai_calls import OpenAIRequest
from outrider.actors.serving.openai.checked_engine import CONSTRAINT
from outrider.actors.serving.openai.errors import HttpFailure

_MOST_TOKENS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
_SENT_AS = {
    "input_tokens": ("prompt", "messages", "input"),
    "input_text": ("prompt", "messages", "input"),
    "logprobs": ("top_logprobs", "logprobs"),
    "max_tokens": _MOST_TOKENS,
    CONSTRAINT: ("response_format", "text", "tools"),
}
"""Fields by vLLM's names: what the client may have sent them as, the likeliest first."""

_OF_PROMPTS = re.compile(
    r"The decoder prompt|Token id \d+ is out of vocabulary|You must pass at least one prompt|Cannot apply chat template"
)
_NO_ROOM = re.compile(r"max_tokens must be at least 1, got (-?\d+)")
_NAMES = re.compile(r"\A[a-z]\w*|(?<=`)[a-z]\w*(?=`)|[a-z]+(?:_[a-z]+)+")
_REPEATED_VALUE = re.compile(r"\.? \(parameter=\w+(, value=.*)?\)\Z", re.DOTALL)


def by_its_name(failure: HttpFailure, request: OpenAIRequest) -> HttpFailure:
    """failure: as vLLM puts it, or as it is already."""
    body, param = request.body, failure.param
    if param is not None and failure.message.startswith(f"{param}: ") and param.partition(".")[0] != CONSTRAINT:
        return failure  # by its path, before vLLM saw it
    message = _REPEATED_VALUE.sub("", failure.message)
    if param == "max_tokens" and (found := _NO_ROOM.match(message)) and not _asked_for(int(found[1]), body):
        message = "the prompt is as long as max_model_len, which leaves no room for an answer; send a shorter one"
        param = "input_tokens"
    elif param is None:
        param = "input_tokens" if _OF_PROMPTS.match(message) else named_in(message, body)
    return replace(failure, message=message, param=_sent(param, body))


def named_in(message: str, body: Mapping[str, Any]) -> str | None:
    """The request's field that an error's text names first: as its first word, in quotes, or by no word of prose."""
    return next((name for name in _NAMES.findall(message) if name in body), None)


def _sent(param: str | None, body: Mapping[str, Any]) -> str | None:
    if param is None or (param.partition(".")[0] == CONSTRAINT and CONSTRAINT in body):
        return param
    return next((name for name in _SENT_AS.get(param.partition(".")[0], ()) if name in body), param)


def _asked_for(most_tokens: int, body: Mapping[str, Any]) -> bool:
    return any(body.get(name) == most_tokens for name in _MOST_TOKENS)
