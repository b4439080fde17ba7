"""Converts between our types and vLLM's: requests to SamplingParams, vLLM's outputs to one RoundOutput a round, and its
errors to ours."""

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
from outrider.actors.vllm_adapter.client_text import shortened
from outrider.actors.vllm_adapter.structured_outputs import check_constraint
from outrider.cluster.link.messages import MAX_INT31, MessageError

CONSTRAINT = "sampling.structured_outputs"
_SOURCE_LINE = re.compile(r"\[[\d:]+\] \S+:\d+: ")
"""What xgrammar puts before its messages: time, file and line of its source."""


def sampling_params(
    request: GenerationRequest, prompt_len: int, max_model_len: int, structured_output: Mode = "all"
) -> SamplingParams:
    """Return vLLM's parameters, with our own in extra_args. structured_output: see ServingConfig.

    As over vLLM's HTTP API a max_tokens above max_model_len is refused, and one that the prompt leaves too little room
    for is lowered, before min_tokens is compared with it. Raises RequestError for what vLLM or a rank would refuse, and
    for a constraint that is not served.
    """
    settings = dict(request.sampling)
    try:
        TokenizeParams(
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
    """Return what goes to rank 0 through SamplingParams.extra_args."""
    ours: dict[str, Any] = {}
    limit = request.num_speculative_tokens if request.speculation else 0
    if limit is not None:
        ours["num_speculative_tokens"] = limit
    if request.tenant:
        ours["tenant"] = request.tenant
    if request.caller:
        ours["caller"] = request.caller
    if not request.learns:
        ours["learn"] = False
    if request.verification is not None:
        ours["verification"] = request.verification
    if (left_s := request.seconds_left()) is not None:
        ours["timeout_s"] = left_s
    return {EXTRA_ARGS_KEY: ours} if ours else {}


def blamed_by_ranks(error: MessageError, params: SamplingParams) -> str:
    """The parameter that `check_for_ranks` found wrong: to the drafter allowed tokens are biases, too, of 0."""
    name = error.field.removeprefix("Open.")
    if name != "biases":
        return name
    is_allowed = any(not 0 <= token <= MAX_INT31 for token in params.allowed_token_ids or ())
    return "allowed_token_ids" if is_allowed else "logit_bias"


def refusal(error: Exception, request: GenerationRequest) -> RequestError:
    """Return what vLLM refused, in its own words, behind the field's name."""
    problem = problem_in(error)
    for parameter in (getattr(error, "parameter", None), problem.partition(" ")[0], "structured_outputs"):
        if parameter in request.sampling:
            return RequestError(_field(parameter, request), problem, "change it or leave it out")
    return RequestError("sampling", problem, "change the request")


def problem_in(error: Exception) -> str:
    """Return vLLM's error on one line, with its cause, and without the value that VLLMValidationError's text adds."""
    problem = str(error.args[0] if error.args else error)
    if error.__cause__ is not None and str(error.__cause__) not in problem:
        problem = f"{problem}: {error.__cause__}"
    return shortened(_SOURCE_LINE.sub("", problem))


def _field(parameter: str, request: GenerationRequest) -> str:
    """Return the public field; of a constraint, with its kind."""
    kinds = request.sampling[parameter] if parameter == "structured_outputs" else ()
    return ".".join(["sampling", parameter, *kinds])


def _given_up(request: GenerationRequest, num_tokens: int) -> Exception:
    """Return the error for an answer that the engine gave up after num_tokens: due to its own LIMITS if it has any."""
    limits = [name for name in LIMITS if name in request.sampling]
    if not limits:
        return SamplingFailed(request.request_id)
    where = f"go on with after {num_tokens} tokens" if num_tokens else "begin an answer with"
    problem = f"leaves no token to {where}"
    if limits[0] == "structured_outputs" and not num_tokens:
        problem = f"does not compile, or {problem}"
    return RequestError(_field(limits[0], request), problem, "send what a text can match")


def is_of_request(engine_id: str, request_id: str, caller: int | None = None) -> bool:
    """Return whether engine_id is, or is part of, the request that caller calls request_id; None: any caller.

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
    """Call ``llm.generate``, traced where tracing is on. trace_headers: the caller's, W3C. options: more for vLLM."""
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
        # Also when it is not sampled: vLLM would begin a trace of its own otherwise.
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
    """Return one RoundOutput per answer that vLLM's output, a delta, is about; several with n > 1.

    num_tokens: tokens of each answer before this round, by index; brought up to date. rounds: where the tokens' origins
    are. report_cached_tokens: tell how much of the prompt was cached, and with it what others have asked. Raises
    SamplingFailed, and RequestError when the request itself may leave no token to choose.
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
    """None when the engine keeps no statistics. A step's times are on one clock of vLLM's, its arrival on another."""
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
    positions = completion.logprobs or ()
    if len(positions) != len(completion.token_ids):
        raise RuntimeError(
            f"request {request.request_id}: {len(positions)} logprobs for {len(completion.token_ids)} tokens"
        )
    return tuple(
        _token_logprobs(token_id, entries, wanted)
        for token_id, entries in zip(completion.token_ids, positions, strict=True)
    )


def _prompt_logprobs(output: RequestOutput, request: GenerationRequest) -> tuple[TokenLogprobs | None, ...]:
    """vLLM gives them once, whole, with each answer's first token: with n > 1 once per answer, all the same."""
    wanted = request.sampling.get("prompt_logprobs")
    if wanted is None or not output.outputs[0].token_ids:  # ended before its prompt was read
        return ()
    ids, positions = output.prompt_token_ids or (), output.prompt_logprobs or ()
    if len(positions) != len(ids):
        raise RuntimeError(f"request {request.request_id}: {len(positions)} prompt logprobs for {len(ids)} tokens")
    return tuple(
        None if entries is None else _token_logprobs(token_id, entries, wanted)
        for token_id, entries in zip(ids, positions, strict=True)
    )


def _token_logprobs(token_id: int, entries: Mapping[int, Logprob], wanted: int) -> TokenLogprobs:
    """entries: the token's own and the likeliest ones, by id; its own may be one of those."""
    own = entries[token_id]
    best = sorted((entry.rank, other, entry.logprob) for other, entry in entries.items() if entry.rank <= wanted)
    return TokenLogprobs(
        token_id, own.logprob, own.rank, tuple(TokenLogprob(other, logprob) for _, other, logprob in best)
    )
