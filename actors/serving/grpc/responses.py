"""Converts the outputs of target replicas to public response messages."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterable

from outrider.actors.replica_calls import (
    ModelInfo,
    RoundOutput,
    SpeculativeDecodingMetrics,
    TokenLogprobs,
    Usage,
)
from outrider.actors.round.origins import ACCEPTED, BONUS, PLAIN, RECOVERED, UNKNOWN
from outrider.actors.serving.grpc.requests import VERIFICATIONS
from outrider.cluster.installed import VLLM, installed_version
from outrider.cluster.link.messages import PROTOCOL_VERSION
from outrider.v1 import generation_pb2 as pb

logger = logging.getLogger("ray.serve.outrider.ingress")

_FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
}

_ORIGINS = {
    ACCEPTED: pb.TOKEN_ORIGIN_ACCEPTED,
    RECOVERED: pb.TOKEN_ORIGIN_RECOVERED,
    BONUS: pb.TOKEN_ORIGIN_BONUS,
    PLAIN: pb.TOKEN_ORIGIN_PLAIN,
    UNKNOWN: pb.TOKEN_ORIGIN_UNSPECIFIED,
}

_VERIFICATIONS = {name: number for number, name in VERIFICATIONS.items() if name is not None}


class ResponseBuilder:
    """Builds the response of a unary call from the outputs of its n answers."""

    def __init__(self, request_id: str, n: int) -> None:
        self._request_id = request_id
        self._texts: list[list[str]] = [[] for _ in range(n)]
        self._completions = [pb.Completion() for _ in range(n)]
        self._usages: list[Usage | None] = [None] * n
        self._prompt_logprobs: list[pb.TokenLogprobs] = []

    def add(self, output: RoundOutput) -> None:
        completion = self._completions[output.index]
        self._texts[output.index].append(output.text)
        completion.token_ids.extend(output.token_ids)
        completion.origins.extend(_origins(output))
        completion.logprobs.extend(_token_logprobs(output.logprobs))
        self._prompt_logprobs += _token_logprobs(output.prompt_logprobs)
        if output.finish_reason is not None:
            self._usages[output.index] = _finish(completion, output)

    def response(self) -> pb.GenerateResponse:
        """Returns the response. Raises RuntimeError for an answer without an end."""
        usages = [usage for usage in self._usages if usage is not None]
        if len(usages) != len(self._completions):
            raise RuntimeError("an answer has no end")
        for completion, text in zip(self._completions, self._texts, strict=True):
            completion.text = "".join(text)
        first = self._completions[0]
        response = pb.GenerateResponse(
            request_id=self._request_id,
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            metrics=first.metrics,
            usage=_usage(usages[0], sum(usage.completion_tokens for usage in usages)),
            completions=self._completions,
            prompt_logprobs=self._prompt_logprobs,
        )
        if first.HasField("stop_reason"):
            response.stop_reason = first.stop_reason
        return response


def stream_message(request_id: str, output: RoundOutput) -> pb.GenerateStreamResponse:
    message = pb.GenerateStreamResponse(
        request_id=request_id,
        text_delta=output.text,
        token_ids=output.token_ids,
        index=output.index,
        logprobs=_token_logprobs(output.logprobs),
        prompt_logprobs=_token_logprobs(output.prompt_logprobs),
        origins=_origins(output),
        num_rounds=output.num_rounds,
    )
    if output.finish_reason is not None:
        usage = _finish(message, output)
        message.usage.CopyFrom(_usage(usage, usage.completion_tokens))
    return message


def model_info_message(model: str, info: ModelInfo) -> pb.GetModelInfoResponse:
    return pb.GetModelInfoResponse(
        model=model,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        dtype=info.dtype,
        architecture=info.architecture,
        tokenizer=info.tokenizer,
        has_chat_template=info.has_chat_template,
        eos_token_ids=info.eos_token_ids,
        verifications=[_VERIFICATIONS[name] for name in info.verifications],
        default_verification=_VERIFICATIONS.get(info.default_verification or "", pb.VERIFICATION_UNSPECIFIED),
        methods=info.methods,
        num_speculative_tokens=info.num_speculative_tokens,
        tool_call_parser=info.tool_call_parser or "",
        reasoning_parser=info.reasoning_parser or "",
    )


def server_info_message(started_unix_s: float) -> pb.GetServerInfoResponse:
    response = pb.GetServerInfoResponse(
        outrider_version=installed_version("outrider"),
        vllm_version=installed_version(*VLLM),
        ray_version=installed_version("ray"),
        torch_version=installed_version("torch"),
        python_version=platform.python_version(),
        link_protocol_version=PROTOCOL_VERSION,
        api=pb.DESCRIPTOR.package,
    )
    response.start_time.FromNanoseconds(int(started_unix_s * 1e9))
    return response


def _origins(output: RoundOutput) -> list[pb.TokenOrigin]:
    """Returns one origin per token, unspecified where the target gave none."""
    origins = output.origins or (UNKNOWN,) * len(output.token_ids)
    if len(origins) != len(output.token_ids):
        raise RuntimeError(f"{len(origins)} origins for {len(output.token_ids)} tokens")
    return [_ORIGINS[origin] for origin in origins]


def _finish(message: pb.Completion | pb.GenerateStreamResponse, output: RoundOutput) -> Usage:
    """Fills in the fields of a finished answer but its usage, which is returned."""
    reason, stop_reason = output.finish_reason or "", output.stop_reason
    if reason not in _FINISH_REASONS:
        logger.warning("the engine ended an answer for a reason this API has no name for: %s", reason)
        stop_reason = stop_reason or reason
    message.finish_reason = _FINISH_REASONS.get(reason, pb.FINISH_REASON_ABORT)
    if stop_reason is not None:
        message.stop_reason = stop_reason
    metrics = output.speculative_decoding or SpeculativeDecodingMetrics()
    message.metrics.speculative_decoding.CopyFrom(pb.SpeculativeDecodingMetrics(**vars(metrics)))
    if output.timing is not None:
        message.metrics.timing.CopyFrom(pb.RequestTiming(**vars(output.timing)))
    if output.usage is None:
        raise RuntimeError("the target finished an answer without counting its tokens")
    return output.usage


def _usage(usage: Usage, completion_tokens: int) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=usage.prompt_tokens + completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _token_logprobs(entries: Iterable[TokenLogprobs | None]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs()
        if entry is None
        else pb.TokenLogprobs(
            token_id=entry.token_id,
            logprob=entry.logprob,
            rank=entry.rank,
            top=[pb.TokenLogprob(token_id=likely.token_id, logprob=likely.logprob) for likely in entry.top],
        )
        for entry in entries
    ]
