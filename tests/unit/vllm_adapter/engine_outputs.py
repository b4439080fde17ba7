"""Requests to the engine and vLLM's outputs for them, made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput

from outrider.actors.replica_calls import GenerationRequest

VOCAB_SIZE = 100
MODEL = SimpleNamespace(is_diffusion=False, max_logprobs=20, get_vocab_size=lambda: VOCAB_SIZE)


def request(**fields: Any) -> GenerationRequest:
    sampling = fields.pop("sampling", {})
    return GenerationRequest(request_id="r-1", prompt_token_ids=(1, 2), sampling=sampling, **fields)


def delta(*token_ids: int, index: int = 0, **fields: Any) -> CompletionOutput:
    fields = {"cumulative_logprob": None, "logprobs": None, **fields}
    return CompletionOutput(
        index=index, text="".join(chr(97 + i) for i in token_ids), token_ids=list(token_ids), **fields
    )


def output(
    *completions: CompletionOutput, finished: bool = False, prompt_logprobs: Any = None, metrics: Any = None
) -> RequestOutput:
    return RequestOutput(
        "r-1", None, [1, 2], prompt_logprobs, list(completions), finished, metrics, num_cached_tokens=1
    )
