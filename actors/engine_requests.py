"""Between our request and response types and vLLM's: tokens in, sampling parameters, one RoundOutput a round."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from actors.generation import GenerationRequest, RequestError, RoundOutput, SpeculativeDecodingMetrics, Usage
from actors.round_settings import EXTRA_ARGS_KEY


def prompt_ids(request: GenerationRequest, tokenizer: Any, vocab_size: int, max_model_len: int) -> list[int]:
    """The prompt's token ids. Raises RequestError for what this model cannot take."""
    if request.prompt_token_ids is not None:
        ids = list(request.prompt_token_ids)
        if (worst := max(ids)) >= vocab_size:
            raise RequestError("token_ids", f"id {worst} is not in the vocabulary", f"send ids below {vocab_size}")
    elif request.apply_chat_template:
        if not getattr(tokenizer, "chat_template", None):
            raise RequestError("apply_chat_template", "the model has no chat template", "send the text as it is")
        messages = [{"role": "user", "content": request.prompt_text}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(request.prompt_text)["input_ids"]
    if not ids:
        raise RequestError("text", "the prompt has no tokens", "send a prompt")
    if len(ids) >= max_model_len:
        raise RequestError(
            "prompt",
            f"{len(ids)} tokens leave no room for an answer in max_model_len = {max_model_len}",
            f"send at most {max_model_len - 1} tokens",
        )
    return ids


def sampling_params(request: GenerationRequest, prompt_len: int, max_model_len: int) -> SamplingParams:
    """vLLM's parameters, with our own in extra_args. Raises RequestError for what vLLM refuses."""
    settings = dict(request.sampling)
    settings.setdefault("max_tokens", max_model_len - prompt_len)
    limit = request.num_speculative_tokens if request.speculation else 0
    if limit is not None:
        settings["extra_args"] = {EXTRA_ARGS_KEY: {"num_speculative_tokens": limit}}
    try:
        return SamplingParams(**settings, output_kind=RequestOutputKind.DELTA)
    except (ValueError, TypeError) as error:
        raise RequestError("sampling", str(error), "change the request") from None


def round_output(output: RequestOutput, num_tokens: int) -> RoundOutput:
    """num_tokens: tokens of the answer so far, this round's included. vLLM's output is a delta."""
    completion = output.outputs[0]
    if not output.finished:
        return RoundOutput(completion.text, tuple(completion.token_ids))
    metrics = SpeculativeDecodingMetrics()
    if completion.spec_decode_metrics is not None:
        counted = completion.spec_decode_metrics.to_dict()
        metrics = SpeculativeDecodingMetrics(
            num_spec_steps=counted["num_spec_steps"],
            num_draft_tokens=counted["num_draft_tokens"],
            num_accepted_draft_tokens=counted["num_accepted_draft_tokens"],
            mean_acceptance_length=counted["mean_acceptance_length"],
            draft_acceptance_rate=counted["draft_acceptance_rate"],
            acceptance_histogram=tuple(counted["acceptance_histogram"]),
        )
    reason = completion.stop_reason
    return RoundOutput(
        completion.text,
        tuple(completion.token_ids),
        completion.finish_reason,
        None if reason is None else str(reason),
        Usage(len(output.prompt_token_ids or ()), num_tokens, output.num_cached_tokens or 0),
        metrics,
    )
