"""The Python client's options, and the request messages they become."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar

import grpc

from outrider.v1 import generation_pb2 as pb

_REQUEST_FIELDS = ("request_id", "model", "apply_chat_template")
_SPECULATION_FIELDS = {"speculation": "enabled", "num_speculative_tokens": "num_speculative_tokens"}

_VERIFICATIONS = {
    "rejection": pb.VERIFICATION_REJECTION,
    "block": pb.VERIFICATION_BLOCK,
    "coupled": pb.VERIFICATION_COUPLED,
}
_CONSTRAINTS = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "grammar",
    "choice": "choice",
}
"""Options that are the constraint in sampling.structured_outputs, and their fields there."""

_NOT_OPTIONS = ("structured_outputs",)
"""Fields of sampling that are filled in from options of other names."""

_Request = TypeVar("_Request", pb.GenerateRequest, pb.GenerateStreamRequest)


class GenerationOptions(TypedDict, total=False):
    """Everything about a request but its prompt. What is left out, or None, the server decides.

    Limits and defaults are those of the fields of the same name in ``generation.proto``.
    """

    request_id: str | None
    model: str | None
    apply_chat_template: bool | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    ignore_eos: bool | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    logit_bias: Mapping[int, float] | None
    n: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    allowed_token_ids: Sequence[int] | None
    bad_words: str | Sequence[str] | None
    json_schema: str | Mapping[str, Any] | None
    """This and the next four go into structured_outputs: one of them at most."""

    json_object: bool | None
    """True: any JSON object."""

    regex: str | None
    grammar: str | None
    choice: Sequence[str] | None
    speculation: bool | None
    """False: decode without drafts."""

    num_speculative_tokens: int | None
    verification: str | None
    """``rejection``, ``block`` or ``coupled``."""

    timeout_s: float | None
    """Seconds for the whole call, above 0. It is both the call's deadline and the engine's."""


class OutriderError(Exception):
    """A call that failed: with what status, and why."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(code, message)
        self.code, self.message = code, message

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


def build_request(request: _Request, prompt: str | Sequence[int], options: GenerationOptions) -> _Request:
    """Fill in request. Raises OutriderError for a value its field cannot hold, TypeError for an unknown option."""
    remaining: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if isinstance(prompt, str):
        _put(request, "text", prompt, "text")
    else:
        request.token_ids.SetInParent()
        _put(request.token_ids, "ids", prompt, "token_ids")
    for name in _REQUEST_FIELDS:
        if name in remaining:
            _put(request, name, remaining.pop(name), name)
    for name, field in _SPECULATION_FIELDS.items():
        if name in remaining:
            _put(request.speculation, field, remaining.pop(name), f"speculation.{field}")
    if "verification" in remaining:
        request.speculation.verification = _verification(remaining.pop("verification"))
    if "timeout_s" in remaining:
        timeout_s = remaining.pop("timeout_s")
        if not 0 < timeout_s < math.inf:
            raise _invalid("timeout_s", f"{timeout_s} is not a time to wait; send a number of seconds above 0")
        _put(request, "timeout_ms", math.ceil(timeout_s * 1000), "timeout_ms")
    given = [name for name in _CONSTRAINTS if name in remaining]
    if len(given) > 1:
        raise _invalid("sampling.structured_outputs", f"{' and '.join(given)} are given; send one of them")
    for name in given:
        _put_constraint(request.sampling.structured_outputs, _CONSTRAINTS[name], remaining.pop(name))
    for name, value in remaining.items():
        if name in _NOT_OPTIONS or name not in pb.SamplingParameters.DESCRIPTOR.fields_by_name:
            raise TypeError(f"unknown option {name!r}; see GenerationOptions")
        if name in ("stop", "bad_words") and isinstance(value, str):
            value = [value]
        _put(request.sampling, name, value, f"sampling.{name}")
    return request


def _put_constraint(message: pb.StructuredOutputs, field: str, value: Any) -> None:
    public_name = f"sampling.structured_outputs.{field}"
    if field == "choice":
        if isinstance(value, str):
            raise _invalid(public_name, "is one text; send a list of them")
        message.choice.SetInParent()
        _put(message.choice, "values", value, public_name)
        return
    if field == "json" and isinstance(value, Mapping):
        try:
            value = json.dumps(value)
        except (TypeError, ValueError) as error:
            raise _invalid(public_name, f"is not a JSON schema: {error}") from None
    _put(message, field, value, public_name)


def _verification(name: str) -> pb.Verification:
    try:
        return _VERIFICATIONS[name]
    except (KeyError, TypeError):
        raise _invalid("speculation.verification", f"{name!r} is none of {', '.join(_VERIFICATIONS)}") from None


def _put(message: Any, field: str, value: Any, public_name: str) -> None:
    try:
        if isinstance(value, Mapping):
            getattr(message, field).update(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            getattr(message, field).extend(value)
        else:
            setattr(message, field, value)
    except (AttributeError, TypeError, ValueError) as error:
        raise _invalid(public_name, f"not a value this field can hold: {error}") from None


def _invalid(field: str, problem: str) -> OutriderError:
    """The error the server would answer with, for what cannot even be sent."""
    return OutriderError(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {problem}")
