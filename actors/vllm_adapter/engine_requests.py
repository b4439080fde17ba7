"""Converts requests to vLLM's SamplingParams, vLLM's outputs to one RoundOutput per round, and its errors to ours."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace
from itertools import pairwise
from typing import Any

from opentelemetry.trace import Span
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers.params import TokenizeParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.metrics.stats import RequestStateStats

from outrider.actors.observability import tracing
from outrider.actors.replica_calls import (
    LIMITS,
    GenerationRequest,
    RequestError,
    RequestTiming,
    RoundOutput,
    SamplingFailed,
    SpeculativeDecodingMetrics,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from outrider.actors.request_constraints import Mode
from outrider.actors.request_ids import scoped_id, unscoped
from outrider.actors.round.origins import RoundLog, TakenRounds
from outrider.actors.round.request import EXTRA_ARGS_KEY, check_for_ranks
from outrider.actors.vllm_adapter.error_text import shorten
from outrider.actors.vllm_adapter.structured_outputs import check_constraint
from outrider.cluster.link.messages import MAX_INT31, MessageError

CONSTRAINT = "sampling.structured_outputs"
_SOURCE_LINE = re.compile(r"\[[\d:]+\] \S+:\d+: ")
"""The time, file and line that xgrammar puts before its messages."""


def sampling_params(
    request: GenerationRequest, prompt_len: int, max_model_len: int, structured_output: Mode = "all"
) -> SamplingParams:
    """Returns vLLM's parameters, with ours in extra_args.

    As over vLLM's HTTP API, a max_tokens above max_model_len is refused, and one that does not fit beside the prompt is
    lowered before min_tokens is compared with it.

    structured_output: as in ServingConfig.

    Raises RequestError for what vLLM or a rank would refuse, and for a constraint that is not served.
    """
    settings = dict(request.sampling)
    try:
        TokenizeParams(  # for its checks alone
            max_total_tokens=max_model_len,
            max_output_tokens=settings.get("max_tokens", 0),
            max_total_tokens_param="max_model_len",
            max_output_tokens_param="max_tokens",
        )
        settings["max_tokens"] = min(settings.get("max_tokens", max_model_len), max_model_len - prompt_len)
        if (constraint := settings.get("structured_outputs")) is not None:
            settings["structured_outputs"] = structured = StructuredOutputsParams(**constraint)
            check_constraint(structured, CONSTRAINT, structured_output)
        params = SamplingParams(
            **settings, output_kind=RequestOutputKind.DELTA, extra_args=_round_options(request) or None
        )
    except (ValueError, TypeError, VLLMClientError) as error:
        raise refusal(error, request) from None
    try:
        check_for_ranks(params)
    except MessageError as error:
        raise RequestError(f"sampling.{blamed_by_ranks(error, params)}", error.problem, "change it") from None
    except (ValueError, KeyError) as error:
        raise RequestError("speculation.verification", str(error), "leave it out, or use coupled") from None
    return params


def _round_options(request: GenerationRequest) -> dict[str, Any]:
    """Returns the options for the Verifier, which go there in SamplingParams.extra_args."""
    ours: dict[str, Any] = {}
    limit = request.num_speculative_tokens if request.speculation else 0
    if limit is not None:
        ours["num_speculative_tokens"] = limit
    if request.tenant:
        ours["tenant"] = request.tenant
    if request.caller:
        ours["caller"] = request.caller
    if request.verification is not None:
        ours["verification"] = request.verification
    if (left_s := request.seconds_left()) is not None:
        ours["timeout_s"] = left_s
    return {EXTRA_ARGS_KEY: ours} if ours else {}


def blamed_by_ranks(error: MessageError, params: SamplingParams) -> str:
    """Returns the parameter that `check_for_ranks` refused. The link carries allowed tokens as biases of 0, too."""
    name = error.field.removeprefix("Open.")
    if name != "biases":
        return name
    is_allowed = any(not 0 <= token <= MAX_INT31 for token in params.allowed_token_ids or ())
    return "allowed_token_ids" if is_allowed else "logit_bias"


def refusal(error: Exception, request: GenerationRequest) -> RequestError:
    """Returns vLLM's refusal, in its own words, behind the field's name."""
    problem = problem_in(error)
    for parameter in (getattr(error, "parameter", None), problem.partition(" ")[0], "structured_outputs"):
        if parameter in request.sampling:
            return RequestError(_field(parameter, request), problem, "change it or leave it out")
    return RequestError("sampling", problem, "change the request")


def problem_in(error: Exception) -> str:
    """Returns vLLM's error and its cause on one line, without the value that VLLMValidationError's text adds."""
    problem = str(error.args[0] if error.args else error)
    if error.__cause__ is not None and str(error.__cause__) not in problem:
        problem = f"{problem}: {error.__cause__}"
    return shorten(_SOURCE_LINE.sub("", problem))


def _field(parameter: str, request: GenerationRequest) -> str:
    """Returns the public field of a parameter, with the kind of a constraint."""
    kinds = request.sampling[parameter] if parameter == "structured_outputs" else ()
    return ".".join(["sampling", parameter, *kinds])


def _given_up(request: GenerationRequest, num_tokens: int) -> Exception:
    """Returns the error for an answer that failed after num_tokens, naming the request's LIMITS if it has any."""
    limits = [name for name in LIMITS if name in request.sampling]
    if not limits:
        return SamplingFailed(request.request_id)
    where = f"go on with after {num_tokens} tokens" if num_tokens else "begin an answer with"
    problem = f"leaves no token to {where}"
    if limits[0] == "structured_outputs" and not num_tokens:
        problem = f"does not compile, or {problem}"
    return RequestError(_field(limits[0], request), problem, "send what a text can match")


def is_of_request(engine_id: str, request_id: str, caller: int | None = None) -> bool:
    """Returns whether engine_id is, or is part of, the request that caller calls request_id. None is any caller.

    vLLM's serving classes call a chat ``chatcmpl-ID``, a response, whose answer is ``resp_ID``, ``resp_ID_0``, and
    prompt i of a completion, whose answer is ``cmpl-ID``, ``cmpl-ID-i``.
    """
    scope, _, engine_id = engine_id.rpartition(" ")
    if caller is not None and scope != scoped_id(caller, "").rstrip():
        return False
    if engine_id in (request_id, f"chatcmpl-{request_id}", f"resp_{request_id}_0"):
        return True
    if request_id.startswith("resp_") and engine_id == f"{request_id}_0":
        return True
    completion, _, prompt = engine_id.rpartition("-")
    return prompt.isdigit() and completion.startswith("cmpl-") and completion in (request_id, f"cmpl-{request_id}")


def traced_generate(
    llm: Any, prompt: Any, params: Any, request_id: str, trace_headers: Mapping[str, str] | None = None, **options: Any
) -> AsyncGenerator[Any, None]:
    """Calls ``llm.generate``, traced where tracing is on.

    trace_headers: the caller's, in W3C's format. options: further arguments for vLLM.
    """
    if (tracer := tracing.process_tracer("target")) is None:
        outputs: AsyncGenerator[Any, None] = llm.generate(prompt, params, request_id, **options)
        return outputs
    parent = tracing.context_of(trace_headers or {})
    span = tracing.open_span(tracer, "outrider.target", parent, request_id=unscoped(request_id))
    return _traced(span, llm, prompt, params, request_id, options)


async def _traced(
    opened: AbstractContextManager[Span], llm: Any, prompt: Any, params: Any, request_id: str, options: dict[str, Any]
) -> AsyncGenerator[Any, None]:
    with opened as span:
        headers = tracing.headers_of(span)
        if span.is_recording():
            extra = dict(params.extra_args or {})
            extra[EXTRA_ARGS_KEY] = {**extra.get(EXTRA_ARGS_KEY, {}), "trace_headers": headers}
            params.extra_args = extra
        # Without headers vLLM would begin a trace of its own, even where this one is not sampled.
        stream = llm.generate(prompt, params, request_id, trace_headers=headers, **options)
        num_tokens = 0
        async with aclosing(stream):
            async for output in stream:
                num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                if output.finished:
                    reason = output.outputs[0].finish_reason if output.outputs else None
                    span.set_attributes(
                        {
                            "outrider.prompt_tokens": len(output.prompt_token_ids or ()),
                            "outrider.completion_tokens": num_tokens,
                            "outrider.cached_tokens": output.num_cached_tokens or 0,
                            "outrider.finish_reason": reason or "",
                        }
                    )
                yield output


def round_outputs(
    output: RequestOutput,
    request: GenerationRequest,
    num_tokens: dict[int, int],
    rounds: RoundLog,
    *,
    report_cached_tokens: bool = False,
) -> list[RoundOutput]:
    """Returns one RoundOutput for each answer in vLLM's output, a delta; several with n > 1.

    Args:
        num_tokens: the tokens of each answer before this round, by index; updated.
        rounds: the log that has the tokens' origins.
        report_cached_tokens: whether to report how much of the prompt was cached, which reveals what others have asked.

    Raises:
        SamplingFailed: the model's logits gave no next token.
        RequestError: the request's own limits may have left no next token.
    """
    outputs = []
    first = not num_tokens
    num_prompt_tokens, cached = len(output.prompt_token_ids or ()), output.num_cached_tokens or 0
    prompt_logprobs = _prompt_logprobs(output, request) if first else ()
    for completion in output.outputs:
        if completion.finish_reason == "error":
            raise _given_up(request, num_tokens.get(completion.index, 0))
        index = completion.index
        num_tokens[index] = num_tokens.get(index, 0) + len(completion.token_ids)
        taken = rounds.take(request.engine_id, index, len(completion.token_ids))
        round_output = _round_output(output, completion, request, prompt_logprobs, taken)
        if first or completion.finish_reason is not None:
            usage = Usage(num_prompt_tokens, num_tokens[index], cached if report_cached_tokens else 0)
            round_output = replace(round_output, usage=usage)
        outputs.append(round_output)
        prompt_logprobs = ()
    return outputs


def _round_output(
    output: RequestOutput,
    completion: CompletionOutput,
    request: GenerationRequest,
    prompt_logprobs: tuple[TokenLogprobs | None, ...],
    taken: TakenRounds,
) -> RoundOutput:
    delta = RoundOutput(
        text=completion.text,
        token_ids=tuple(completion.token_ids),
        index=completion.index,
        logprobs=_logprobs(completion, request),
        prompt_logprobs=prompt_logprobs,
        origins=taken.origins,
        num_rounds=taken.num_rounds,
    )
    if completion.finish_reason is None:
        return delta
    reason = completion.stop_reason
    return replace(
        delta,
        finish_reason=completion.finish_reason,
        stop_reason=None if reason is None else str(reason),
        speculative_decoding=_metrics(completion),
        timing=_timing(output.metrics),
    )


def _timing(stats: RequestStateStats | None) -> RequestTiming | None:
    """Returns where the time went, or None when the engine keeps no statistics.

    vLLM's step times are on another clock than its arrival time.
    """
    if stats is None:
        return None
    steps = (stats.queued_ts, stats.scheduled_ts, stats.first_token_ts, stats.last_token_ts)
    queue, prefill, decode = (after - before if after else 0.0 for before, after in pairwise(steps))
    return RequestTiming(queue, prefill, decode, max(0.0, time.time() - stats.arrival_time))


def _metrics(completion: CompletionOutput) -> SpeculativeDecodingMetrics:
    if completion.spec_decode_metrics is None:
        return SpeculativeDecodingMetrics()
    counted = completion.spec_decode_metrics.to_dict()
    fields = {name: counted[name] for name in SpeculativeDecodingMetrics.__dataclass_fields__}
    return SpeculativeDecodingMetrics(**{**fields, "acceptance_histogram": tuple(fields["acceptance_histogram"])})


def _logprobs(completion: CompletionOutput, request: GenerationRequest) -> tuple[TokenLogprobs, ...]:
    wanted = request.sampling.get("logprobs")
    if wanted is None:
        return ()
    return tuple(
        _token_logprobs(token_id, entries, wanted)
        for token_id, entries in zip(completion.token_ids, completion.logprobs or (), strict=True)
    )


def _prompt_logprobs(output: RequestOutput, request: GenerationRequest) -> tuple[TokenLogprobs | None, ...]:
    """Returns the prompt's logprobs. vLLM repeats them with each answer's first token."""
    wanted = request.sampling.get("prompt_logprobs")
    if wanted is None or not output.outputs[0].token_ids:  # ended before its prompt was read
        return ()
    return tuple(
        None if entries is None else _token_logprobs(token_id, entries, wanted)
        for token_id, entries in zip(output.prompt_token_ids or (), output.prompt_logprobs or (), strict=True)
    )


def _token_logprobs(token_id: int, entries: Mapping[int, Logprob], wanted: int) -> TokenLogprobs:
    """Converts a token's logprobs. entries: its own and the likeliest ones, by id."""
    own = entries[token_id]
    best = sorted((entry.rank, other, entry.logprob) for other, entry in entries.items() if entry.rank <= wanted)
    return TokenLogprobs(
        token_id, own.logprob, own.rank, tuple(TokenLogprob(other, logprob) for _, other, logprob in best)
    )
