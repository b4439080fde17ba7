"""What a request costs beyond its tokens, and the bounds of what has one process busy while everybody waits for it.

An event loop of the ingress or of a replica, or the engine's step, stands still for as long as one request's messages
are looked at, its biases are gone through, or its log-probabilities are put together: so many of them are taken, and
no more. Rules of every API; fields go by the API's own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.actors.openai_calls import OpenAIRequest
from outrider.actors.replica_calls import GenerationRequest, RequestError
from outrider.actors.request_checks import check_list
from outrider.cluster.limits import LimitsConfig

USUAL_ANSWER_TOKENS = 1024
"""Counted for an answer whose length is not limited: hardly one is as long as the model could make it."""

MAX_MESSAGES = 4096
"""Of a conversation, and items of OpenAI's ``input``: each is made into objects, some 10 µs in the ingress and 50 in a
replica."""

MAX_TOOLS = 512
"""Likewise 100 µs each; OpenAI takes 128."""

MAX_STREAMED_WITH_TOOLS = 8
"""Answers: some of vLLM's parsers (``llama3_json``) read all of one again with each round, 4 to 8 ms for 32 KB."""

MAX_DOCUMENTS = 1024

MAX_LISTED_OF_ALL_ANSWERS = 4096
"""``logit_bias`` tokens, bad words, and ``stop_token_ids``, times answers: the engine's step goes through them for
every row, some µs each."""

MAX_ALLOWED_OF_ALL_ANSWERS = 1 << 18
"""``allowed_token_ids`` times answers, each of which takes a list of its own to the engine and to its ranks, 36 bytes
an id. One answer may be allowed almost all of any vocabulary."""


def tokens_in_flight(request: GenerationRequest | OpenAIRequest) -> int:
    """What it counts for: its prompts' tokens and its answers' longest, each with the likeliest ones asked for; and
    the tokens that each answer is allowed, where they are listed."""
    prompt = request.prompt_tokens * (1 + (request.prompt_logprobs or 0))
    answer = (request.max_tokens or USUAL_ANSWER_TOKENS) * (1 + (request.logprobs or 0))
    allowed = (request.sampling if isinstance(request, GenerationRequest) else request.body).get("allowed_token_ids")
    return prompt + request.num_answers * (answer + (len(allowed) if isinstance(allowed, list) else 0))


def check_prompt_logprobs(field: str, tokens: int, wanted: int | None, limits: LimitsConfig, answers: int = 1) -> None:
    """Each of the answers gets those of all the prompt's tokens, in one piece. wanted: likeliest tokens; None: no
    log-probabilities. Raises RequestError."""
    if wanted is None:
        return
    each = (1 + max(0, wanted)) * answers
    if tokens * each > limits.max_logprobs:
        raise RequestError(
            field,
            f"{tokens * each} log-probabilities of a prompt of {tokens} tokens are too many at once",
            f"ask for fewer, or send at most {limits.max_logprobs // each} tokens (limits.max_logprobs)",
        )


def longest_in_one_piece(wanted: int, limits: LimitsConfig, answers: int = 1) -> int:
    """Tokens of each answer whose log-probabilities all come at its end."""
    return max(1, limits.max_logprobs // ((1 + max(0, wanted)) * answers))


def check_in_one_piece(
    field: str, max_tokens: int | None, wanted: int | None, limits: LimitsConfig, answers: int = 1
) -> None:
    """field: that asks for log-probabilities. max_tokens None: the target ends the answer. Raises RequestError."""
    if wanted is None or max_tokens is None:
        return
    if max_tokens > (most := longest_in_one_piece(wanted, limits, answers)):
        raise RequestError(
            field,
            f"{max_tokens * (1 + max(0, wanted)) * answers} log-probabilities are too many at once",
            f"stream the answer, ask for fewer, or for at most {most} tokens (limits.max_logprobs)",
        )


def check_listed_of_answers(fields: Mapping[str, Any], answers: int, path: str = "") -> None:
    """fields: of a request, those that list words or tokens among them. path: before their names. Raises
    RequestError."""
    for name, most in (
        ("logit_bias", MAX_LISTED_OF_ALL_ANSWERS),
        ("bad_words", MAX_LISTED_OF_ALL_ANSWERS),
        ("stop_token_ids", MAX_LISTED_OF_ALL_ANSWERS),
        ("allowed_token_ids", MAX_ALLOWED_OF_ALL_ANSWERS),
    ):
        values = fields.get(name)
        if isinstance(values, (list, dict)) and len(values) * answers > most:
            raise RequestError(
                f"{path}{name}",
                f"{len(values)} are too many for {answers} answers",
                f"send at most {most // answers}, or ask for fewer answers",
            )


def check_conversation(path: str, body: Mapping[str, Any]) -> None:
    """Lists of what a chat is made of, wherever they are fields of body. path: before their names. Raises
    RequestError."""
    for name, most in (
        ("messages", MAX_MESSAGES),
        ("input", MAX_MESSAGES),
        ("tools", MAX_TOOLS),
        ("documents", MAX_DOCUMENTS),
    ):
        if isinstance(values := body.get(name), list):
            check_list(f"{path}{name}", values, most)
