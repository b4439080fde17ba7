"""Builds the calls of all clients from their options, and defines the error of a failed call."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypedDict, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2

from outrider.v1 import generation_pb2 as pb

CONTROL_S = 10.0  # default timeout of calls that generate nothing
Prompt = str | Sequence[int] | Sequence[Mapping[str, str] | pb.ChatMessage]
"""A text; token ids; or a conversation, oldest message first, each with ``role``, ``content`` and perhaps ``name``."""


class OutriderError(Exception):
    """Is raised for a failed call.

    message: one sentence; for INVALID_ARGUMENT ``field: problem; fix``. field: the request's field at fault, else None.
    request_id: chosen by the caller, to find in the server's log; None when the server chose one.
    """

    def __init__(self, code: grpc.StatusCode, message: str, request_id: str | None = None) -> None:
        super().__init__(code, message, request_id)  # all of them, so that the error survives pickling
        self.code, self.message, self.request_id = code, message, request_id
        named = re.match(r"([a-z][\w.\[\]]*): ", message) if code is grpc.StatusCode.INVALID_ARGUMENT else None
        self.field = named and named[1]

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


class TemplateOptions(TypedDict, total=False):
    """Says how a conversation becomes a prompt; valid with messages only."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: Mapping[str, Any] | None


SamplingOptions = TypedDict("SamplingOptions", {  # noqa: UP013 - a line for each of them would be a page
    "temperature": float | None, "top_p": float | None, "top_k": int | None, "min_p": float | None, "seed": int | None,
    "n": int | None, "max_tokens": int | None, "min_tokens": int | None, "ignore_eos": bool | None,
    "repetition_penalty": float | None, "presence_penalty": float | None, "frequency_penalty": float | None,
    "stop": str | Sequence[str] | None, "stop_token_ids": Sequence[int] | None, "bad_words": str | Sequence[str] | None,
    "allowed_token_ids": Sequence[int] | None, "logit_bias": Mapping[int, float] | None,
    "logprobs": int | None, "prompt_logprobs": int | None, "skip_special_tokens": bool | None,
    "spaces_between_special_tokens": bool | None, "include_stop_str_in_output": bool | None,
    # Constraints, one at most.
    "json_schema": str | Mapping[str, Any] | None, "json_object": bool | None, "regex": str | None,
    "grammar": str | None, "choice": Sequence[str] | None,
}, total=False)  # fmt: skip
"""Says how tokens are chosen and when to stop."""


class GenerationOptions(SamplingOptions, TemplateOptions, total=False):
    """Holds all options of a request. The server decides those that are missing or None.

    Limits and defaults are those of the fields of the same name in ``generation.proto``.
    """

    request_id: str | None
    model: str | None
    adapter: str | None
    apply_chat_template: bool | None
    cache_salt: str | None
    speculation: bool | None  # False: decode without drafts
    num_speculative_tokens: int | None
    verification: str | None  # rejection, block or coupled
    timeout_s: float | None  # of the whole call, above 0: both its deadline and the engine's


class TokenizeOptions(TemplateOptions, total=False):
    """Holds the options of tokenising a prompt."""

    model: str | None
    add_special_tokens: bool | None
    return_token_strs: bool | None


_CONSTRAINTS = {"json_schema": "json", "choice": "choice.values"} | {k: k for k in ("json_object", "regex", "grammar")}
_PATHS = {
    **{option: f"sampling.{option}" for option in SamplingOptions.__annotations__},
    **{option: f"sampling.structured_outputs.{field}" for option, field in _CONSTRAINTS.items()},
    **{option: f"chat.{option}" for option in TemplateOptions.__annotations__},
    **{option: f"speculation.{option}" for option in ("num_speculative_tokens", "verification")},
    "speculation": "speculation.enabled",
    "timeout_s": "timeout_ms",
}
"""The field that an option sets, where it is not the request's own of that name."""

Answer = TypeVar("Answer")
P = ParamSpec("P")
Request = TypeVar("Request", pb.GenerateRequest, pb.GenerateStreamRequest, pb.TokenizeRequest)


@dataclass(frozen=True)
class Call(Generic[Answer]):
    """Holds one call before it is sent. timeout_s: None for no limit. answer: converts the response."""

    rpc: str
    request: Any
    timeout_s: float | None
    answer: Callable[[Any], Any] = lambda response: response

    def fail(self, code: grpc.StatusCode, message: str) -> Any:
        """Raise OutriderError, or return the answer of a health check that failed."""
        if self.rpc != "Check":
            raise OutriderError(code, message, getattr(self.request, "request_id", "") or None) from None
        return False


def generate(prompt: Prompt, **options: Unpack[GenerationOptions]) -> Call[pb.GenerateResponse]:
    """Return the whole answer; where n is above 1, all answers are in completions."""
    return Call("Generate", build_request(pb.GenerateRequest(), prompt, options), options.get("timeout_s"))


def stream(prompt: Prompt, options: GenerationOptions) -> Call[pb.GenerateStreamResponse]:
    return Call("GenerateStream", build_request(pb.GenerateStreamRequest(), prompt, options), options.get("timeout_s"))


def tokenize(
    prompt: Prompt, *, timeout_s: float | None = CONTROL_S, **options: Unpack[TokenizeOptions]
) -> Call[pb.TokenizeResponse]:
    """Return the tokens of a text or of messages: what generation makes of the same prompt."""
    return Call("Tokenize", build_request(pb.TokenizeRequest(), prompt, options), timeout_s)


def detokenize(
    token_ids: Sequence[int], *, skip_special_tokens: bool | None = None, timeout_s: float | None = CONTROL_S
) -> Call[pb.DetokenizeResponse]:
    """Return the text of tokens."""
    request = pb.DetokenizeRequest(skip_special_tokens=skip_special_tokens)
    _put(request, "token_ids", token_ids, "token_ids")
    return Call("Detokenize", request, timeout_s)


def abort(request_id: str, *, timeout_s: float | None = CONTROL_S) -> Call[bool]:
    """Abort a request of the same key or address. Returns whether the server had it, running or waiting."""
    request = pb.AbortRequestRequest(request_id=request_id)
    return Call("AbortRequest", request, timeout_s, lambda response: response.aborted)


def status(*, timeout_s: float | None = CONTROL_S) -> Call[pb.GetServerStatusResponse]:
    """Return the model served and the state of speculation, from one replica."""
    return Call("GetServerStatus", pb.GetServerStatusRequest(), timeout_s)


def revert_drafter(version: int, *, timeout_s: float | None = CONTROL_S) -> Call[int]:
    """Make a former version of a learning drafter serve again; status() lists them. Returns its new number."""
    request = pb.RevertDrafterRequest(version=version)
    return Call("RevertDrafter", request, timeout_s, lambda response: response.serving)


def model_info(*, timeout_s: float | None = CONTROL_S) -> Call[pb.GetModelInfoResponse]:
    """Return facts about the model, which stay the same as long as the server runs."""
    return Call("GetModelInfo", pb.GetModelInfoRequest(), timeout_s)


def healthy(*, timeout_s: float | None = CONTROL_S) -> Call[bool]:
    """Return whether requests can be sent now. False, too, when no server answers."""
    request = health_pb2.HealthCheckRequest(service="outrider.v1.GenerationService")
    return Call("Check", request, timeout_s, lambda response: response.status == health_pb2.HealthCheckResponse.SERVING)


def build_request(request: Request, prompt: Prompt, options: Mapping[str, Any]) -> Request:
    """Fill in request. Raises TypeError or ValueError that names the argument."""
    known = (TokenizeOptions if isinstance(request, pb.TokenizeRequest) else GenerationOptions).__annotations__.keys()
    items = list(prompt) if isinstance(prompt, Iterable) and not isinstance(prompt, str | bytes) else [None]
    is_chat = bool(items) and all(isinstance(each, Mapping | pb.ChatMessage) for each in items)
    if not (isinstance(prompt, str) or is_chat or all(hasattr(each, "__index__") for each in items)):
        raise TypeError("prompt: send a text, token ids, or messages; of several prompts, each in a call of its own")
    path = "text" if isinstance(prompt, str) else "chat.messages" if is_chat else "token_ids.ids"
    _put(request, "prompt", prompt, path)
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := given.keys() - (known if is_chat else known - TemplateOptions.__annotations__.keys()):
        raise TypeError(f"{min(unknown)}: is no option of such a prompt; there are {', '.join(sorted(known))}")
    if len(constraints := sorted(given.keys() & _CONSTRAINTS)) > 1:
        raise ValueError(f"{' and '.join(constraints)}: only one of them can be given")
    for name, value in given.items():
        _put(request, name, value, _PATHS.get(name, name))
    return request


def _converted(name: str, value: Any) -> Any:
    """Return the value of the field that the option sets."""
    if name in ("stop", "bad_words", "choice") and isinstance(value, str):
        return [value]
    if name == "json_schema" and isinstance(value, Mapping):
        return json.dumps(value)
    if name == "verification":
        return f"VERIFICATION_{value}".upper()
    return math.ceil(value * 1000) if name == "timeout_s" else value


def _put(request: Any, name: str, value: Any, path: str) -> None:
    """Set the field at path. Errors name the argument."""
    try:
        value = _converted(name, value)
        for field in reversed(path.split(".")):
            value = {field: value}
        request.MergeFrom(type(request)(**value))
    except (OverflowError, TypeError, ValueError) as error:
        raise (TypeError if isinstance(error, TypeError) else ValueError)(f"{name}: {error}") from None
