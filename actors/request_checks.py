"""The rules that a request is held against whichever API it comes by, and a client's words in a refusal.

Each raises RequestError with the field as that API calls it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outrider.actors.replica_calls import RequestError
from outrider.cluster.limits import LimitsConfig
from outrider.cluster.modes import check_exact_under_grammar

MAX_N = 64
"""Answers of one prompt."""

RANGES: dict[str, tuple[float, float, str]] = {
    "n": (1, MAX_N, f"1 to {MAX_N}, or leave it out"),
    "temperature": (0, 2, "a number from 0 (greedy) to 2"),
    # Beyond these the scaled logits leave float32, and no token can be chosen.
    "repetition_penalty": (0.01, 100, "a number from 0.01 to 100 (1 is off)"),
}
"""Sampling parameters whose least and most, and how a refusal puts them, are our own and not vLLM's."""

NO_TEMPLATE_VARIABLES = frozenset(
    {
        "chat_template",
        "conversation",
        "max_length",
        "messages",
        "model_config",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer",
        "tokenizer_kwargs",
        "truncation",
    }
)
"""Arguments of what applies a chat template, vLLM's or the tokenizer's own."""

TEMPLATE_FIELDS = ("add_generation_prompt", "continue_final_message")

_MOST_OF_A_PROBLEM = 300
_MOST_NAMED = 20
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


def check_request_id(request_id: str) -> None:
    """Ids travel in log lines and gRPC metadata, which carry visible ASCII only. Raises RequestError."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise RequestError(
            "request_id",
            f"{shown(request_id)} is not usable as an id",
            "send 1 to 128 printable ASCII characters without spaces, or leave it out",
        )


def check_range(field: str, name: str, value: float) -> None:
    """name: of RANGES. field: what the API calls it. Raises RequestError."""
    least, most, allowed = RANGES[name]
    if not least <= value <= most:  # NaN compares false with everything, so it is refused too
        raise RequestError(field, f"{value} is out of range", f"send {allowed}")


def check_seeds(field: str, seed: int, n: int) -> None:
    """Each of n answers has a seed of its own, counted up. Raises RequestError."""
    if seed < -1 <= seed + n - 1:
        raise RequestError(
            field, f"{seed} counted up for n = {n} meets -1, which is no seed", "send a seed of 0 or more"
        )


def chars_of(text: str) -> int:
    """As texts are held against limits: its characters, or half the bytes of UTF-8 where these are more. A tokenizer
    makes up to four tokens of a rare character."""
    return len(text) if text.isascii() else max(len(text), len(text.encode(errors="surrogatepass")) // 2)


def check_template_variables(field: str, names: Iterable[str], chat: str | None) -> None:
    """names: of chat_template_kwargs. chat: what goes before a field of the chat; None: it has none of TEMPLATE_FIELDS.
    Raises RequestError."""
    for name in names:
        if name in TEMPLATE_FIELDS and chat is not None:
            raise RequestError(f"{field}.{name}", "has a field of its own", f"send {chat}{name}")
        if name in NO_TEMPLATE_VARIABLES or name in TEMPLATE_FIELDS:
            raise RequestError(f"{field}.{name}", "is no variable of a template", "leave it out")


def check_template_lists(field: str, variables: Mapping[str, Any]) -> None:
    """Of chat_template_kwargs, what a tokenizer reads before its template does. Raises RequestError."""
    for name in ("tools", "documents"):
        value = variables.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
            raise RequestError(f"{field}.{name}", "is no array of objects", "send one, or leave it out")


MAX_ARGUMENTS_DEPTH = 128
"""Of nested objects and arrays in the arguments of a call."""


def check_arguments(field: str, text: str) -> None:
    """Of a function's call in a conversation: JSON in a text, which is decoded for templates. What is no JSON counts as
    no arguments there. Raises RequestError for what decoding, or the tokenizer, would fail at."""
    try:
        found = json.loads(text)
        nested = _nested([found])
        for _ in range(MAX_ARGUMENTS_DEPTH):
            nested = _nested(
                each for value in nested for each in (value.values() if isinstance(value, dict) else value)
            )
        if nested:
            raise RecursionError
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()
    except json.JSONDecodeError:
        return
    except RecursionError:
        fix = f"send at most {MAX_ARGUMENTS_DEPTH} levels"
        raise RequestError(field, "is nested too deeply", fix) from None
    except UnicodeEncodeError:
        raise RequestError(field, "holds half of a surrogate pair", "send whole characters") from None
    except ValueError:  # of thousands of digits
        raise RequestError(field, "holds too large a number", "send a smaller one") from None


def _nested(values: Iterable[Any]) -> list[dict[str, Any] | list[Any]]:
    return [value for value in values if isinstance(value, (dict, list))]


TOKEN_STRS_COUNT = 8
"""Times: characters whose tokens are to be told as texts too, each of which is an object to make, send and read."""


def most_to_tokenize(most: int, *, token_strs: bool) -> int:
    """Characters. most: limits.max_tokenize_chars."""
    return most // TOKEN_STRS_COUNT if token_strs else most


def check_chars(field: str, chars: int, most: int) -> None:
    """Raises RequestError."""
    if chars > most:
        raise RequestError(field, f"has {chars} characters", f"send {most} at most")


def check_list(field: str, values: Any, most: int, most_chars: int | None = None) -> None:
    """values: a list of a request's, of texts where they have a most_chars. What is none is somebody else's to refuse.
    Raises RequestError."""
    if not isinstance(values, str) and len(values) > most:
        raise RequestError(field, f"{len(values)} are too many", f"send at most {most}")
    if most_chars is None:
        return
    for text in [values] if isinstance(values, str) else values:
        if isinstance(text, str) and len(text) > most_chars:
            raise RequestError(field, f"holds {len(text)} characters in one", f"send at most {most_chars} in each")


MAX_REPEATED_PATTERN = 64
"""Tokens: the longest pattern that repetition_detection looks for."""

MAX_REPEATED_TOKENS = 512
"""Of a pattern and its repetitions together. vLLM looks at each token of an answer, in the engine's step, while
everybody waits: some 0.6 ms at these two, where a pattern of 4,000 tokens takes 400."""


def check_repetition(field: str, asked: dict[str, Any]) -> None:
    """asked: repetition_detection as it was sent, for whose numbers vLLM would take texts, too. Raises RequestError."""
    for name, value in asked.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise RequestError(f"{field}.{name}", "is no whole number", "send one, or leave it out")
    for name, value in asked.items():
        if value is not None and value < 0:
            raise RequestError(f"{field}.{name}", f"{value} is negative", "send 0 or more, or leave it out")
    size, least, count = (asked.get(name) or 0 for name in ("max_pattern_size", "min_pattern_size", "min_count"))
    if least > size:
        raise RequestError(f"{field}.min_pattern_size", f"{least} is above max_pattern_size ({size})", "lower it")
    if size > MAX_REPEATED_PATTERN:
        raise RequestError(
            f"{field}.max_pattern_size", f"{size} is too long a pattern", f"send {MAX_REPEATED_PATTERN} at most"
        )
    if size * count > MAX_REPEATED_TOKENS:
        problem = f"{count} repetitions of {size} tokens are too many to look for"
        fix = f"send {MAX_REPEATED_TOKENS // size} at most, or a smaller max_pattern_size"
        raise RequestError(f"{field}.min_count", problem, fix)


def check_max_tokens(field: str, max_tokens: int, limits: LimitsConfig) -> None:
    """Raises RequestError."""
    if limits.greatest_max_tokens is not None and max_tokens > limits.greatest_max_tokens:
        raise RequestError(
            field, f"{max_tokens} is above what this deployment answers", f"send 1 to {limits.greatest_max_tokens}"
        )


def check_timeout(field: str, timeout_ms: int, limits: LimitsConfig) -> None:
    """Raises RequestError."""
    if timeout_ms > (most := int(limits.greatest_timeout_s * 1000)):
        raise RequestError(field, f"{timeout_ms} is above what this deployment waits", f"send 1 to {most} milliseconds")


def check_num_speculative_tokens(wanted: int, *, enabled: bool, most: int) -> None:
    """enabled: whether the request wants drafts at all. most: K, 0 without a drafter. Raises RequestError."""
    field = "speculation.num_speculative_tokens"
    if wanted == 0:
        raise RequestError(
            field, "0 does not switch speculation off", "send speculation.enabled = false and leave this out"
        )
    if most == 0:
        raise RequestError(field, "this deployment has no drafter", "leave it out")
    if wanted > most:
        raise RequestError(
            field, f"{wanted} is above what this deployment drafts a round", f"send 1 to {most}, or leave it out"
        )
    if not enabled:
        raise RequestError(field, "is given, but speculation.enabled is false", "leave one of the two out")


def unknown_adapter(field: str, name: str, names: Sequence[str]) -> RequestError:
    """names: of those that there are."""
    if not names:
        return RequestError(field, f"{shown(name)} is not known: there are no adapters", "leave it out")
    listed = ", ".join(map(repr, names[:_MOST_NAMED])) + (", …" if len(names) > _MOST_NAMED else "")
    return RequestError(field, f"{shown(name)} is not known here", f"send one of {listed}, or leave it out")


def check_verification_under_grammar(field: str, asked: str | None) -> None:
    """asked: by a request with structured output. field: the one that an API blames. Raises RequestError."""
    try:
        check_exact_under_grammar(asked)
    except ValueError as error:
        fix = "ask for coupled verification, or leave speculation.verification out"
        raise RequestError(field, str(error), fix) from None


def shown(text: str, limit: int = 60) -> str:
    """A client's own text, short enough for a sentence."""
    return repr(text if len(text) <= limit else text[:limit] + "…")


def shortened(text: str) -> str:
    """What somebody else's error says, on one line that a client may read."""
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= _MOST_OF_A_PROBLEM else text[:_MOST_OF_A_PROBLEM] + "…"
