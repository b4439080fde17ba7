"""From a public request message to the GenerationRequest a target replica takes, without a model at hand.

What needs the tokenizer (length over ``max_model_len``) is checked by the target. Only what the client set is passed
on, so defaults stay the engine's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from actors.deadlines import Deadline
from actors.generation import ChatPrompt, GenerationRequest, RequestError
from actors.ingress.prompt_validation import to_chat_prompt
from actors.ingress.sampling_validation import check_vocabulary, to_sampling
from outrider.v1 import generation_pb2 as pb

GenerationMessage = pb.GenerateRequest | pb.GenerateStreamRequest
_NamesModel = GenerationMessage | pb.TokenizeRequest | pb.DetokenizeRequest

_REQUEST_ID = re.compile(r"[!-~]{1,128}")

_VERIFICATIONS = {
    pb.VERIFICATION_UNSPECIFIED: None,
    pb.VERIFICATION_REJECTION: "rejection",
    pb.VERIFICATION_BLOCK: "block",
    pb.VERIFICATION_COUPLED: "coupled",
}


@dataclass(frozen=True)
class ServedModel:
    """What requests are checked against."""

    name: str
    num_speculative_tokens: int
    """K; 0: served without a drafter."""

    vocab_size: int | None = None
    """None: not known here, the target checks token ids."""


def to_generation_request(
    message: GenerationMessage,
    served: ServedModel,
    *,
    request_id: str,
    clock: Callable[[], float] = time.monotonic,
) -> GenerationRequest:
    """Check message and translate it.

    request_id: the client's, or one made for a client that sent none.
    Raises RequestError naming the first public field that is wrong.
    """
    check_request_id(request_id)
    check_model(message, served)
    text, token_ids, chat = _prompt(message, served)
    enabled, num_speculative_tokens = _speculation(message.speculation, served)
    return GenerationRequest(
        request_id=request_id,
        prompt_text=text,
        prompt_token_ids=token_ids,
        prompt_chat=chat,
        apply_chat_template=message.apply_chat_template,
        sampling=to_sampling(message.sampling, served.vocab_size),
        speculation=enabled,
        num_speculative_tokens=num_speculative_tokens,
        verification=_verification(message),
        deadline=_deadline(message, clock),
    )


def check_request_id(request_id: str) -> None:
    """Ids travel in log lines and gRPC metadata, which carry visible ASCII only. Raises RequestError."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise RequestError(
            "request_id",
            f"{_shown(request_id)} is not usable as an id",
            "send 1 to 128 printable ASCII characters without spaces, or leave it out",
        )


def check_model(message: _NamesModel, served: ServedModel) -> None:
    """A client may say which model it expects. Raises RequestError."""
    if message.HasField("model") and message.model != served.name:
        raise RequestError(
            "model", f"{_shown(message.model)} is not served here", f"send {served.name!r} or leave it out"
        )


def _prompt(
    message: GenerationMessage, served: ServedModel
) -> tuple[str | None, tuple[int, ...] | None, ChatPrompt | None]:
    """The one of the three that was sent."""
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise RequestError("prompt", "is missing", "send text, token_ids or chat")
    if kind != "text" and message.apply_chat_template:
        raise RequestError(
            "apply_chat_template", f"cannot be applied to {kind}", "send the prompt as text or leave it out"
        )
    if kind == "chat":
        return None, None, to_chat_prompt(message.chat)
    if kind == "text":
        if not message.text:
            raise RequestError("text", "the prompt is empty", "send at least one character")
        return message.text, None, None
    token_ids = tuple(message.token_ids.ids)
    if not token_ids:
        raise RequestError("token_ids", "the prompt is empty", "send at least one token id")
    check_vocabulary("token_ids", token_ids, served.vocab_size)
    return None, token_ids, None


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


def _verification(message: GenerationMessage) -> str | None:
    """The scheduler cuts drafts at the first token a grammar forbids, and a cut that depends on the token biases
    rejection and block verification."""
    asked = message.speculation.verification
    if asked not in _VERIFICATIONS:
        raise RequestError(
            "speculation.verification",
            f"{asked} is not known here",
            "send VERIFICATION_REJECTION, VERIFICATION_BLOCK or VERIFICATION_COUPLED, or leave it out",
        )
    chosen = _VERIFICATIONS[asked]
    if chosen in ("rejection", "block") and message.sampling.HasField("structured_outputs"):
        raise RequestError(
            "sampling.structured_outputs",
            f"is not exact with {chosen} verification",
            "use coupled or leave speculation.verification out",
        )
    return chosen


def _deadline(message: GenerationMessage, clock: Callable[[], float]) -> Deadline | None:
    if not message.HasField("timeout_ms"):
        return None
    if message.timeout_ms == 0:
        raise RequestError("timeout_ms", "0 leaves no time to answer", "send 1 or more, or leave it out")
    return Deadline.after(message.timeout_ms / 1000, clock)


def _shown(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "…")
