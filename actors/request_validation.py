"""From a public request message to the GenerationRequest a target replica takes, without a model at hand.

What needs the tokenizer (length over ``max_model_len``) is checked by the target. Ranges are vLLM's own, checked here
so that the answer names the public field; only what the client set is passed on, so defaults stay the engine's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from actors.generation import GenerationRequest, RequestError
from outrider.v1 import generation_pb2 as pb

GenerationMessage = pb.GenerateRequest | pb.GenerateStreamRequest

_REQUEST_ID = re.compile(r"[!-~]{1,128}")

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda value: 0 <= value <= 2, "a number from 0 (greedy) to 2"),
    "top_p": (lambda value: 0 < value <= 1, "a number above 0, at most 1 (all tokens)"),
    "top_k": (lambda value: value >= -1, "0 (all tokens) or a positive number"),
    "min_p": (lambda value: 0 <= value <= 1, "a number from 0 (off) to 1"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "a number above 0 (1 is off)"),
    "presence_penalty": (lambda value: -2 <= value <= 2, "a number from -2 to 2 (0 is off)"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "a number from -2 to 2 (0 is off)"),
    "max_tokens": (lambda value: value >= 1, "1 or more, or leave it out"),
}
_UNRANGED = ("seed", "min_tokens", "ignore_eos")


@dataclass(frozen=True)
class ServedModel:
    """What requests are checked against."""

    name: str
    num_speculative_tokens: int
    """K; 0: served without a drafter."""

    vocab_size: int | None = None
    """None: not known here, the target checks token ids."""


def to_generation_request(
    message: GenerationMessage, served: ServedModel, *, request_id: str, now_unix_s: float
) -> GenerationRequest:
    """Check message and translate it.

    request_id: the client's, or one made for a client that sent none. now_unix_s: time of arrival.
    Raises RequestError naming the first public field that is wrong.
    """
    check_request_id(request_id)
    if message.HasField("model") and message.model != served.name:
        raise RequestError(
            "model", f"{_shown(message.model)} is not served here", f"send {served.name!r} or leave it out"
        )
    text, token_ids = _prompt(message, served)
    enabled, num_speculative_tokens = _speculation(message.speculation, served)
    return GenerationRequest(
        request_id=request_id,
        prompt_text=text,
        prompt_token_ids=token_ids,
        apply_chat_template=message.apply_chat_template,
        sampling=_sampling(message.sampling, served),
        speculation=enabled,
        num_speculative_tokens=num_speculative_tokens,
        deadline_unix_s=_deadline(message, now_unix_s),
    )


def check_request_id(request_id: str) -> None:
    """Ids travel in log lines and gRPC metadata, which carry visible ASCII only. Raises RequestError."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise RequestError(
            "request_id",
            f"{_shown(request_id)} is not usable as an id",
            "send 1 to 128 printable ASCII characters without spaces, or leave it out",
        )


def _prompt(message: GenerationMessage, served: ServedModel) -> tuple[str | None, tuple[int, ...] | None]:
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise RequestError("prompt", "is missing", "send text or token_ids")
    if kind == "text":
        if not message.text:
            raise RequestError("text", "the prompt is empty", "send at least one character")
        return message.text, None
    if message.apply_chat_template:
        raise RequestError(
            "apply_chat_template", "cannot be applied to token_ids", "send the prompt as text or leave it out"
        )
    token_ids = tuple(message.token_ids.ids)
    if not token_ids:
        raise RequestError("token_ids", "the prompt is empty", "send at least one token id")
    _check_vocabulary("token_ids", token_ids, served)
    return None, token_ids


def _sampling(sampling: pb.SamplingParameters, served: ServedModel) -> dict[str, Any]:
    """Keyword arguments of vLLM's SamplingParams for the fields the client set."""
    chosen: dict[str, Any] = {}
    for name, (allowed, description) in _RANGES.items():
        if sampling.HasField(name):
            chosen[name] = value = getattr(sampling, name)
            if not allowed(value):  # NaN compares false with everything, so it is refused too
                raise RequestError(f"sampling.{name}", f"{value} is out of range", f"send {description}")
    chosen.update({name: getattr(sampling, name) for name in _UNRANGED if sampling.HasField(name)})
    if sampling.min_tokens > chosen.get("max_tokens", math.inf):
        raise RequestError(
            "sampling.min_tokens",
            f"{sampling.min_tokens} is above max_tokens ({sampling.max_tokens})",
            "lower min_tokens or raise sampling.max_tokens",
        )
    if sampling.stop:
        if not all(sampling.stop):
            raise RequestError("sampling.stop", "contains an empty string", "remove it")
        chosen["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        _check_vocabulary("sampling.stop_token_ids", sampling.stop_token_ids, served)
        chosen["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        _check_vocabulary("sampling.logit_bias", sampling.logit_bias, served)
        for token_id, bias in sampling.logit_bias.items():
            if not -100 <= bias <= 100:
                raise RequestError(
                    "sampling.logit_bias",
                    f"{bias} for token {token_id} is out of range",
                    "send numbers from -100 to 100",
                )
        chosen["logit_bias"] = dict(sampling.logit_bias)
    _refuse_unsupported(sampling, served)
    return chosen


def _refuse_unsupported(sampling: pb.SamplingParameters, served: ServedModel) -> None:
    """vLLM does not apply these two to drafted tokens (vllm#42744) and refuses them once a drafter is configured."""
    if served.num_speculative_tokens == 0:
        return
    for name, fix in (("min_p", "leave it out; top_p works"), ("logit_bias", "leave it out")):
        if getattr(sampling, name):
            raise RequestError(f"sampling.{name}", "is not supported together with speculation yet", fix)


def _speculation(speculation: pb.SpeculationParameters, served: ServedModel) -> tuple[bool, int | None]:
    enabled = speculation.enabled if speculation.HasField("enabled") else True
    if not speculation.HasField("num_speculative_tokens"):
        return enabled, None
    field, wanted = "speculation.num_speculative_tokens", speculation.num_speculative_tokens
    if wanted == 0:
        raise RequestError(
            field, "0 does not switch speculation off", "send speculation.enabled = false and leave this out"
        )
    if served.num_speculative_tokens == 0:
        raise RequestError(field, "this deployment has no drafter", "leave it out")
    if wanted > served.num_speculative_tokens:
        raise RequestError(
            field,
            f"{wanted} is above what this deployment drafts a round",
            f"send 1 to {served.num_speculative_tokens}, or leave it out",
        )
    if not enabled:
        raise RequestError(field, "is given, but speculation.enabled is false", "leave one of the two out")
    return enabled, wanted


def _deadline(message: GenerationMessage, now_unix_s: float) -> float | None:
    if not message.HasField("timeout_ms"):
        return None
    if message.timeout_ms == 0:
        raise RequestError("timeout_ms", "0 leaves no time to answer", "send 1 or more, or leave it out")
    return now_unix_s + message.timeout_ms / 1000


def _check_vocabulary(field: str, token_ids: Iterable[int], served: ServedModel) -> None:
    """Ids are unsigned in the schema, so only the upper end can be wrong."""
    if served.vocab_size is None:
        return
    for token_id in token_ids:
        if token_id >= served.vocab_size:
            raise RequestError(
                field, f"{token_id} is not in the vocabulary", f"send ids from 0 to {served.vocab_size - 1}"
            )


def _shown(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "…")
