"""Refuses settings of a request that vLLM does not support where it drafts inside the target's engine.

The engine itself refuses min_p and logit_bias under speculation (vllm#42744). It would ignore the settings refused
here, or, for seeds on CPU, die. This module does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.actors.replica_calls import GenerationRequest, RequestError
from outrider.actors.round.request import GREEDY_BELOW, carried


def check_co_located(request: GenerationRequest, method: str, *, on_gpu: bool) -> None:
    """Raises RequestError for the first field that cannot be honoured. method: of the co-located drafter."""
    if not request.speculation:
        raise _refusal(method, "speculation.enabled", "cannot be switched off for a request", "leave speculation out")
    asked = {"num_speculative_tokens": request.num_speculative_tokens, "verification": request.verification}
    _check(method, asked, request.sampling.get("seed"), request.sampling.get("temperature", 1.0), on_gpu)


def check_co_located_params(params: Any, method: str, *, on_gpu: bool) -> None:
    """Checks vLLM's SamplingParams, with our settings in extra_args, as check_co_located checks a request."""
    _check(method, carried(params), params.seed, params.temperature, on_gpu)


def _check(method: str, asked: Mapping[str, Any], seed: int | None, temperature: float, on_gpu: bool) -> None:
    if asked.get("num_speculative_tokens") is not None:
        raise _refusal(
            method, "speculation.num_speculative_tokens", "drafts as many for every request", "leave speculation out"
        )
    if asked.get("verification") is not None:
        raise _refusal(method, "speculation.verification", "has one way to verify, rejection", "leave it out")
    if seed is not None and temperature >= GREEDY_BELOW and not on_gpu:
        # gpu_model_runner winds a seeded request's generator back after a chunk of its prefill; torch's CPU generator
        # cannot be wound back, and the exception ends the engine.
        raise _refusal(method, "sampling.seed", "cannot keep seeds on CPU", "leave it out, or ask at temperature 0")


def _refusal(method: str, field: str, problem: str, fix: str) -> RequestError:
    return RequestError(
        field, f"drafting is co-located here (method {method}), by vLLM's own runner, which {problem}", fix
    )
