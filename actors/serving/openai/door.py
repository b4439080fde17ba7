"""From a decoded body and its headers to the request a target replica takes, without a model at hand.

What is known about a request without the model is checked here; the rest is vLLM's to say.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from outrider.actors.observability.tracing import TRACE_HEADERS
from outrider.actors.openai_calls import BESIDE_MESSAGES, GENERATING, Endpoint, OpenAIRequest, num_chars, pictures_in
from outrider.actors.replica_calls import Deadline, RequestError
from outrider.actors.request_checks import (
    RANGES,
    chars_of,
    check_arguments,
    check_chars,
    check_list,
    check_max_tokens,
    check_num_speculative_tokens,
    check_range,
    check_repetition,
    check_request_id,
    check_seeds,
    check_template_lists,
    check_template_variables,
    check_timeout,
    check_verification_under_grammar,
    most_to_tokenize,
    shown,
)
from outrider.actors.request_costs import (
    MAX_STREAMED_WITH_TOOLS,
    check_conversation,
    check_in_one_piece,
    check_listed_of_answers,
    check_prompt_logprobs,
)
from outrider.actors.serving.openai.fields import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE, Rules, held_against
from outrider.actors.serving.openai.pictures import check_pictures
from outrider.actors.serving.openai.responses_door import checked_response
from outrider.actors.serving.openai.responses_fields import RESPONSES
from outrider.cluster.limits import LimitsConfig
from outrider.cluster.modes import BY_NAME
from outrider.cluster.multimodal_config import MultimodalConfig

BY_ENDPOINT: dict[Endpoint, Rules] = {
    "chat": CHAT,
    "completions": COMPLETIONS,
    "responses": RESPONSES,
    "tokenize": TOKENIZE,
    "detokenize": DETOKENIZE,
}

TIMEOUT_HEADER = "x-request-timeout-ms"
REQUEST_ID_HEADER = "x-request-id"

MAX_ANSWERS = 256
"""Prompts times n of one request: each is a sequence in the engine."""


_PROMPTS = ("prompt", "instructions", *BESIDE_MESSAGES, "input", "messages")
_NUMBERS = (
    *RANGES,
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
)
_FLAGS = ("stream", "echo")
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_PART_TYPES = ("text", "input_text", "output_text", "refusal", "thinking", "image_url", "input_image")
"""Of a message's content. Pictures have checks of their own."""


def to_openai_request(
    endpoint: Endpoint,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    *,
    num_speculative_tokens: int,
    request_id: str,
    limits: LimitsConfig | None = None,
    multimodal: MultimodalConfig | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> OpenAIRequest:
    """num_speculative_tokens: K, 0 without a drafter. request_id: for a request that brings none. limits None: the
    defaults. multimodal: what pictures are taken; None: none.

    Raises RequestError naming the first field, or header, that is wrong.
    """
    limits = limits or LimitsConfig()
    _check_lists(body, limits)
    _check_chars(endpoint, body, limits)
    kept = held_against(BY_ENDPOINT[endpoint], body)
    kept = {name: value for name, value in kept.items() if value is not None}
    if endpoint == "responses":
        kept = checked_response(kept)
    check_pictures(endpoint, kept, None if endpoint == "tokenize" else multimodal)
    _check_messages(kept)
    _check_prompts(endpoint, kept)
    _check_constraints(kept)
    request_id = _request_id(kept, headers, request_id)
    speculation = kept.pop("speculation", {})
    _check_numbers(kept)
    _check_ranges(kept)
    _check_answers(kept)
    request = OpenAIRequest(endpoint, request_id, kept)
    if endpoint in GENERATING:
        _limit_tokens(endpoint, kept, limits)
        _check_costs(request, limits)
    return replace(
        request,
        round_options=_round_options(speculation, _is_structured(kept), num_speculative_tokens),
        trace_headers={name: headers[name] for name in TRACE_HEADERS if name in headers},
        deadline=_deadline(endpoint, headers, limits, clock),
    )


def _check_lists(body: Mapping[str, Any], limits: LimitsConfig) -> None:
    """Before anything looks at what they hold, which whoever validates them does for every member."""
    check_conversation("", body)
    for name, most, most_chars in (
        ("stop", limits.max_stop_strings, limits.max_stop_string_chars),
        ("bad_words", limits.max_bad_words, limits.max_bad_word_chars),
        ("stop_token_ids", limits.max_listed_token_ids, None),
        ("logit_bias", limits.max_listed_token_ids, None),
        ("tokens", limits.max_detokenize_ids, None),
    ):
        if isinstance(values := body.get(name), (list, dict, str)):
            check_list(name, values, most, most_chars)


def _check_chars(endpoint: Endpoint, body: Mapping[str, Any], limits: LimitsConfig) -> None:
    """Of all that a tokenizer or a template would read. Pictures have limits of their own."""
    if endpoint not in (*GENERATING, "tokenize"):
        return
    most = limits.max_prompt_chars
    if endpoint == "tokenize":
        most = most_to_tokenize(limits.max_tokenize_chars, token_strs=bool(body.get("return_token_strs")))
    total = 0
    for name in _PROMPTS:
        value = body.get(name)
        total += num_chars(value, keys=name in BESIDE_MESSAGES, length=chars_of)
        for message in value if name in ("messages", "input") and isinstance(value, list) else ():
            total -= sum(map(len, pictures_in(message.get("content")))) if isinstance(message, dict) else 0
        check_chars(name, total, most)


def _check_messages(body: Mapping[str, Any]) -> None:
    """What vLLM finds when it reads them one by one, and then says of no field."""
    messages = body.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        where = f"messages.{number}"
        for index, part in enumerate(_listed(message, "content")):
            field = f"{where}.content.{index}"
            if not isinstance(part, dict):
                raise RequestError(field, "is no object", 'send {"type": "text", "text": "…"}')
            kind = part.get("type")
            if not isinstance(kind, str):
                raise RequestError(f"{field}.type", "is missing, or no text", "send text")
            if kind not in _PART_TYPES:
                raise RequestError(f"{field}.type", f"{shown(kind)} is not known here", "send text")
            if kind == "text" and not isinstance(part.get("text"), str):
                raise RequestError(f"{field}.text", "is missing, or no text", "send one")
        if isinstance(message, dict) and message.get("role") == "assistant":
            for index, call in enumerate(_listed(message, "tool_calls")):
                _check_call(f"{where}.tool_calls.{index}", call)


def _check_call(field: str, call: Mapping[str, Any]) -> None:
    """vLLM's own model is held against it when the whole message has been, by a path that begins at the call."""
    if not isinstance(call.get("id"), str):
        raise RequestError(f"{field}.id", "is missing, or no text", "send the call's id")
    if call.get("type") != "function":
        raise RequestError(f"{field}.type", "is missing, or not known here", "send function")
    if not isinstance(function := call.get("function"), dict):
        raise RequestError(f"{field}.function", "is missing", 'send {"name": "…", "arguments": "…"}')
    if not isinstance(function.get("name"), str):
        raise RequestError(f"{field}.function.name", "is missing, or no text", "send the function's name")
    if not isinstance(function.get("arguments"), str):
        problem = "is missing, or no text"
        raise RequestError(f"{field}.function.arguments", problem, "send the JSON of the arguments as a text")
    check_arguments(f"{field}.function.arguments", function["arguments"])


def _listed(message: Any, name: str) -> list[Any]:
    found = message.get(name) if isinstance(message, dict) else None
    return found if isinstance(found, list) else []


def _check_prompts(endpoint: Endpoint, body: Mapping[str, Any]) -> None:
    if endpoint == "tokenize" and "prompt" in body and "messages" in body:
        raise RequestError("prompt", "cannot go with messages", "leave one of the two out")
    variables = body.get("chat_template_kwargs")
    if isinstance(variables, dict):
        check_template_variables("chat_template_kwargs", variables, None if endpoint == "responses" else "")
        check_template_lists("chat_template_kwargs", variables)


def _check_constraints(body: Mapping[str, Any]) -> None:
    """vLLM says what it has instead, its own settings included."""
    structured, response_format = body.get("structured_outputs"), body.get("response_format")
    if isinstance(structured, dict):
        kinds = [name for name in _CONSTRAINTS if structured.get(name) is not None]
        if not kinds:
            raise RequestError("structured_outputs", "has no constraint", f"send one of {', '.join(_CONSTRAINTS)}")
        if len(kinds) > 1:
            raise RequestError("structured_outputs", f"has {' and '.join(kinds)}", "send one constraint")
        if isinstance(response_format, dict) and response_format.get("type") not in (None, "text"):
            raise RequestError("structured_outputs", "cannot go with response_format", "leave one of the two out")
    if isinstance(response_format, dict) and response_format.get("type") == "json_schema":
        named = response_format.get("json_schema")
        if isinstance(named, dict) and named.get("schema") is None:
            raise RequestError("response_format.json_schema.schema", "is missing", "send a JSON schema")


def _check_numbers(body: dict[str, Any]) -> None:
    """What is bounded here is a number here, and not only to vLLM, which takes texts for numbers and for true and
    false. A whole number with a point becomes one without."""
    for name in _NUMBERS:
        value = body.get(name)
        if isinstance(value, float) and value.is_integer() and name not in RANGES.keys() - {"n"}:
            body[name] = int(value)
        elif value is not None and not isinstance(value, (int, float)):
            raise RequestError(name, "is no number", "send a number, or leave it out")
        if isinstance(value, float) and abs(value) >= 2**63:
            raise RequestError(name, "is too large a number", "send one of 64 bits, or leave it out")
    biases = body.get("logit_bias")
    for token, bias in biases.items() if isinstance(biases, dict) else ():
        if not (isinstance(bias, (int, float)) and abs(bias) < math.inf):
            problem = f"{shown(str(bias))} for token {shown(token)} is no finite number"
            raise RequestError("logit_bias", problem, "send numbers from -100 to 100")
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):  # to vLLM -1 is all of the vocabulary
        if isinstance(value := body.get(name), (int, float)) and value < 0:
            raise RequestError(name, f"{value} is out of range", "send 0 to 20, or leave it out")
    for name in _FLAGS:
        if isinstance(body.get(name), str):
            raise RequestError(name, "is neither true nor false", "send one of them, or leave it out")


def _check_costs(request: OpenAIRequest, limits: LimitsConfig) -> None:
    """Prompts of text one by one are the target's to check, which knows their tokens."""
    body, answers = request.body, request.num_answers
    check_listed_of_answers(body, answers)
    if answers > MAX_STREAMED_WITH_TOOLS and body.get("stream") and body.get("tools"):
        problem = f"{answers} answers at once are too many for a stream with tools"
        raise RequestError("n", problem, f"send {MAX_STREAMED_WITH_TOOLS} at most, or stream no answer")
    prompts = request.prompts()
    if len(prompts) > 1 or isinstance(prompts[0], list):
        field = "logprobs" if body.get("prompt_logprobs") is None else "prompt_logprobs"
        check_prompt_logprobs(field, request.prompt_tokens, request.prompt_logprobs, limits, answers // len(prompts))
    if not body.get("stream"):
        field = "logprobs" if request.endpoint == "completions" else "top_logprobs"
        check_in_one_piece(field, request.max_tokens, request.logprobs, limits, answers)


def _limit_tokens(endpoint: Endpoint, body: dict[str, Any], limits: LimitsConfig) -> None:
    """vLLM lets a chat's max_completion_tokens go before max_tokens, and has a default of its own for completions."""
    names = ("max_output_tokens",) if endpoint == "responses" else ("max_completion_tokens", "max_tokens")
    asked = [name for name in names if isinstance(body.get(name), int)]
    for name in asked:
        check_max_tokens(name, body[name], limits)
    if not asked and endpoint != "completions" and limits.unasked_max_tokens is not None:
        body[names[-1]] = limits.unasked_max_tokens


def _request_id(body: dict[str, Any], headers: Mapping[str, str], otherwise: str) -> str:
    found = body.pop("request_id", None)
    if found is None:
        found = headers.get(REQUEST_ID_HEADER, otherwise)
    if not isinstance(found, str):
        raise RequestError("request_id", "is no text", "send 1 to 128 printable ASCII characters, or leave it out")
    check_request_id(found)
    return found


def _check_ranges(body: Mapping[str, Any]) -> None:
    for name in RANGES:
        value = body.get(name)
        if isinstance(value, (int, float)):
            check_range(name, name, value)
    if isinstance(asked := body.get("repetition_detection"), dict):
        check_repetition("repetition_detection", asked)
    n, seed = body.get("n", 1), body.get("seed")
    if isinstance(n, int) and isinstance(seed, int):
        check_seeds("seed", seed, n)


def _check_answers(body: Mapping[str, Any]) -> None:
    prompt, n = body.get("prompt"), body.get("n", 1)
    if prompt is not None and body.get("echo") and body.get("stream") and n != 1:
        # vLLM joins the outputs of a request's answers, and then misses the prompt of all but the first.
        raise RequestError("echo", "cannot be had with stream for several answers", "leave out echo or stream, or n")
    if isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt):
        answers = len(prompt) * (n if isinstance(n, int) else 1)
        if answers > MAX_ANSWERS:
            raise RequestError(
                "prompt", f"{len(prompt)} prompts make {answers} answers", f"send prompts for {MAX_ANSWERS} at most"
            )


def _is_structured(body: Mapping[str, Any]) -> bool:
    text = body.get("text")
    response_format = text.get("format") if isinstance(text, dict) else body.get("response_format")
    return "structured_outputs" in body or (
        isinstance(response_format, dict) and response_format.get("type") not in (None, "text")
    )


def _round_options(speculation: Mapping[str, Any], structured: bool, most: int) -> dict[str, Any]:
    """What the request asks of drafting and verification, as outrider.actors.round.request has it."""
    options: dict[str, Any] = {}
    enabled = speculation.get("enabled")
    if enabled is not None and not isinstance(enabled, bool):
        raise RequestError("speculation.enabled", "is neither true nor false", "send one of them, or leave it out")
    wanted = speculation.get("num_speculative_tokens")
    if wanted is not None:
        if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 0:
            raise RequestError(
                "speculation.num_speculative_tokens",
                "is no number of tokens",
                f"send 1 to {most or 'K'}, or leave it out",
            )
        check_num_speculative_tokens(wanted, enabled=enabled is not False, most=most)
        options["num_speculative_tokens"] = wanted
    if enabled is False:
        options["num_speculative_tokens"] = 0
    verification = speculation.get("verification")
    if verification is not None:
        if not isinstance(verification, str) or verification not in BY_NAME:
            raise RequestError(
                "speculation.verification",
                f"{json.dumps(verification)[:60]} is not known here",
                f"send one of {', '.join(BY_NAME)}, or leave it out",
            )
        if structured:
            check_verification_under_grammar("speculation.verification", verification)
        options["verification"] = verification
    return options


def _deadline(
    endpoint: Endpoint, headers: Mapping[str, str], limits: LimitsConfig, clock: Callable[[], float]
) -> Deadline:
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        generates = endpoint in GENERATING
        return Deadline.after(limits.default_timeout_s if generates else limits.control_timeout_s, clock)
    timeout_ms = int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else 0
    if timeout_ms <= 0:
        most = int(limits.greatest_timeout_s * 1000)
        raise RequestError(TIMEOUT_HEADER, f"{text[:40]!r} is no time to answer in", f"send 1 to {most} milliseconds")
    check_timeout(TIMEOUT_HEADER, timeout_ms, limits)
    return Deadline.after(timeout_ms / 1000, clock)
