"""From the public sampling parameters to keyword arguments of vLLM's SamplingParams, without a model at hand.

Ranges are vLLM's own, checked here so that the answer names the public field. Whether a constraint compiles is the
target's to say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

from actors.generation import RequestError
from outrider.v1 import generation_pb2 as pb

MAX_N = 64
MAX_LOGPROBS = 20

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda value: 1 <= value <= MAX_N, f"1 to {MAX_N}, or leave it out"),
    "temperature": (lambda value: 0 <= value <= 2, "a number from 0 (greedy) to 2"),
    "top_p": (lambda value: 0 < value <= 1, "a number above 0, at most 1 (all tokens)"),
    "top_k": (lambda value: value >= -1, "0 (all tokens) or a positive number"),
    "min_p": (lambda value: 0 <= value <= 1, "a number from 0 (off) to 1"),
    "repetition_penalty": (lambda value: 0.01 <= value <= 100, "a number from 0.01 to 100 (1 is off)"),
    "presence_penalty": (lambda value: -2 <= value <= 2, "a number from -2 to 2 (0 is off)"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "a number from -2 to 2 (0 is off)"),
    "max_tokens": (lambda value: value >= 1, "1 or more, or leave it out"),
    "logprobs": (lambda value: value <= MAX_LOGPROBS, f"0 (the token's own) to {MAX_LOGPROBS}, or leave it out"),
    "prompt_logprobs": (lambda value: value <= MAX_LOGPROBS, f"0 (the token's own) to {MAX_LOGPROBS}, or leave it out"),
}
_UNRANGED = (
    "seed",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)
_TEXTS = ("stop", "bad_words")
_TOKEN_IDS = ("stop_token_ids", "allowed_token_ids")


def to_sampling(sampling: pb.SamplingParameters, vocab_size: int | None) -> dict[str, Any]:
    """Keyword arguments for the fields the client set; vocab_size None: token ids are not checked.

    Raises RequestError naming the first field that is wrong.
    """
    chosen: dict[str, Any] = {}
    for name, (allowed, description) in _RANGES.items():
        if sampling.HasField(name):
            chosen[name] = value = getattr(sampling, name)
            if not allowed(value):  # NaN compares false with everything, so it is refused too
                raise RequestError(f"sampling.{name}", f"{value} is out of range", f"send {description}")
    chosen.update({name: getattr(sampling, name) for name in _UNRANGED if sampling.HasField(name)})
    for name in _TEXTS:
        if texts := list(getattr(sampling, name)):
            if not all(texts):
                raise RequestError(f"sampling.{name}", "contains an empty string", "remove it")
            chosen[name] = texts
    for name in _TOKEN_IDS:
        if token_ids := list(getattr(sampling, name)):
            check_vocabulary(f"sampling.{name}", token_ids, vocab_size)
            chosen[name] = token_ids
    if sampling.logit_bias:
        chosen["logit_bias"] = _logit_bias(sampling, vocab_size)
    if sampling.HasField("structured_outputs"):
        chosen["structured_outputs"] = _structured_outputs(sampling.structured_outputs)
    _check_combinations(chosen)
    return chosen


def check_vocabulary(field: str, token_ids: Iterable[int], vocab_size: int | None) -> None:
    """Ids are unsigned in the schema, so only the upper end can be wrong. Raises RequestError."""
    if vocab_size is None:
        return
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise RequestError(field, f"{token_id} is not in the vocabulary", f"send ids from 0 to {vocab_size - 1}")


def _logit_bias(sampling: pb.SamplingParameters, vocab_size: int | None) -> dict[int, float]:
    field = "sampling.logit_bias"
    check_vocabulary(field, sampling.logit_bias, vocab_size)
    for token_id, bias in sampling.logit_bias.items():
        if not -100 <= bias <= 100:
            raise RequestError(field, f"{bias} for token {token_id} is out of range", "send numbers from -100 to 100")
    return dict(sampling.logit_bias)


def _structured_outputs(constraint: pb.StructuredOutputs) -> dict[str, Any]:
    """One keyword argument of vLLM's StructuredOutputsParams."""
    field, kind = "sampling.structured_outputs", constraint.WhichOneof("constraint")
    if kind is None:
        raise RequestError(field, "has no constraint", "send json, json_object, regex, grammar or choice")
    field = f"{field}.{kind}"
    if kind == "choice":
        if not constraint.choice.values:
            raise RequestError(field, "there is nothing to choose from", "send at least one value")
        return {kind: list(constraint.choice.values)}
    value = getattr(constraint, kind)
    if kind == "json":
        _check_schema(field, value)
    if kind == "json_object" and not value:
        raise RequestError(field, "false is no constraint", "send true or leave sampling.structured_outputs out")
    if kind == "grammar" and not value.strip():
        raise RequestError(field, "the grammar is empty", "send a grammar in EBNF or Lark")
    if kind == "regex" and "\0" in value:
        raise RequestError(field, "contains a NUL character", "remove it")
    return {kind: value}


def _check_schema(field: str, schema: str) -> None:
    try:
        is_object = isinstance(json.loads(schema), dict)
    except ValueError as error:
        raise RequestError(field, f"is not JSON: {error}", "send a JSON schema as text") from None
    except RecursionError:
        raise RequestError(field, "is nested too deeply", "send a schema of at most 64 levels") from None
    if not is_object:
        raise RequestError(field, "is not a JSON object", 'send a schema such as {"type": "object"}')


def _check_combinations(chosen: dict[str, Any]) -> None:
    n, seed = chosen.get("n", 1), chosen.get("seed", 0)
    if chosen.get("min_tokens", 0) > chosen.get("max_tokens", math.inf):
        raise RequestError(
            "sampling.min_tokens",
            f"{chosen['min_tokens']} is above max_tokens ({chosen['max_tokens']})",
            "lower min_tokens or raise sampling.max_tokens",
        )
    if n > 1 and chosen.get("temperature") == 0:
        raise RequestError(
            "sampling.n", f"{n} answers at temperature 0 would be the same", "send 1 or a temperature above 0"
        )
    if seed < -1 <= seed + n - 1:
        raise RequestError(
            "sampling.seed", f"{seed} counted up for n = {n} meets -1, which is no seed", "send a seed of 0 or more"
        )
